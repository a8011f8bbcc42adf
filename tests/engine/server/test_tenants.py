"""What one key's holder can learn of what others do."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.engine.server.raw_server import KEY, RawServer, chat, head, opened, status

OTHER = "another-key-0123456789"
OVERSEER = "reads-metrics-0123456789"


@pytest.fixture(scope="module")
def shared() -> Iterator[RawServer]:
    """A server of two tenants."""
    with opened(keys=(KEY, OTHER), metrics_keys=(OVERSEER,)) as found:
        yield found


def ask(server: RawServer, key: str) -> bytes:
    body = json.dumps(chat()).encode()
    lines = ("Content-Type: application/json", f"Content-Length: {len(body)}")
    return server.send(head("POST", "/v1/chat/completions", *lines, key=key) + body)


def metrics(server: RawServer, key: str) -> str:
    answer = server.send(head(path="/metrics", key=key))
    assert status(answer) == 200
    return answer.partition(b"\r\n\r\n")[2].decode()


COUNT = 'kakeya_requests_total{model="demo",path="/v1/chat/completions",status="200"}'


def test_a_key_sees_its_own_requests_alone(shared: RawServer):
    before = metrics(shared, OTHER)
    assert status(ask(shared, KEY)) == 200
    assert status(ask(shared, KEY)) == 200
    assert f"{COUNT} 2.0" in metrics(shared, KEY)
    other = metrics(shared, OTHER)
    assert COUNT not in other
    assert "demo" not in other
    assert " gauge" not in other  # they are of all requests
    assert "kakeya_memory_bytes" not in other
    assert before.count("\n") <= other.count("\n")
    assert f"{COUNT} 2.0" in (whole := metrics(shared, OVERSEER))
    assert "kakeya_requests_active" in whole


def test_a_key_for_metrics_opens_nothing_else(shared: RawServer):
    assert status(ask(shared, OVERSEER)) == 401
    assert status(shared.send(head(path="/v1/models", key=OVERSEER))) == 401
    assert status(shared.send(head(path="/metrics", key="no-such-key-0123456789"))) == 401


def test_the_only_key_sees_everything(raw_server: RawServer):
    assert "kakeya_requests_active" in metrics(raw_server, KEY)


def test_health_says_nothing_of_requests(shared: RawServer):
    answer = shared.send(head(path="/health", key=None))
    assert set(json.loads(answer.partition(b"\r\n\r\n")[2])) == {"status", "reason", "version"}
