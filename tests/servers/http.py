"""Smart HTTP with basic authentication: nginx, fcgiwrap and git-http-backend."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.servers.processes import PATH, exec_path, free_port, program, running, wait_for_port, wait_until
from tests.servers.server import Server

_NGINX = """\
{user}
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/nginx-error.log;
events {{}}
http {{
  log_format git '$status $request_method $request_uri as "$remote_user" $http_git_protocol';
  access_log {folder}/access.log git;
  client_max_body_size 0;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    auth_basic "git";
    auth_basic_user_file {folder}/htpasswd;
    location / {{
      fastcgi_pass unix:{socket};
      fastcgi_param SCRIPT_FILENAME {backend};
      fastcgi_param GIT_PROJECT_ROOT {root};
      fastcgi_param GIT_HTTP_EXPORT_ALL "";
      fastcgi_param GIT_PROTOCOL $http_git_protocol;
      fastcgi_param PATH_INFO $uri;
      fastcgi_param QUERY_STRING $query_string;
      fastcgi_param REQUEST_METHOD $request_method;
      fastcgi_param CONTENT_TYPE $content_type;
      fastcgi_param CONTENT_LENGTH $content_length;
      fastcgi_param HTTP_CONTENT_ENCODING $http_content_encoding;
      fastcgi_param REMOTE_USER $remote_user;
      fastcgi_param REMOTE_ADDR $remote_addr;
      fastcgi_buffering off;
    }}
  }}
}}
"""


@contextlib.contextmanager
def http_server(repo: Path, user: str, password: str, folder: Path) -> Iterator[Server]:
    """Smart HTTP with basic authentication; each line of ``access.log`` ends in the protocol asked for."""
    nginx, wrapper, backend = program("nginx"), program("fcgiwrap"), exec_path() / "git-http-backend"
    folder.mkdir(parents=True)
    subprocess.run(["git", "-C", str(repo), "config", "http.receivepack", "true"], check=True)
    salt = os.urandom(8)
    digest = base64.b64encode(hashlib.sha1(password.encode() + salt).digest() + salt).decode()  # noqa: S324
    (folder / "htpasswd").write_text(f"{user}:{{SSHA}}{digest}\n")
    port = free_port()
    with contextlib.ExitStack() as stack:
        # A socket's path may hold some hundred characters, a test's folder may be deeper.
        socket_folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fcgi-", dir="/tmp")))
        (folder / "nginx.conf").write_text(
            _NGINX.format(
                folder=folder,
                user="" if os.getuid() else "user root;",
                port=port,
                socket=socket_folder / "s",
                backend=backend,
                root=repo.parent,
            )
        )
        env = {"PATH": PATH, "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
        log = stack.enter_context((folder / "server.log").open("ab"))
        stack.enter_context(running([wrapper, "-c", "4", "-s", f"unix:{socket_folder / 's'}"], log, env))
        stack.enter_context(running([nginx, "-e", "stderr", "-c", str(folder / "nginx.conf")], log, env))
        wait_for_port(port, log.name)
        wait_until((socket_folder / "s").exists, "fcgiwrap's socket", log.name)
        yield Server("http", port, f"/{repo.name}", user, password, {}, folder)
