"""HTTP of this process with itself: a place to listen that no other machine reaches, and a client for it.

The place is a free port of 127.0.0.1. Where a sandbox does not let a process listen there, not even for
itself, it is a Unix socket in a new folder of the process's temporary ones.
"""

import json
import os
import socket
import tempfile
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

from engine.errors import EngineError

LOOPBACK = "127.0.0.1"
TRANSPORTS = ("tcp", "unix")


class ServerFault(EngineError):
    """The server did not answer as it must; the message says what it did instead."""


@contextmanager
def listening(transport: str | None = None) -> Iterator[tuple[socket.socket, int | str]]:
    """A listening socket, for as long as the block lasts.

    Args:
        transport: one of `TRANSPORTS`; None: the first that works here.

    Yields:
        The socket, and where it listens: a port of 127.0.0.1, or the path of a Unix socket.

    Raises:
        EngineError: this process may listen nowhere.
    """
    refused = []
    for name in TRANSPORTS if transport is None else (transport,):
        with tempfile.TemporaryDirectory(prefix="kakeya-") as folder:
            try:
                place, address = _listen_on_port() if name == "tcp" else _listen_in(folder)
            except OSError as error:
                refused.append(f"{name}: {error.strerror or error}")
                continue
            with closing(place):
                yield place, address
            return
    raise EngineError(
        f"this process may not listen, not even for itself ({'; '.join(refused)}); "
        "where it runs in a sandbox, that must leave it a loopback device or Unix sockets in its own folders"
    )


def _listen_on_port() -> tuple[socket.socket, int]:
    place = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        place.bind((LOOPBACK, 0))
        place.listen()
        return place, int(place.getsockname()[1])
    except OSError:
        place.close()
        raise


def _listen_in(folder: str) -> tuple[socket.socket, str]:
    path = os.path.join(folder, "http")
    path = min(path, os.path.relpath(path), key=len)  # such a path may have some hundred characters
    place = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        place.bind(path)
        place.listen()
    except OSError:
        place.close()
        raise
    return place, path


@dataclass(frozen=True)
class Answered:
    """What came back.

    Attributes:
        status: of HTTP.
        body: JSON read, or text of another kind.
    """

    status: int
    body: Any


@dataclass(frozen=True)
class Client:
    """Asks one server; a connection of its own for each request.

    Attributes:
        address: a port of 127.0.0.1, or the path of a Unix socket.
        key: sent as a bearer token; None: no key is sent.
        timeout_s: without a byte from the server.
    """

    address: int | str
    key: str | None = None
    timeout_s: float = 300.0

    @property
    def transport(self) -> str:
        """One of `TRANSPORTS`."""
        return "tcp" if isinstance(self.address, int) else "unix"

    def with_key(self, key: str | None) -> "Client":
        """The same client with another key, or none."""
        return replace(self, key=key)

    def get(self, path: str) -> Answered:
        """What is at a path.

        Raises:
            ServerFault: there was no answer, or none that can be read.
        """
        with self._asked("GET", path, None) as response:
            return _read(response)

    def post(self, path: str, body: dict[str, Any]) -> Answered:
        """The answer to a JSON document.

        Raises:
            ServerFault: see `get`.
        """
        with self._asked("POST", path, body) as response:
            return _read(response)

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any] | None]:
        """The events of an answer as they come; closing the generator early closes the connection.

        Yields:
            The document of each event, and None for the mark of the end.

        Raises:
            ServerFault: the answer is no stream, holds what is no JSON, or ends without its mark.
        """
        with self._asked("POST", path, body) as response:
            kind = response.headers.get_content_type()
            if response.status != 200 or kind != "text/event-stream":
                raise ServerFault(
                    f"{path} answered {response.status} and {kind} where a stream was asked for"
                )
            ended = False
            while line := response.readline():
                if line.startswith(b"data:"):
                    data = line.removeprefix(b"data:").strip()
                    ended = data == b"[DONE]"
                    yield None if ended else _parsed(path, data)
            if not ended:
                raise ServerFault(f"{path} ended its stream without [DONE]")

    @contextmanager
    def _asked(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[HTTPResponse]:
        headers = {"content-type": "application/json"} if body is not None else {}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        with closing(_Connection(self.address, self.timeout_s)) as connection:
            try:
                connection.request(method, path, data, headers)
                yield connection.getresponse()
            except (OSError, HTTPException) as error:
                raise ServerFault(
                    f"{method} {path} got no whole answer: {type(error).__name__} {error}".strip()
                ) from error


class _Connection(HTTPConnection):
    """To a port of this machine, or a Unix socket."""

    def __init__(self, address: int | str, timeout_s: float) -> None:
        super().__init__(LOOPBACK, address if isinstance(address, int) else None, timeout=timeout_s)
        self._address = address

    def connect(self) -> None:
        if isinstance(self._address, int):
            super().connect()
            return
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._address)


def _read(response: HTTPResponse) -> Answered:
    data = response.read()
    if response.headers.get_content_type() != "application/json":
        return Answered(response.status, data.decode(errors="replace"))
    return Answered(response.status, _parsed("the answer", data))


def _parsed(what: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise ServerFault(f"{what} holds what is no JSON: {data[:80]!r}") from None
