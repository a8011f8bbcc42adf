"""The client that evaluations ask servers with: what it reads, what it calls a fault, where it may listen."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import EngineError
from engine.evaluation import server_client
from engine.evaluation.server_client import Client, ServerFault, listening

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def whole_request(connection: socket.socket) -> bytes:
    """Head and body, which clients may send apart."""
    read = b""
    while b"\r\n\r\n" not in read:
        read += connection.recv(65536)
    head, _, body = read.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    while length and len(body) < int(length[1]):
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


@contextmanager
def answering(answer: bytes, transport: str | None = None) -> Iterator[tuple[Client, list[bytes]]]:
    """A server that reads one request and sends these bytes; and what it read."""
    heard: list[bytes] = []
    with listening(transport) as (place, address):

        def run() -> None:
            connection, _ = place.accept()
            with connection:
                heard.append(whole_request(connection))
                connection.sendall(answer)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield Client(address, "the-key", timeout_s=5), heard
        thread.join(5)


def document(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_request_carries_the_key_and_answer_is_read(transport: str):
    with answering(document(b'{"a": 1}', "404 Not Found"), transport) as (client, heard):
        assert client.transport == transport
        reply = client.fetch("/v1/x", {"b": [2]})
    assert (reply.status, reply.body) == (404, {"a": 1})
    head, _, body = heard[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/x HTTP/1.1\r\nHost: 127.0.0.1")
    assert b"authorization: Bearer the-key" in head
    assert body == b'{"b": [2]}'


def test_without_a_key_none_is_sent():
    with answering(document(b"{}")) as (client, heard):
        replace(client, key=None).fetch("/health")
    assert b"authorization" not in heard[0].lower()


def test_what_is_no_json_is_handed_on_as_text():
    with answering(document(b"kakeya_x 1\n", kind="text/plain; version=0.0.4")) as (client, _):
        assert client.fetch("/metrics").body == "kakeya_x 1\n"


def test_stream_is_read_by_events_without_comments():
    events = b'data: {"n": 1}\n\n: waiting\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'
    with answering(STREAM + events) as (client, _):
        assert list(client.stream("/v1/x", {})) == [{"n": 1}, {"n": 2}, None]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (STREAM + b'data: {"n": 1}\n\n', "ended its stream without"),
        (STREAM + b"data: {\n\n", "holds what is no JSON"),
        (document(b"{}"), "application/json where a stream was asked for"),
        (document(b"{}", "500 No", "text/event-stream"), "answered 500"),
        (b"nonsense\r\n\r\n", "got no whole answer"),
        (b"", "got no whole answer"),
    ],
)
def test_what_is_no_stream_is_a_fault_of_the_server(answer: bytes, message: str):
    with answering(answer) as (client, _), pytest.raises(ServerFault, match=message):
        list(client.stream("/v1/x", {}))


def test_json_that_is_none_is_a_fault_of_the_server():
    with answering(document(b"{")) as (client, _), pytest.raises(ServerFault, match="no JSON"):
        client.fetch("/health")


def test_nobody_there_is_a_fault_of_the_server():
    with listening() as (_, address):
        pass
    with pytest.raises(ServerFault, match="got no whole answer: ConnectionRefusedError"):
        Client(address).fetch("/health")


def test_no_other_machine_reaches_the_port():
    with listening("tcp") as (place, port):
        assert place.getsockname() == ("127.0.0.1", port)


def test_a_unix_socket_is_gone_with_its_folder():
    with listening("unix") as (_, path):
        assert Path(str(path)).is_socket()
    assert not Path(str(path)).parent.exists()


def test_long_socket_path_is_made_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    work, temporary = tmp_path / ("long" * 30) / "work", tmp_path / ("long" * 30) / "tmp"
    for folder in (work, temporary):
        folder.mkdir(parents=True)
    monkeypatch.chdir(work)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with listening("unix") as (_, path):
        assert str(path).startswith("../tmp/")


def refuse(monkeypatch: pytest.MonkeyPatch, *transports: str) -> None:
    """Do as a sandbox that does not let a process listen."""
    listen = server_client.listen

    def guarded(transport: str, path: str) -> socket.socket:
        if transport in transports:
            raise PermissionError(1, f"{transport} is not permitted")
        return listen(transport, path)

    monkeypatch.setattr(server_client, "listen", guarded)


def test_unix_socket_is_used_where_a_sandbox_closes_the_loopback(monkeypatch: pytest.MonkeyPatch):
    refuse(monkeypatch, "tcp")
    with listening() as (place, _):
        assert place.family == socket.AF_UNIX


def test_error_says_what_a_sandbox_must_leave(monkeypatch: pytest.MonkeyPatch):
    refuse(monkeypatch, "tcp", "unix")
    said = r"tcp: tcp is not permitted; unix: .* a loopback device or Unix"
    with pytest.raises(EngineError, match=said), listening():
        pass
