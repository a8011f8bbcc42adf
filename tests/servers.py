"""Real git servers on 127.0.0.1 for one bare repository, and a proxy in front of them that can fail.

`http_server` (nginx, fcgiwrap, git-http-backend, basic authentication), `ssh_server` (sshd, an account that
may run git alone) and `git_daemon` (read-only) each own their configuration, keys and logs in a folder that
the test names. `cut_proxy` passes bytes on until it is told to stop. `scripts/install_test_servers.sh`
installs what they need; without it they fail and say so.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

INSTALLER = "scripts/install_test_servers.sh"
ACCOUNT = "kakeya-test-git"
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/local/sbin"))
_START_S = 10.0


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        scheme: `http`, `ssh` or `git`.
        port: Where it listens on 127.0.0.1.
        path: The repository's path in an address.
        user: Who to ask as; empty: nobody in particular.
        password: The password; empty: none.
        env: What git needs to reach it, beside the address.
        folder: Its configuration and logs.
    """

    scheme: str
    port: int
    path: str
    user: str
    password: str
    env: dict[str, str]
    folder: Path

    def address(
        self, *, port: int | None = None, user: str | None = None, password: str | None = None
    ) -> str:
        """The address as a user writes it, credentials in it; another port is that of a proxy."""
        name, word = self.user if user is None else user, self.password if password is None else password
        login = quote(name, safe="") + (":" + quote(word, safe="") if word else "")
        return f"{self.scheme}://{login + '@' if login else ''}127.0.0.1:{port or self.port}{self.path}"

    def log(self) -> str:
        """Everything the server wrote so far."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))


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
        env = {"PATH": _PATH, "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
        log = stack.enter_context((folder / "server.log").open("ab"))
        stack.enter_context(running([wrapper, "-c", "4", "-s", f"unix:{socket_folder / 's'}"], log, env))
        stack.enter_context(running([nginx, "-e", "stderr", "-c", str(folder / "nginx.conf")], log, env))
        wait_for_port(port, log.name)
        wait_until((socket_folder / "s").exists, "fcgiwrap's socket", log.name)
        yield Server("http", port, f"/{repo.name}", user, password, {}, folder)


@contextlib.contextmanager
def ssh_server(repo: Path, folder: Path) -> Iterator[Server]:
    """Git over SSH. Started by root, sshd lets in one account of its own, else the user who started it.

    The account may run nothing but git and read nothing of the tester's, so the repository moves to a folder
    of the account's; a link stays in its place.
    """
    sshd, keygen, ssh = program("sshd"), program("ssh-keygen"), program("ssh")
    folder.mkdir(parents=True)
    for name in ("host", "client"):
        argv = [keygen, "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(folder / name)]
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
    port = free_port()
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="git-", dir="/tmp")))
        account, path = stack.enter_context(_account_of(repo, place))
        public = (folder / "client.pub").read_text()
        (place / "authorized_keys").write_text(
            f'restrict,command="git-shell -c \\"$SSH_ORIGINAL_COMMAND\\"" {public}'
        )
        (folder / "sshd_config").write_text(
            _SSHD.format(port=port, folder=folder, keys=place / "authorized_keys", account=account)
        )
        host = (folder / "host.pub").read_text()
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {host}")
        log = stack.enter_context((folder / "server.log").open("ab"))
        env = {"PATH": _PATH}
        stack.enter_context(running([sshd, "-D", "-e", "-f", str(folder / "sshd_config")], log, env))
        wait_for_port(port, log.name)
        yield Server("ssh", port, str(path), account, "", ssh_env(folder, ssh), folder)


def ssh_env(folder: Path, ssh: str | None = None, *, key: str = "client") -> dict[str, str]:
    """How git reaches an `ssh_server` with one of the keys in its folder, whatever port is asked for."""
    options = (
        "-F /dev/null -o BatchMode=yes -o IdentitiesOnly=yes -o StrictHostKeyChecking=yes"
        f" -o HostKeyAlias=[127.0.0.1]:{(folder / 'known_hosts').read_text().split(']:')[1].split()[0]}"
        f" -o UserKnownHostsFile={folder}/known_hosts -o ConnectTimeout=10 -i {folder}/{key}"
    )
    return {"GIT_SSH_COMMAND": f"{ssh or program('ssh')} {options}"}


@contextlib.contextmanager
def git_daemon(repo: Path, folder: Path) -> Iterator[Server]:
    """Git's own daemon: everybody may fetch, nobody may push."""
    program("git")
    folder.mkdir(parents=True)
    port = free_port()
    options = ["--export-all", f"--base-path={repo.parent}", "--listen=127.0.0.1", f"--port={port}"]
    daemon = exec_path() / "git-daemon"
    with (folder / "server.log").open("ab") as log:
        env = {"PATH": _PATH, "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
        with running([str(daemon), "--reuseaddr", *options, str(repo)], log, env):
            wait_for_port(port, log.name)
            yield Server("git", port, f"/{repo.name}", "", "", {}, folder)


@dataclass
class Proxy:
    """A TCP proxy that passes bytes on, until one of its methods says otherwise.

    Attributes:
        port: Where it listens.
        delay_s: Seconds each connection is held before its first byte goes on.
        killed: How many connections it has ended in the middle.
    """

    upstream: int
    port: int
    delay_s: float = 0.0
    killed: int = 0
    _limit: int | None = None
    _silence: bool = False
    _listener: socket.socket | None = None
    _open: set[socket.socket] = field(default_factory=set)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def restore(self) -> None:
        """Listen (again)."""
        assert self._listener is None
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        """Refuse connections, and end those that are open."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._guard:
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def kill_after(self, count: int) -> None:
        """The next connection that sends more than `count` bytes dies there; the proxy is cut with it."""
        self._limit, self._silence = count, False

    def kill_before_answer(self, count: int) -> None:
        """The next connection that sends more than `count` bytes arrives whole, and gets no answer."""
        self._limit, self._silence = count, True

    def _kill(self) -> None:
        self.cut()
        self.killed += 1

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            near,
            socket.create_connection(("127.0.0.1", self.upstream)) as far,
        ):
            with self._guard:
                self._open |= {near, far}
            time.sleep(self.delay_s)
            muted = threading.Event()
            back = threading.Thread(target=self._down, args=(far, near, muted), daemon=True)
            back.start()
            self._up(near, far, muted)
            back.join(30)
            with self._guard:
                self._open -= {near, far}

    def _up(self, near: socket.socket, far: socket.socket, muted: threading.Event) -> None:
        sent = 0
        with contextlib.suppress(OSError):
            while chunk := near.recv(1 << 14):
                if self._limit is not None and sent + len(chunk) > self._limit:
                    chunk = chunk if self._silence else chunk[: self._limit - sent]
                    self._limit = None
                    if not self._silence:
                        far.sendall(chunk)
                        self._kill()
                        return
                    muted.set()
                far.sendall(chunk)
                sent += len(chunk)
        with contextlib.suppress(OSError):
            far.shutdown(socket.SHUT_WR)

    def _down(self, far: socket.socket, near: socket.socket, muted: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while chunk := far.recv(1 << 14):
                if muted.is_set():
                    time.sleep(0.5)  # the server does what it was asked for; nobody hears of it
                    self._kill()
                    return
                near.sendall(chunk)
        with contextlib.suppress(OSError):
            near.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def cut_proxy(server: Server) -> Iterator[Proxy]:
    """A proxy in front of a server; `Server.address(port=proxy.port)` goes through it."""
    proxy = Proxy(server.port, free_port())
    proxy.restore()
    try:
        yield proxy
    finally:
        proxy.cut()


def program(name: str) -> str:
    """The path of a program.

    Raises:
        AssertionError: It is not installed; the message says how to install it.
    """
    found = shutil.which(name, path=_PATH)
    assert found, f"{name} is not installed, and these tests need it: run {INSTALLER} (as root on Debian)"
    return found


def exec_path() -> Path:
    """Where git keeps its own programs."""
    done = subprocess.run([program("git"), "--exec-path"], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(argv: list[str], log: object, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A server process and all it starts, ended at the end."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=log,  # type: ignore[call-overload]
        stderr=log,
        env=env,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_for_port(port: int, log: str) -> None:
    """Wait until something listens."""

    def answers() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    wait_until(answers, f"a server on port {port}", log)


def wait_until(condition: object, what: str, log: str) -> None:
    """Wait for a server; fail with what it wrote."""
    assert callable(condition)
    deadline = time.monotonic() + _START_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come up; it wrote: {Path(log).read_text(errors='replace')}")
        time.sleep(0.02)


@contextlib.contextmanager
def _account_of(repo: Path, place: Path) -> Iterator[tuple[str, Path]]:
    """The account git runs under, and where it finds the repository."""
    if os.getuid() != 0:
        yield pwd.getpwuid(os.getuid()).pw_name, repo
        return
    try:
        entry = pwd.getpwnam(ACCOUNT)
    except KeyError:
        raise AssertionError(f"there is no account {ACCOUNT}: run {INSTALLER} as root") from None
    moved = place / repo.name
    shutil.move(repo, moved)
    repo.symlink_to(moved)
    for path in (place, moved, *moved.rglob("*")):
        os.chown(path, entry.pw_uid, entry.pw_gid, follow_symlinks=False)
    place.chmod(0o755)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    try:
        yield ACCOUNT, moved
    finally:
        repo.unlink()


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

_SSHD = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
PidFile {folder}/sshd.pid
AuthorizedKeysFile {keys}
AllowUsers {account}
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin forced-commands-only
AcceptEnv GIT_PROTOCOL
LogLevel INFO
"""
