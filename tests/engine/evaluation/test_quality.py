"""Quality: equal outputs counted, differences recorded with their ties, and claims that follow the policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridge.evidence.gate import judge
from engine.config import Engine, Options, open_engine
from engine.device import prepare
from engine.errors import ConfigurationError
from engine.evaluation.prompts import Prompt, load_prompts
from engine.evaluation.quality import QualitySwitches, matches_by_set, measure_quality
from tests.engine.evaluation.test_measurements import check, quiet
from tests.engine.evaluation.test_prompts import write

PAIR = {"arm": "ours", "baseline": "plain"}


@pytest.fixture
def prompts(tmp_path: Path) -> list[Prompt]:
    rows = [{"id": f"code-{i}", "kind": "code", "prompt": f"def f{i}(x):\n" * 3} for i in range(3)]
    chat = {"id": "chat-1", "kind": "chat", "messages": [{"role": "user", "content": "hi"}]}
    return load_prompts(str(write(tmp_path / "p.jsonl", *rows, chat)))


def opened(folders: tuple[Path, Path], **changes: Any) -> Engine:
    return open_engine(Options(**{"model": folders[0], "drafter": str(folders[1]), **changes}))


def measured(engine: Engine, prompts: list[Prompt], **changes: Any) -> dict[str, Any]:
    switches = QualitySwitches(**{"prompts": "own.jsonl", "max_tokens": 20, **changes})
    return check(measure_quality(engine, prompts, switches, prepare(), progress=quiet))


@pytest.mark.slow
def test_native_speculation_claims_identical_output(folders: tuple[Path, Path], prompts: list[Prompt]):
    document = measured(opened(folders), prompts)
    assert document["kind"] == "quality"
    assert document["claims"] == [{"name": "identical_output", **PAIR}]
    assert [(arm["name"], arm["role"]) for arm in document["arms"]] == [
        ("plain", "baseline"),
        ("ours", "sut"),
    ]
    assert document["summary"]["comparisons"][0]["identical_samples"] == 4
    assert document["rounding"]["positions"] > 0
    assert matches_by_set(document) == {"code": (3, 3), "chat": (1, 1)}
    assert [arm for arm, _ in document["order"]] == ["plain", "ours", "ours", "plain"] * 2
    assert judge(json.dumps(document).encode()).violations == ()


@pytest.mark.slow
def test_a_dropping_policy_differs_and_claims_nothing(folders: tuple[Path, Path], prompts: list[Prompt]):
    engine = opened(folders, kv="sink-window:1,2", drafter="none")
    document = measured(engine, prompts)
    assert document["claims"] == []
    equal = document["summary"]["comparisons"][0]["identical_samples"]
    assert equal + len(document["divergences"]) == 4 > equal
    assert all(found["arm"] == "ours" and found["plain_gap"] >= 0 for found in document["divergences"])
    assert judge(json.dumps(document).encode()).violations == ()


@pytest.mark.slow
def test_a_window_that_covers_the_sequence_may_claim_identity(
    folders: tuple[Path, Path], prompts: list[Prompt]
):
    document = measured(opened(folders, kv="sink-window:4,400"), prompts, claim="identity")
    assert document["claims"] == [{"name": "identical_output", **PAIR}]
    assert document["arms"][1]["system"]["kv"] == "sink-window:4,400@all"
    assert judge(json.dumps(document).encode()).violations == ()


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(("least", "accepted"), [(0.5, True), (1.0, False)])
def test_a_share_of_equal_outputs_can_be_claimed_and_is_held_to(
    folders: tuple[Path, Path], prompts: list[Prompt], least: float, accepted: bool
):
    window = 40 if accepted else 6  # most prompts fit into the wider one
    engine = opened(folders, kv=f"sink-window:1,{window}", drafter="none")
    document = measured(engine, prompts, claim="match", min_match=least, max_tokens=2)
    assert document["claims"] == [{"name": "exact_match", **PAIR, "at_least": least}]
    equal = document["summary"]["comparisons"][0]["identical_samples"]
    assert (equal >= 2) is accepted
    assert (judge(json.dumps(document).encode()).violations == ()) is accepted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"claim": "match"}, "--claim match and --min-match go together"),
        ({"min_match": 0.5}, "--claim match and --min-match go together"),
        ({"claim": "match", "min_match": 1.5}, "--min-match must lie in"),
        ({"claim": "speed"}, "--claim 'speed' is not one of"),
        ({"max_tokens": 0}, "--max-tokens must be at least 1"),
        ({"limit": 0}, "--limit must be at least 1"),
    ],
)
def test_switches_that_make_no_sense_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        QualitySwitches(**changes).check()


def test_plain_decoding_alone_is_nothing_to_compare(folders: tuple[Path, Path], prompts: list[Prompt]):
    with pytest.raises(ConfigurationError, match="nothing to compare"):
        measured(opened(folders, drafter="none"), prompts)


def test_a_restored_policy_is_sent_where_its_controls_run(folders: tuple[Path, Path], prompts: list[Prompt]):
    with pytest.raises(ConfigurationError, match="without its controls"):
        measured(opened(folders, kv="restored:exact:2,4"), prompts)
