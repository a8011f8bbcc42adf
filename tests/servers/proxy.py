"""A proxy in front of a server: it passes bytes on until it is told to fail."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.servers.processes import free_port
from tests.servers.server import Server


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
                    time.sleep(0.5)  # the server does what it was asked for; the client does not learn of it
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
