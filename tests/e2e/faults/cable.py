"""A git daemon that takes pushes, and the cable between it and one runner, which can be cut or fall silent.

Each runner has a cable of its own although all of them name the one address: git reaches a ``git://`` address
through the program that its environment names (GIT_PROXY_COMMAND), and that one goes through the cable.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.faults import procs
from tests.fixtures.repo import RepoFixture

_CHUNK = 1 << 14
_RELAY = """\
#!{python} -IS
import os, socket, threading

line = socket.create_connection(("127.0.0.1", {port}))


def send():
    while data := os.read(0, 65536):
        line.sendall(data)
    line.shutdown(socket.SHUT_WR)


threading.Thread(target=send, daemon=True).start()
while data := line.recv(65536):
    os.write(1, data)
"""


class Cable:
    """What one runner reaches the server through.

    Args:
        server: The server's port on 127.0.0.1.
        folder: Where the relay program is written.
        name: Of the program.
    """

    def __init__(self, server: int, folder: Path, name: str) -> None:
        self._server = server
        self._whole = threading.Event()
        self._whole.set()
        self._cut = False
        self._ends: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._relay = folder / f"{name}-relay"
        port = self._listener.getsockname()[1]
        self._relay.write_text(_RELAY.format(python=sys.executable, port=port))
        self._relay.chmod(0o755)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def env(self) -> dict[str, str]:
        """What git needs in its environment to go through this cable."""
        return {"GIT_PROXY_COMMAND": str(self._relay)}

    def cut(self) -> None:
        """End every connection, and each new one at once."""
        self._cut = True
        for end in list(self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def silence(self) -> None:
        """Pass nothing on and say nothing, as a dead radio link does; what was sent waits."""
        self._whole.clear()

    def mend(self) -> None:
        """Let everything through again."""
        self._cut = False
        self._whole.set()

    def close(self) -> None:
        """Take it away for good."""
        self.mend()
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._cut:
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self._server))
            self._ends |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                self._whole.wait()
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def served(repo: RepoFixture) -> Iterator[int]:
    """A git daemon that lets everybody push to the repository's remote; its port."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = int(found.getsockname()[1])
    argv = ["git", "daemon", "--export-all", "--enable=receive-pack", "--reuseaddr", "--listen=127.0.0.1"]
    argv += [f"--port={port}", f"--base-path={repo.root}", str(repo.remote)]
    with (repo.root / "daemon.log").open("ab") as log:
        daemon = subprocess.Popen(argv, env=repo.env, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert time.monotonic() < deadline, (repo.root / "daemon.log").read_text()
                time.sleep(0.05)
        yield port
    finally:
        procs.end_all(repo.remote)
        daemon.wait(10)
