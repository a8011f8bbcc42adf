"""Access to the server: raw bytes at a real socket, with and without a key, valid and not.

Without a key nothing is served, nothing ends in a 5xx or hangs, and neither a traceback nor
anything that was said is in the log.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest

from engine.server.app import AccessGuard, AccessRules, BoundedProtocol, GuardedCORS, Message, Send
from engine.server.metrics import Metrics
from engine.server.scheduler import SchedulerStats
from engine.server.serve import ServerSettings, _listening
from tests.engine.server.raw_server import (
    BODY_S,
    JSON_TYPE,
    KEY,
    RawServer,
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
    "/v1/embeddings",
    "/models",
    "//models",
    "/models/../health",
    "/v1/models/%ff%fe",
]

pytestmark = pytest.mark.usefixtures("quiet_log")


@pytest.mark.parametrize("path", AROUND)
def test_no_spelling_of_a_path_avoids_the_key(raw_server: RawServer, path: str):
    answer = raw_server.send(head(path=path, key=None))
    assert status(answer) == 401
    assert error(answer)["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", AROUND)
def test_no_spelling_of_a_path_with_a_key_causes_an_error(raw_server: RawServer, path: str):
    assert status(raw_server.send(head(path=path))) in {200, 307, 404, 501}


@pytest.mark.parametrize("name", ["a" * 5000, "%00", "@", "demo@", "%F0%9F%98%80"])
def test_unknown_model_names_are_refused_briefly(raw_server: RawServer, name: str):
    answer = raw_server.send(head(path=f"/v1/models/{name}"))
    assert status(answer) in {400, 404}
    assert len(answer) < 1500


@pytest.mark.parametrize(
    "key",
    ["", "x", KEY[:-1], KEY + "x", KEY.upper(), "\xff\xfe\x80", "a" * 50_000, f'"{KEY}"', f"{KEY},{KEY}"],
)
def test_only_the_exact_key_is_accepted(raw_server: RawServer, key: str):
    assert status(raw_server.send(head(key=key))) == 401


def test_of_two_keys_the_first_counts(raw_server: RawServer):
    assert (
        status(raw_server.send(head("GET", "/v1/models", f"Authorization: Bearer {KEY}", key="another")))
        == 401
    )


@pytest.mark.parametrize("line", [f"Basic {KEY}", KEY, f"bearer{KEY}", f"Bearer Bearer {KEY}"])
def test_other_schemes_are_refused(raw_server: RawServer, line: str):
    assert status(raw_server.send(head("GET", "/v1/models", f"Authorization: {line}", key=None))) == 401


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "127.0.0.1.evil.example",
        "evil.example:8080",
        "localhost.evil.example",
        "notlocalhost",
        "host.docker.internal",
        "128.0.0.1",
        "2130706433",
        "localhost:8080@evil.example",
        "127.0.0.1:80:80",
        "127.0.0.1:x",
        "[::1",
        "\xe9\xff",
    ],
)
def test_hosts_that_are_not_this_one_are_refused(raw_server: RawServer, host: str):
    answer = raw_server.send(head(host=host))
    assert status(answer) == 421
    assert error(answer)["code"] == "wrong_host"


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.0.0.1:80", "127.8.9.10", "localhost:1", "LOCALHOST", "[::1]", "[::1]:80"),
        *("localhost.", "localhost.:8080", "kakeya.localhost", "Kakeya.LocalHost:1", "[0:0:0:0:0:0:0:1]"),
    ],
)
def test_hosts_that_are_this_one_are_let_in(raw_server: RawServer, host: str):
    assert status(raw_server.send(head(host=host))) == 200


@pytest.mark.parametrize("host", ["host.docker.internal", "host.docker.internal:8080", "mac.example"])
def test_the_refusal_of_a_host_says_which_flag_lets_it_in(raw_server: RawServer, host: str):
    message = error(raw_server.send(head(host=host)))["message"]
    name = host.partition(":")[0]
    assert message.endswith(f"start it with --allow-host {name}")
    assert ("container" in message) == (name == "host.docker.internal")


@pytest.mark.parametrize("body", [b"2\r\n{}\r\n0\r\n\r\n", b"{}"])
@pytest.mark.parametrize("order", [1, -1])
def test_two_kinds_of_length_are_refused_and_the_connection_ends(
    raw_server: RawServer, body: bytes, order: int
):
    lines = ["Content-Length: 2", "Transfer-Encoding: chunked"][::order]
    opening = head("POST", "/v1/chat/completions", JSON_TYPE, *lines, close=False)
    smuggled = head(path="/v1/models", close=False)
    answer = raw_server.send(opening + body + smuggled)  # it returns once the connection is closed
    assert status(answer) == 400
    assert answer.count(b"HTTP/1.1") == 1
    assert b"connection: close" in answer.lower()
    if body != b"{}":  # which is no chunk: uvicorn's own answer
        assert error(answer)["code"] == "ambiguous_length"


def test_a_request_of_http_1_0_names_its_host_too(raw_server: RawServer):
    assert status(raw_server.send(head(version="1.0", close=False))) == 200
    assert status(raw_server.send(head(version="1.0", host=None, close=False))) == 421


@pytest.mark.parametrize("host", ["Host: evil.example", "Host: 127.0.0.1"])
def test_two_host_headers_are_refused(raw_server: RawServer, host: str):
    assert status(raw_server.send(head("GET", "/v1/models", host))) == 400


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "", "\xff", "http://127.0.0.1"])
def test_web_pages_are_refused(raw_server: RawServer, origin: str):
    assert status(raw_server.send(head("GET", "/health", f"Origin: {origin}", key=None))) == 403


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "FOO", "HEAD"])
@pytest.mark.parametrize(("path", "allowed"), [("/v1/models", "GET"), ("/v1/chat/completions", "POST")])
def test_a_wrong_method_is_refused_with_the_allowed_one(
    raw_server: RawServer, method: str, path: str, allowed: str
):
    answer = raw_server.send(head(method, path))
    assert status(answer) == 405
    assert f"allow: {allowed}".encode() in answer.lower().replace(allowed.lower().encode(), allowed.encode())


def test_every_request_of_a_connection_is_checked(raw_server: RawServer):
    several = head(close=False) + head(path="/health", key=None, close=False) + head(key=None)
    answers = raw_server.send(several).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"200", b"401"]


def test_many_headers_are_accepted_and_huge_ones_refused(raw_server: RawServer):
    assert status(raw_server.send(head("GET", "/v1/models", *(f"X-{n}: a" for n in range(1000))))) == 200
    answer = raw_server.send(head("GET", "/v1/models", "X-Long: " + "a" * 2**20))
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
def test_invalid_lengths_are_refused_before_the_body(
    raw_server: RawServer, lines: tuple[str, ...], expected: int
):
    assert status(raw_server.send(head("POST", "/v1/chat/completions", JSON_TYPE, *lines))) == expected


def test_a_chunked_body_is_counted_as_it_comes(raw_server: RawServer):
    chunk = b"10000\r\n" + b"a" * 2**16 + b"\r\n"
    opening = head("POST", "/v1/chat/completions", JSON_TYPE, "Transfer-Encoding: chunked")
    assert status(raw_server.send(opening + 16 * chunk + b"1\r\na\r\n")) == 413  # it has not ended


@pytest.mark.parametrize("pieces", [0, 3])
def test_an_endless_body_times_out(raw_server: RawServer, pieces: int):
    opening = head("POST", "/v1/chat/completions", JSON_TYPE, "Transfer-Encoding: chunked")
    answer = raw_server.send(opening, then=[b"1\r\n{\r\n"] * pieces, pause=BODY_S / 8)
    assert status(answer) == 408
    assert error(answer)["code"] == "too_slow"


def test_bytes_that_are_not_http_are_refused(raw_server: RawServer):
    assert status(raw_server.send(b"\x16\x03\x01\x00\xa5\x01\x00" + b"\0" * 200 + b"\r\n\r\n")) == 400


def test_connections_send_at_once(raw_server: RawServer):
    with _listening(ServerSettings(port=0)) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            # what asyncio asks for before it turns Nagle's algorithm off
            assert accepted.proto == socket.IPPROTO_TCP


def test_connections_without_a_head_time_out(raw_server: RawServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BoundedProtocol, "head_s", 0.3)
    for begun in (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow:"):
        with socket.create_connection(("127.0.0.1", raw_server.port), 10) as connection:
            connection.sendall(begun)
            assert connection.recv(100) == b""
    with socket.create_connection(("127.0.0.1", raw_server.port), 10) as connection:
        whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        connection.sendall(whole)
        assert b"200" in connection.recv(1000)
        connection.sendall(whole[:20])  # the next head begins and does not end
        while connection.recv(1000):
            continue


def test_a_preflight_request_with_two_lengths_is_refused():
    async def asked(*extra: tuple[bytes, bytes]) -> int:
        sent: list[Message] = []

        async def note(message: Message) -> None:
            sent.append(message)

        first = [(b"origin", b"https://a.b"), (b"access-control-request-method", b"POST")]
        scope = {"type": "http", "method": "OPTIONS", "path": "/", "headers": [*first, *extra]}
        await GuardedCORS(served_nowhere, ["https://a.b"], allow_methods=["POST"])(
            scope, served_nowhere, note
        )
        return int(sent[0]["status"])

    both = (b"content-length", b"2"), (b"transfer-encoding", b"chunked")
    assert [asyncio.run(asked(*both[:count])) for count in (0, 1, 2)] == [200, 200, 400]


async def served_nowhere(*_: object) -> None:
    raise AssertionError("nothing goes on from here")


def test_allowed_origins_may_ask():
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


def test_connections_beyond_the_limit_are_closed(raw_server: RawServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BoundedProtocol, "most", 3)
    held = [socket.create_connection(("127.0.0.1", raw_server.port), 10) for _ in range(4)]
    try:
        with suppress(ConnectionResetError):
            assert held[-1].recv(10) == b""
    finally:
        for connection in held:
            connection.close()
    monkeypatch.undo()
    assert status(raw_server.send(head("GET", "/health"))) == 200


def test_a_wrong_method_is_told_all_right_ones(raw_server: RawServer):
    answer = raw_server.send(head("PUT", "/v1/responses/resp_1"))
    assert (status(answer), b"\r\nallow: DELETE, GET\r\n" in answer) == (405, True)
