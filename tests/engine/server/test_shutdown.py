"""How a server ends: what goes on is finished, or told that it is not, and nothing looks like a crash."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.engine.server.conftest import KEY, Running, start

ENDLESS = {"prompt": "class Base", "max_tokens": 900, "logit_bias": {"2": -100, "7": -100}}


def asked(server: Running, **fields: Any) -> requests.Response:
    return requests.post(
        f"{server.url}/completions",
        json=ENDLESS | fields,
        headers={"authorization": f"Bearer {KEY}"},
        timeout=60,
    )


@pytest.mark.slow
def test_requests_that_outlast_the_grace_get_an_error(tmp_path: Path):
    server = start(tmp_path, "--parallel", "2", "--grace", "1")
    slow = {"block": 1, "kv_channel": "rotated4"}
    with ThreadPoolExecutor(6) as pool:
        whole = [pool.submit(asked, server, **slow) for _ in range(3)]
        streams = [pool.submit(asked, server, stream=True, **slow) for _ in range(3)]
        time.sleep(1)
        assert server.stop() == 0
        for future in whole:
            reply = future.result()
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "shutting_down")
        for future in streams:
            reply = future.result()
            if reply.status_code == 503:  # it had not started
                continue
            last = json.loads(reply.text.strip().split("\n\n")[-1].removeprefix("data: "))
            assert last["error"]["code"] == "shutting_down"
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "Base" not in log


@pytest.mark.slow
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait_for_the_grace(tmp_path: Path, second: signal.Signals):
    server = start(tmp_path, "--grace", "600")
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(asked, server, stream=stream, ignore_eos=True, n=8) for stream in (True, False)
        ]
        time.sleep(1)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert server.stop(second) == 0
        stream, whole = (future.result() for future in futures)
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "shutting_down")
    assert "shutting_down" in stream.text.strip().split("\n\n")[-1]
    assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
def test_requests_that_end_within_the_grace_are_complete(tmp_path: Path):
    server = start(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(asked, server, stream=stream, max_tokens=200) for stream in (False, True)]
        time.sleep(0.4)
        assert server.stop() == 0
        whole, stream = (future.result() for future in futures)
    assert whole.json()["usage"]["completion_tokens"] == 200
    assert stream.text.endswith("data: [DONE]\n\n")


LONG = {"type": "array", "items": {"type": "string", "minLength": 40}, "minItems": 90}
SAID = {"role": "user", "content": "Make a list."}
TYPED: dict[str, dict[str, Any]] = {
    "responses": {"input": [SAID], "text": {"format": {"type": "json_schema", "name": "x", "schema": LONG}}},
    "messages": {
        "messages": [SAID],
        "max_tokens": 900,
        "output_config": {"format": {"type": "json_schema", "schema": LONG}},
    },
}


@pytest.mark.slow
def test_the_other_protocols_are_told_their_own_way(tmp_path: Path):
    server = start(tmp_path, "--grace", "1")
    slow = {"block": 1, "kv_channel": "rotated4", "drafter": "none"}
    headers = {"authorization": f"Bearer {KEY}"}
    with ThreadPoolExecutor(4) as pool:
        futures = {
            (path, stream): pool.submit(
                requests.post,
                f"{server.url}/{path}",
                json=body | slow | {"stream": stream},
                headers=headers,
                timeout=60,
            )
            for path, body in TYPED.items()
            for stream in (False, True)
        }
        time.sleep(1.5)
        assert server.stop() == 0
        replies = {key: future.result() for key, future in futures.items()}
    assert replies["responses", False].json()["error"]["code"] == "shutting_down"
    assert replies["messages", False].status_code == 529
    assert replies["messages", False].json()["error"]["type"] == "overloaded_error"
    *_, failed = replies["responses", True].text.strip().split("\n\n")
    assert failed.startswith("event: response.failed\n")
    reply = json.loads(failed.partition("data: ")[2])["response"]
    assert (reply["status"], reply["error"]["code"]) == ("failed", "server_error")
    *_, failed = replies["messages", True].text.strip().split("\n\n")
    assert failed.startswith("event: error\n")
    assert json.loads(failed.partition("data: ")[2])["error"]["type"] == "overloaded_error"
    assert "Traceback" not in server.log.read_text()
