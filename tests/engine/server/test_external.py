"""Models of external engines: `x_kakeya` says what they did, and what they cannot do is decoded plainly."""

from __future__ import annotations

import logging
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from engine.external_engines.engine import ExternalLoop, LoopEntry
from engine.external_engines.loops import ENGINES
from engine.target.loading import SHIPPED_TARGET, LoadedTarget
from tests.engine.external_engines import small
from tests.engine.server.raw_server import KEY, RawServer, opened

REGISTRY = f"""
default = "demo"
[requests]
kv = ["affine:4..8,64"]
[models.demo]
summary = "ours"
target = "shipped"
drafter = "shipped"
channels = ["native", "rotated4", "sink-window-256"]
[models.plain]
summary = "mlx-lm"
target = "shipped"
engine = "mlx-lm"
channels = ["native", "rotated4"]
[models.drafting]
summary = "mlx-lm with a draft model"
target = "shipped"
drafter = {{ path = "{SHIPPED_TARGET}" }}
engine = "mlx-lm-speculative"
block = 4
channels = ["native", "rotated4"]
[models.silent]
summary = "drafts, and reports nothing"
target = "shipped"
drafter = {{ path = "{SHIPPED_TARGET}" }}
engine = "silent"
[models.hookless]
summary = "makes its caches where nothing reaches them"
target = "shipped"
engine = "hookless"
channels = ["native", "rotated4", "sink-window-256"]
"""
PROMPT = "class BaseProject:"


def open_small(target: LoadedTarget, drafter: Path | None, block: int | None) -> ExternalLoop:
    loop = small.Inline(target.target.model)

    def steps(*arguments: Any, **caches: Any) -> Generator[int]:
        yield from loop.steps(*arguments, **caches)

    return 1, steps


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawServer]:
    file = tmp_path_factory.mktemp("registry") / "models.toml"
    file.write_text(REGISTRY)
    with pytest.MonkeyPatch.context() as patched:
        entry = LoopEntry("mlx_lm", "nothing", open_small, drafts=False)
        patched.setitem(ENGINES, "hookless", entry)
        patched.setitem(ENGINES, "silent", LoopEntry("mlx_lm", "nothing", open_small))
        with opened(file) as raw_server:
            yield raw_server


def asked(raw_server: RawServer, model: str, **fields: Any) -> requests.Response:
    return requests.post(
        f"http://127.0.0.1:{raw_server.port}/v1/completions",
        headers={"authorization": f"Bearer {KEY}"},
        json={"model": model, "prompt": PROMPT, "max_tokens": 24, "return_token_ids": True} | fields,
        timeout=60,
    )


def provenance(raw_server: RawServer, model: str, **fields: Any) -> dict[str, Any]:
    reply = asked(raw_server, model, **fields)
    assert reply.status_code == 200, reply.text
    return dict(reply.json()["x_kakeya"])


def test_our_engine_is_named(served: RawServer):
    how = provenance(served, "demo")
    assert how["engine"] == "kakeya"
    assert "fallback_from" not in how
    assert "cache_strategy" not in how


def test_an_engine_that_does_not_draft_says_so(served: RawServer):
    how = provenance(served, "plain@rotated4")
    assert (how["engine"], how["cache_strategy"], how["drafter"]) == ("mlx-lm", "keyword", None)
    assert (how["speculation"], how["acceptance_length"]) == (False, None)
    ours = provenance(served, "demo@rotated4", drafter="none")
    for name in ("plain_steps", "block", "drafted", "drafter_forwards", "drafter_resident_bytes"):
        assert how[name] == ours[name]
    assert how["plain_steps"] == 23
    assert 0 < how["resident_bytes"] <= ours["resident_bytes"]  # ours has room for the blocks of others
    assert how["why_off"] == "the engine mlx-lm decodes this model without a drafter"
    assert how["token_ids"] == ours["token_ids"]


@pytest.mark.parametrize("channel", ["native", "rotated4"])
def test_drafts_of_an_external_engine_are_told_as_it_counts_them(served: RawServer, channel: str):
    how = provenance(served, f"drafting@{channel}")
    assert (how["engine"], how["cache_strategy"]) == ("mlx-lm-speculative", "keyword")
    assert how["drafter"] == SHIPPED_TARGET.name
    assert (how["speculation"], how["why_off"], how["block"]) == (True, None, 4)
    assert (how["drafted"], how["plain_steps"], how["drafter_forwards"]) == (None, None, None)
    own = provenance(served, f"demo@{channel}", drafter="none")
    assert how["drafter_resident_bytes"] > 0
    held = how["resident_bytes"] - how["drafter_resident_bytes"]
    # the target drafts for itself, in caches of the native policy
    assert (held == how["drafter_resident_bytes"]) == (channel == "native")
    assert how["verify_rounds"] + how["accepted"] == 24  # every round gives its accepted drafts and one more
    assert how["acceptance_length"] == round(1 + how["accepted"] / how["verify_rounds"], 4)
    assert how["acceptance_length"] > (3.5 if channel == "native" else 1)  # the target drafts for itself
    assert how["token_ids"] == own["token_ids"]


def test_accepted_drafts_are_not_counted_where_drafts_are_not_told(served: RawServer):
    url, headers = f"http://127.0.0.1:{served.port}/metrics", {"authorization": f"Bearer {KEY}"}
    rounds = provenance(served, "drafting")["verify_rounds"]
    counted = requests.get(url, headers=headers, timeout=60).text
    for name in ("drafted", "accepted"):
        assert f'kakeya_{name}_tokens_total{{model="drafting"}} 0.0' in counted
    found = re.search(r'kakeya_verify_rounds_total{model="drafting"} (\d+)', counted)
    assert found is not None
    assert int(found[1]) >= rounds


def test_an_engine_that_reports_no_rounds_has_no_acceptance_length(served: RawServer):
    how = provenance(served, "silent")
    assert (how["drafter"], how["acceptance_length"], how["verify_rounds"]) == (SHIPPED_TARGET.name, None, 0)
    assert how["why_off"] == "the engine silent reports no verify rounds"
    assert (how["drafter_resident_bytes"], how["resident_bytes"], how["plain_steps"]) == (None, None, None)


def test_an_engine_without_a_hook_decodes_natively(served: RawServer):
    how = provenance(served, "hookless")
    assert (how["engine"], how["cache_strategy"], how["cache_classes"]) == ("hookless", "native", {})
    assert (how["resident_bytes"], how["drafter_resident_bytes"], how["plain_steps"]) == (None, 0, 23)
    assert "fallback_from" not in how


@pytest.mark.parametrize(
    ("channel", "classes"), [("rotated4", {"CodedKV": 9}), ("sink-window-256", {"SlidingRing": 9})]
)
def test_without_a_hook_other_policies_are_decoded_plainly(
    served: RawServer, channel: str, classes: dict[str, int], caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    how = provenance(served, f"hookless@{channel}")
    assert (how["engine"], how["fallback_from"]) == ("kakeya", "hookless")
    assert (how["kv_channel"], how["cache_classes"]) == (channel, classes)
    assert (how["speculation"], how["drafter"], how["acceptance_length"]) == (False, None, None)
    assert "the engine hookless cannot decode under" in how["why_off"]
    assert how["token_ids"] == provenance(served, f"demo@{channel}", drafter="none")["token_ids"]
    said = [record.getMessage() for record in caplog.records if "hookless: the engine" in record.getMessage()]
    assert said
    assert said[0].endswith("decoding plainly")


def test_the_fallback_keeps_sessions_and_samples(served: RawServer):
    prompt = "def fallback_of_sessions(first, second):\n    return"
    first = provenance(served, "hookless@rotated4", prompt=prompt, temperature=1.0, seed=3)
    again = provenance(served, "hookless@rotated4", prompt=prompt, temperature=1.0, seed=3)
    assert (first["cached_tokens"], again["cached_tokens"] > 0) == (0, True)
    assert again["token_ids"] == first["token_ids"]


def test_a_policy_that_a_request_spells_out_falls_back_too(served: RawServer):
    how = provenance(served, "hookless", kv_channel="affine:6,64")
    assert (how["kv_policy"], how["fallback_from"]) == ("affine:6,64@all", "hookless")


@pytest.mark.parametrize(
    ("model", "fields", "status", "param"),
    [
        ("hookless", {"temperature": 1}, 501, "temperature"),
        ("hookless@rotated4", {"drafter": "prompt-lookup"}, 501, "drafter"),
        ("hookless@rotated4", {"block": 4}, 400, "block"),
        ("drafting", {"block": 4}, 501, "block"),
        ("hookless", {"kv_channel": "affine:6,32"}, 400, "kv_channel"),
    ],
)
def test_what_neither_engine_does_is_refused_by_name(
    served: RawServer, model: str, fields: dict[str, Any], status: int, param: str
):
    reply = asked(served, model, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)


def test_rounds_are_left_out_where_they_are_not_known(served: RawServer):
    assert "rounds" in provenance(served, "demo", return_rounds=True)
    assert "rounds" not in provenance(served, "drafting", return_rounds=True)


def test_a_stream_says_the_same(served: RawServer):
    reply = asked(served, "hookless@rotated4", stream=True)
    last = reply.text.strip().split("\n\n")[-2]
    assert '"fallback_from":"hookless"' in last
