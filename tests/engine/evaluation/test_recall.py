"""Recall: claims of each policy, its controls, recall by depth, the chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.cache.policy import parse_policy
from engine.config import Engine, Options, open_engine
from engine.device import prepare
from engine.errors import ConfigurationError, PromptError
from engine.evaluation.prompts import load_prompts
from engine.evaluation.recall import RecallSwitches, measure_recall, recall_by_depth, restoring_controls
from engine.evaluation.throughput import Switches, measure_throughput
from engine.generate import ChatSwitches
from tests.engine.evaluation.test_measurements import check, quiet
from tests.engine.evaluation.test_prompts import needle_row, write


def opened(folders: tuple[Path, Path], kv: str, drafter: str | None = None) -> Engine:
    return open_engine(Options(folders[0], drafter or str(folders[1]), kv=kv))


def rows(*found: tuple[float, bool]) -> list[dict[str, Any]]:
    return [{"needle": {"depth": depth, "hit": hit}} for depth, hit in found]


def test_recall_is_by_depth_or_by_quarters():
    few = recall_by_depth(rows((0.5, True), (0.0, False), (0.5, False), (1.0, True)))
    assert few == {"0": 0.0, "0.5": 0.5, "1": 1.0}
    assert list(few) == ["0", "0.5", "1"]
    many = recall_by_depth(rows(*((number / 20, number < 10) for number in range(21))))
    assert many == {"0-0.25": 1.0, "0.25-0.5": 1.0, "0.5-0.75": 0.0, "0.75-1": 0.0}
    assert recall_by_depth([{"prompt_id": "code-1"}]) == {}


def test_a_policy_that_restores_has_its_controls():
    controls = restoring_controls(parse_policy("restored:learned:2,32@2"))
    assert {name: policy.spec for name, policy in controls.items()} == {
        "exact": "restored:exact:2,32@2",
        "noise": "restored:noise:2,32@2",
    }
    assert restoring_controls(parse_policy("sink-window")) == {}


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize(
    ("kv", "claim", "count", "claims"),
    [
        ("sliding-bounded:1,4", "auto", 5, ["recall_parity"]),
        ("sliding-bounded:1,4", "auto", 2, []),  # the gate would reject it
        ("sliding-bounded:1,4", "none", 5, []),
        ("sink-window:1,16", "auto", 5, []),
        ("sink-window:1,16", "parity", 1, ["recall_parity"]),
    ],
)
def test_parity_is_claimed_of_lossless_policies_or_on_request(
    folders: tuple[Path, Path], tmp_path: Path, kv: str, claim: str, count: int, claims: list[str]
):
    row = needle_row()
    rows = [
        row | {"id": f"needle-{at}", "depth": at % 2 / 2, "prompt": f"{at} is a number. {row['prompt']}"}
        for at in range(count)
    ]
    prompts = load_prompts(str(write(tmp_path / "p.jsonl", *rows)))
    switches = RecallSwitches(max_tokens=4, claim=claim)
    document = check(measure_recall(opened(folders, kv), prompts, switches, prepare(), progress=quiet))
    assert [claim["name"] for claim in document["claims"]] == claims
    ours, oracle, control = (arm["system"]["kv"] for arm in document["arms"])
    assert (ours, oracle) == (control, "native")
    assert ours == document["configuration"]["kv"] == parse_policy(kv).spec


def test_unused_chat_switches_are_refused(folders: tuple[Path, Path], tmp_path: Path):
    engine = opened(folders, "native")
    prompts = load_prompts(str(write(tmp_path / "p.jsonl", needle_row())))
    lengths = []
    for chat in (False, True):
        switches = RecallSwitches(max_tokens=2, chat=ChatSwitches(chat=chat))
        document = check(measure_recall(engine, prompts, switches, prepare(), progress=quiet))
        assert document["configuration"]["chat"] is chat
        row = document["arms"][0]["samples"][0]
        assert row["needle"]["prompt_contains_needle"]
        lengths.append(row["prompt_tokens"])
    assert lengths[1] == lengths[0] + 4  # <bos><user>…<end><assistant>
    switches = RecallSwitches(chat=ChatSwitches(system="Be brief."))
    with pytest.raises(ConfigurationError, match="--system is for the chat template"):
        measure_recall(engine, prompts, switches, prepare(), progress=quiet)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("drafter", [None, "none"])
def test_a_policy_is_compared_and_claims_nothing_by_default(folders: tuple[Path, Path], drafter: str | None):
    engine = opened(folders, "sink-window:1,16", drafter)
    prompts = load_prompts("code", 1)
    document = check(measure_throughput(engine, prompts, Switches(max_tokens=6), prepare(), progress=quiet))
    assert [arm["system"]["kv"] for arm in document["arms"]] == ["native", "sink-window:1,16@all"]
    assert document["claims"] == []


def test_a_policy_that_restores_is_not_measured_without_its_controls(folders: tuple[Path, Path]):
    engine = opened(folders, "restored:exact:1,16")
    with pytest.raises(ConfigurationError, match="eval recall and eval kv run them"):
        measure_throughput(engine, load_prompts("code", 1), Switches(), prepare(), progress=quiet)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("batch", [1, 2])
def test_restored_values_are_measured_with_their_controls(
    folders: tuple[Path, Path], tmp_path: Path, batch: int
):
    text = needle_row()["prompt"]
    rows = [needle_row(id=f"r-{number}", prompt=f"{number} {text}") for number in range(2)]
    prompts = load_prompts(str(write(tmp_path / "p.jsonl", *rows)))
    engine = opened(folders, "restored:zeros:1,16")
    switches = RecallSwitches(max_tokens=4, batch=batch)
    document = check(measure_recall(engine, prompts, switches, prepare(), progress=quiet))
    found = {arm["name"]: (arm["role"], arm["system"]["restoration"]) for arm in document["arms"]}
    assert found == {
        "speculative": ("sut", "zeros"),
        "oracle": ("oracle", None),
        "no_needle": ("control", "zeros"),
        "restored:exact:1,16@full": ("control", "exact"),
        "restored:noise:1,16@full": ("control", "noise"),
    }
    for arm in document["arms"]:
        restored = [row.get("restored_positions", 0) > 0 for row in arm["samples"]]
        assert restored == [arm["system"]["restoration"] is not None] * 2
    exact, oracle = document["arms"][3], document["arms"][1]
    assert [row["tokens"] for row in exact["samples"]] == [row["tokens"] for row in oracle["samples"]]
    assert document["claims"] == []  # zeros are a control, whatever they are called
    far = opened(folders, "restored:zeros:1,200")
    with pytest.raises(PromptError, match="tokens after its needle"):
        measure_recall(far, prompts, switches, prepare(), progress=quiet)
