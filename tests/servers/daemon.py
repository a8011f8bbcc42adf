"""Git's own daemon, read-only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.servers.processes import PATH, exec_path, free_port, program, running, wait_for_port
from tests.servers.server import Server


@contextlib.contextmanager
def git_daemon(repo: Path, folder: Path) -> Iterator[Server]:
    """Git's own daemon: anyone may fetch, no one may push."""
    program("git")
    folder.mkdir(parents=True)
    port = free_port()
    options = ["--export-all", f"--base-path={repo.parent}", "--listen=127.0.0.1", f"--port={port}"]
    daemon = exec_path() / "git-daemon"
    with (folder / "server.log").open("ab") as log:
        env = {"PATH": PATH, "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
        with running([str(daemon), "--reuseaddr", *options, str(repo)], log, env):
            wait_for_port(port, log.name)
            yield Server("git", port, f"/{repo.name}", "", "", {}, folder)
