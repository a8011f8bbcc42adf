"""What stands in front of the server: raw bytes at a real socket, with and without a key, honest and not.

Whatever comes, nobody gets in without a key, nothing ends in a 5xx or hangs, and neither a traceback nor
anything that was said is in the log.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest

from engine.server.app import AccessGuard, AccessRules, BoundedProtocol, Message, Send
from engine.server.metrics import Metrics
from engine.server.scheduler import SchedulerStats
from engine.server.serve import ServerSettings, _listening
from tests.engine.server.door import (
    BODY_S,
    JSON_TYPE,
    KEY,
    Door,
    error,
    head,
    status,
)

AROUND = [
    "/v1/models",
    "//v1/models",
    "/v1/models/",
    "/v1%2fmodels",
    "/v1/./models",
    "/health/../v1/models",
    "/health/..%2fv1/models",
    "/health%2f..%2fv1/models",
    "/health;/v1/models",
    "/health/",
    "/health%00",
    "/HEALTH",
    "/%68ealth/",
    "/v1/models?/health",
    "/v1/models#/health",
    "http://127.0.0.1/v1/models",
    "http://127.0.0.1/health",
    "*",
    "/v1/models/..%2f..%2fhealth",
    "/openapi.json",
    "/metrics",
    "/docs",
    "/v1/responses",
    "/v1/models/%ff%fe",
]

pytestmark = pytest.mark.usefixtures("discreet")


@pytest.mark.parametrize("path", AROUND)
def test_no_spelling_of_a_path_gets_around_the_key(door: Door, path: str):
    answer = door.send(head(path=path, key=None))
    assert status(answer) == 401
    assert error(answer)["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", AROUND)
def test_no_spelling_of_a_path_breaks_anything_for_who_has_a_key(door: Door, path: str):
    assert status(door.send(head(path=path))) in {200, 307, 404, 501}


@pytest.mark.parametrize("name", ["a" * 5000, "%00", "@", "demo@", "%F0%9F%98%80"])
def test_names_of_models_that_are_none_are_refused_briefly(door: Door, name: str):
    answer = door.send(head(path=f"/v1/models/{name}"))
    assert status(answer) in {400, 404}
    assert len(answer) < 1500


@pytest.mark.parametrize(
    "key",
    ["", "x", KEY[:-1], KEY + "x", KEY.upper(), "\xff\xfe\x80", "a" * 50_000, f'"{KEY}"', f"{KEY},{KEY}"],
)
def test_only_the_key_itself_opens(door: Door, key: str):
    assert status(door.send(head(key=key))) == 401


def test_of_two_keys_the_first_counts(door: Door):
    assert status(door.send(head("GET", "/v1/models", f"Authorization: Bearer {KEY}", key="another"))) == 401


@pytest.mark.parametrize("line", [f"Basic {KEY}", KEY, f"bearer{KEY}", f"Bearer Bearer {KEY}"])
def test_other_schemes_do_not_open(door: Door, line: str):
    assert status(door.send(head("GET", "/v1/models", f"Authorization: {line}", key=None))) == 401


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "127.0.0.1.evil.example",
        "evil.example:8080",
        "localhost.",
        "localhost:8080@evil.example",
        "127.0.0.1:80:80",
        "127.0.0.1:x",
        "[::1",
        "\xe9\xff",
    ],
)
def test_hosts_that_are_not_this_one_are_refused(door: Door, host: str):
    answer = door.send(head(host=host))
    assert status(answer) == 421
    assert error(answer)["code"] == "wrong_host"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:80", "localhost:1", "LOCALHOST", "[::1]", "[::1]:80"]
)
def test_hosts_that_are_this_one_are_let_in(door: Door, host: str):
    assert status(door.send(head(host=host))) == 200


def test_a_request_of_http_1_0_names_its_host_too(door: Door):
    assert status(door.send(head(version="1.0", close=False))) == 200
    assert status(door.send(head(version="1.0", host=None, close=False))) == 421


@pytest.mark.parametrize("host", ["Host: evil.example", "Host: 127.0.0.1"])
def test_two_hosts_are_no_http(door: Door, host: str):
    assert status(door.send(head("GET", "/v1/models", host))) == 400


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "", "\xff", "http://127.0.0.1"])
def test_web_pages_are_refused(door: Door, origin: str):
    assert status(door.send(head("GET", "/health", f"Origin: {origin}", key=None))) == 403


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "FOO", "HEAD"])
@pytest.mark.parametrize(("path", "allowed"), [("/v1/models", "GET"), ("/v1/chat/completions", "POST")])
def test_a_method_that_a_path_does_not_have_is_refused_with_those_it_has(
    door: Door, method: str, path: str, allowed: str
):
    answer = door.send(head(method, path))
    assert status(answer) == 405
    assert f"allow: {allowed}".encode() in answer.lower().replace(allowed.lower().encode(), allowed.encode())


def test_requests_in_one_connection_are_looked_at_one_by_one(door: Door):
    several = head(close=False) + head(path="/health", key=None, close=False) + head(key=None)
    answers = door.send(several).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"200", b"401"]


def test_many_headers_are_taken_and_huge_ones_are_not(door: Door):
    assert status(door.send(head("GET", "/v1/models", *(f"X-{n}: a" for n in range(1000))))) == 200
    answer = door.send(head("GET", "/v1/models", "X-Long: " + "a" * 2**20))
    assert not answer or status(answer) == 400  # hung up on while it was still talking, it may hear nothing


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("Content-Length: 99999999999999999",), 413),
        (("Content-Length: 1048577",), 413),
        (("Content-Length: " + "9" * 5000,), 400),
        (("Content-Length: -5",), 400),
        (("Content-Length: \xb2",), 400),
        (("Content-Length: 3", "Content-Length: 4"), 400),
        ((), 400),
    ],
)
def test_odd_lengths_are_refused_before_any_body(door: Door, lines: tuple[str, ...], expected: int):
    assert status(door.send(head("POST", "/v1/chat/completions", JSON_TYPE, *lines))) == expected


def test_a_chunked_body_is_counted_as_it_comes(door: Door):
    chunk = b"10000\r\n" + b"a" * 2**16 + b"\r\n"
    opening = head("POST", "/v1/chat/completions", JSON_TYPE, "Transfer-Encoding: chunked")
    assert status(door.send(opening + 16 * chunk + b"1\r\na\r\n")) == 413  # it has not ended


@pytest.mark.parametrize("pieces", [0, 3])
def test_a_body_that_does_not_end_is_not_waited_for(door: Door, pieces: int):
    opening = head("POST", "/v1/chat/completions", JSON_TYPE, "Transfer-Encoding: chunked")
    answer = door.send(opening, then=[b"1\r\n{\r\n"] * pieces, pause=BODY_S / 8)
    assert status(answer) == 408
    assert error(answer)["code"] == "too_slow"


def test_bytes_that_are_no_http_are_refused(door: Door):
    assert status(door.send(b"\x16\x03\x01\x00\xa5\x01\x00" + b"\0" * 200 + b"\r\n\r\n")) == 400


def test_connections_send_at_once(door: Door):
    with _listening(ServerSettings(port=0)) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            # what asyncio asks for before it turns Nagle's algorithm off
            assert accepted.proto == socket.IPPROTO_TCP


def test_who_sends_no_head_in_time_is_let_go(door: Door, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BoundedProtocol, "head_s", 0.3)
    for begun in (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow:"):
        with socket.create_connection(("127.0.0.1", door.port), 10) as connection:
            connection.sendall(begun)
            assert connection.recv(100) == b""
    with socket.create_connection(("127.0.0.1", door.port), 10) as connection:
        whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        connection.sendall(whole)
        assert b"200" in connection.recv(1000)
        connection.sendall(whole[:20])  # the next head begins and does not end
        while connection.recv(1000):
            continue


def test_any_web_page_may_ask_where_any_was_allowed():
    async def served(scope: object, receive: object, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def asked(origins: tuple[str, ...]) -> int:
        said: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b""}

        async def send(message: Message) -> None:
            said.append(message)

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/v1/models",
            "headers": [(b"origin", b"https://a.b")],
        }
        await AccessGuard(served, AccessRules(origins=origins), Metrics(SchedulerStats, lambda: 0))(
            scope, receive, send
        )
        return int(said[0]["status"])

    assert [asyncio.run(asked(origins)) for origins in (("*",), ("https://a.b",), ())] == [200, 200, 403]


def test_connections_beyond_the_bound_are_let_go(door: Door, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BoundedProtocol, "most", 3)
    held = [socket.create_connection(("127.0.0.1", door.port), 10) for _ in range(4)]
    try:
        with suppress(ConnectionResetError):
            assert held[-1].recv(10) == b""
    finally:
        for connection in held:
            connection.close()
    monkeypatch.undo()
    assert status(door.send(head("GET", "/health"))) == 200
