"""How a server ends: what goes on is finished, or told that it is not, and nothing looks like a crash."""

from __future__ import annotations

import json
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
def test_requests_that_end_within_the_grace_are_complete(tmp_path: Path):
    server = start(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(asked, server, stream=stream, max_tokens=200) for stream in (False, True)]
        time.sleep(0.4)
        assert server.stop() == 0
        whole, stream = (future.result() for future in futures)
    assert whole.json()["usage"]["completion_tokens"] == 200
    assert stream.text.endswith("data: [DONE]\n\n")
