"""The real server at a socket of this process, and requests as raw bytes."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn

from engine.registry import Places, Registry
from engine.server.app import BoundedProtocol, new_app
from engine.server.metrics import Metrics
from engine.server.scheduler import Scheduler, SchedulerLimits
from engine.server.serve import HttpServer, ServerSettings, _listening, model_finder, preload
from engine.server.service import RequestLimits, Service

KEY = "0123456789abcdef-guard"
BODY_S = 0.4  # the time of a body here
MARK = "sesame"  # said in every conversation
LONG = 990_000  # characters: just below the largest body
PATIENCE_S = 20.0
JSON_TYPE = "Content-Type: application/json"


@dataclass(frozen=True)
class RawServer:
    """A server that listens."""

    port: int

    def send(self, data: bytes, *, then: list[bytes] | None = None, pause: float = 0.0) -> bytes:
        """All that comes back until the server closes the connection.

        Args:
            data: sent at once.
            then: sent after it, with a pause before each.
            pause: seconds.

        Raises:
            TimeoutError: nothing more came, and the connection stayed open.
        """
        received = b""
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE_S) as connection:
            try:
                connection.sendall(data)
                for piece in then or []:
                    time.sleep(pause)
                    connection.sendall(piece)
                while piece := connection.recv(65536):
                    received += piece
            except (ConnectionResetError, BrokenPipeError):
                return received  # refused while it was still being sent
        return received


@contextmanager
def opened(registry: Path | None = None, **settings: Any) -> Iterator[RawServer]:
    """A server of the shipped registry, or of another, whose bodies have little time."""
    serving = ServerSettings(port=0, largest_body=2**20, **{"keys": (KEY,), **settings})
    serving.check()
    models = Registry.load(registry)
    scheduler = Scheduler(model_finder(Places.of_machine(), download=False), SchedulerLimits())
    service = Service(models, scheduler, RequestLimits(max_tokens=64, default_tokens=2))
    metrics = Metrics(lambda: scheduler.stats, lambda: service.admitted)
    app = new_app(service, metrics, replace(serving.rules, body_s=BODY_S))
    config = uvicorn.Config(
        app, http=BoundedProtocol, log_config=None, access_log=False, timeout_graceful_shutdown=5
    )
    scheduler.start()
    preload(scheduler, models)
    with _listening(serving) as listening:
        server = HttpServer(config, service, grace_s=5)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield RawServer(listening.getsockname()[1])
        server.should_exit = True
        thread.join(10)
    scheduler.stop()
    assert not thread.is_alive()


def refuse_talk(records: Sequence[logging.LogRecord]) -> None:
    """A log holds neither a traceback nor anything that was said."""
    for record in records:
        assert record.exc_info is None, f"a traceback in the log: {record.getMessage()}"
        assert MARK not in record.getMessage(), "what was said is in the log"


def head(
    method: str = "GET",
    path: str = "/v1/models",
    *more: str,
    key: str | None = KEY,
    host: str | None = "127.0.0.1",
    version: str = "1.1",
    close: bool = True,
) -> bytes:
    lines = [f"{method} {path} HTTP/{version}"]
    lines += [] if host is None else [f"Host: {host}"]
    lines += [] if key is None else [f"Authorization: Bearer {key}"]
    lines += ["Connection: close"] if close else []
    return "\r\n".join([*lines, *more, "", ""]).encode("latin-1")


def post(body: bytes | dict[str, Any], path: str = "/v1/chat/completions", *more: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head("POST", path, "Content-Type: application/json", f"Content-Length: {len(data)}", *more) + data


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Say {MARK}."}]
    return {"model": "demo", "messages": messages, "max_tokens": 2, **fields}


def with_raw(field: str, value: str) -> bytes:
    """A chat completion with a field as it is written."""
    body = json.dumps(chat())
    return f'{body[:-1]}, "{field}": {value}}}'.encode()


def status(answer: bytes) -> int:
    line, _, _ = answer.partition(b"\r\n")
    assert line.startswith(b"HTTP/1.1 "), f"no answer: {answer[:100]!r}"
    return int(line.split()[1])


def error(answer: bytes) -> dict[str, Any]:
    _, _, body = answer.partition(b"\r\n\r\n")
    found = json.loads(body)["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found
