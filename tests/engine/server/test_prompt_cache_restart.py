"""A real server that is killed at any moment: what it had saved is used again, and answers stay the same."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.engine import families
from tests.engine.server.conftest import KEY, REGISTRY, ROOT, Running, start

pytestmark = pytest.mark.slow

PROMPT = [5 + 7 * at % 290 for at in range(2000)]
TINY_FAMILIES = {"sliding": "gemma3_text", "recurrent": "qwen3_5"}  # each with full layers, too
TINY = """
[models.{name}]
summary = "random weights"
target = {{ path = "{folder}" }}
drafter = "prompt-lookup"
"""
OTHER = "another-key-of-the-tests-9876543210"
OVERSEER = "the-metrics-key-of-the-tests-1234567"


def asked(running: Running, prompt: list[int], key: str = KEY, **fields: Any) -> Any:
    """A completion's token ids, and what it says of its prompt's cache."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 16, "return_token_ids": True} | fields
    answer = requests.post(
        f"{running.url}/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=120
    )
    assert answer.status_code == 200, answer.text
    document = answer.json()
    told = document["x_kakeya"]
    details = document["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == told["cached_tokens"]
    return told["token_ids"], told["cached_tokens"], told["cached_from"]


def metric(running: Running, name: str, key: str = KEY) -> float:
    url = running.url.removesuffix("/v1") + "/metrics"
    text = requests.get(url, headers={"authorization": f"Bearer {key}"}, timeout=30).text
    found = re.search(rf"^kakeya_{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, name
    return float(found[1])


def wait(until: Any) -> None:
    deadline = time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def tiny_model(folder: Path, family: str) -> Path:
    """A model of random weights that takes longer prompts than the family's in other tests."""
    longer = {"max_position_embeddings": 4096}
    text = families.FAMILIES[family].config.get("text_config")
    return families.save(folder, family, **(longer if text is None else {"text_config": text | longer}))


@pytest.mark.parametrize("model", [*TINY_FAMILIES, "demo", "demo@rotated4", "demo@sink-window-256"])
def test_a_prompt_of_a_killed_server_comes_from_disk_with_the_same_answer(tmp_path: Path, model: str):
    folder, keys, overseer = tmp_path / "kept", tmp_path / "keys", tmp_path / "overseer"
    keys.write_text(f"{KEY}\n{OTHER}\n")
    overseer.write_text(f"{OVERSEER}\n")
    seen = partial(metric, key=OVERSEER)
    registry, length = REGISTRY, 900  # the demo's context is 1024
    if model in TINY_FAMILIES:
        registry += TINY.format(name=model, folder=tiny_model(tmp_path / "model", TINY_FAMILIES[model]))
        length = 2000
    prompt = PROMPT[:length]
    options = ("--cache-dir", str(folder), "--max-tokens", "300", "--api-key-file", str(keys))
    options += ("--metrics-key-file", str(overseer))
    first = start(tmp_path / "first", *options, registry=registry)
    tokens, *cached = asked(first, prompt, model=model)
    assert cached == [0, None]
    wait(lambda: seen(first, "prompt_cache_disk_entries"))
    assert seen(first, "prompt_cache_written_bytes_total") == seen(first, "prompt_cache_disk_bytes") > 0
    first.stop(signal.SIGKILL)
    second = start(tmp_path / "second", *options, registry=registry)
    try:
        assert asked(second, prompt, OTHER, model=model) == (tokens, 0, None)  # another's are no use
        told, cached_tokens, cached_from = asked(second, prompt, model=model)
        assert (told, cached_from) == (tokens, "disk")
        assert cached_tokens >= length - 16
        assert asked(second, prompt, model=model)[2] == "memory"
        assert seen(second, 'prompt_cache_hits_total{tier="disk"}') == 1
        other = "demo" if model != "demo" else "demo@rotated4"
        assert asked(second, PROMPT[:900], model=other)[1:] == (0, None)
    finally:
        second.stop()
    assert "removed" not in second.log.read_text()
    assert not list(folder.glob("*.part"))
    names = " ".join(path.name for path in folder.iterdir())
    assert KEY not in names


def test_killed_while_it_writes_it_leaves_whole_files_or_none(tmp_path: Path):
    """At moments spread over the time that a request and its writing take."""
    folder = tmp_path / "kept"
    truth: dict[int, list[int]] = {}
    for attempt in range(6):
        running = start(tmp_path / f"run{attempt}", "--cache-dir", str(folder))
        prompt = [attempt + 5, *PROMPT[1:900]]
        truth[attempt], *_ = asked(running, prompt)
        time.sleep(0.004 * attempt)
        running.stop(signal.SIGKILL)
    last = start(tmp_path / "last", "--cache-dir", str(folder))
    try:
        for attempt, tokens in truth.items():
            assert asked(last, [attempt + 5, *PROMPT[1:900]])[0] == tokens
    finally:
        last.stop()
    assert "removed" not in last.log.read_text()


def test_without_a_prompt_cache_nothing_is_kept(tmp_path: Path):
    folder = tmp_path / "kept"
    running = start(tmp_path / "run", "--cache-dir", str(folder), "--no-prompt-cache")
    try:
        told = [asked(running, PROMPT[:600]) for _ in range(2)]
        assert [each[1:] for each in told] == [(0, None)] * 2
        assert metric(running, "prompt_cache_entries") == 0
    finally:
        running.stop()
    assert not folder.exists()


def test_a_folder_that_others_may_read_is_refused_at_the_start(tmp_path: Path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "engine", "serve", "--port", "0", "--cache-dir", str(tmp_path / "open")],
        cwd=ROOT,
        env=os.environ | {"KAKEYA_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "chmod 700" in done.stderr
    assert "Traceback" not in done.stderr
