"""Texts that end by themselves, the control that goes on past their ends, and what the gate says of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridge.evidence.gate import judge
from engine.config import Engine, Options, open_engine
from engine.device import prepare
from engine.errors import ConfigurationError
from engine.evaluation.measure import encode_all, plain_arm, run_arm
from engine.evaluation.prompts import Prompt, load_prompts
from engine.evaluation.throughput import PLAIN, Switches, measure_throughput
from tests.engine.evaluation.test_measurements import check, quiet
from tests.engine.evaluation.test_prompts import write

TOKENS = 24


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[Prompt]:
    rows = [{"id": f"code-{i}", "kind": "code", "prompt": f"def f{i}(x):\n" * (i + 1)} for i in range(3)]
    return load_prompts(str(write(tmp_path_factory.mktemp("prompts") / "p.jsonl", *rows)))


@pytest.fixture
def stopping(folders: tuple[Path, Path], prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose target stops at a token that plain decoding of the first prompt comes to."""
    engine = open_engine(Options(folders[0], str(folders[1]), compiled=False))
    [encoded] = encode_all(engine, prompts[:1])
    text = run_arm(engine, plain_arm(PLAIN), encoded, TOKENS, engine.new_draft_length()).tokens
    stop = next(token for at, token in enumerate(text) if 2 < at < TOKENS - 4 and token not in text[:at])
    monkeypatch.setattr(type(engine.target), "stops", frozenset({stop}))
    return engine


def measured(engine: Engine, prompts: list[Prompt], **switches: Any) -> dict[str, Any]:
    given = Switches(prompts="own.jsonl", max_tokens=TOKENS, claim="identity", **switches)
    return check(measure_throughput(engine, prompts, given, prepare(), progress=quiet))


def rules(document: dict[str, Any]) -> set[str]:
    return {violation.code for violation in judge(json.dumps(document).encode()).violations}


def test_a_control_goes_on_where_the_others_stop(stopping: Engine, prompts: list[Prompt]) -> None:
    document = measured(stopping, prompts[:1], min_stops=1.0, ignore_stops=True)
    (plain,), (ours,), (control,) = (arm["samples"] for arm in document["arms"])
    assert [row["finish_reason"] for row in (plain, ours, control)] == ["stop", "stop", "length"]
    assert plain["tokens"] == ours["tokens"] == control["tokens"][: len(ours["tokens"])]
    assert len(ours["tokens"]) < len(control["tokens"]) == TOKENS
    assert [(arm["role"], arm["control"]) for arm in document["arms"]][2] == ("control", "ignore_stops")
    assert document["configuration"]["ignore_stops"] is True
    assert [claim["name"] for claim in document["claims"]] == ["natural_stops", "identical_output"]
    assert rules(document) == set()


@pytest.mark.slow
def test_a_share_of_stops_that_is_not_reached_is_rejected(
    folders: tuple[Path, Path], prompts: list[Prompt]
) -> None:
    engine = open_engine(Options(folders[0], str(folders[1]), compiled=False))
    document = measured(engine, prompts, min_stops=0.5)
    assert {row["finish_reason"] for row in document["arms"][1]["samples"]} == {"length"}
    assert rules(document) == {"CLAIM_NOT_MET"}


def test_switches_that_make_no_sense_are_refused(folders: tuple[Path, Path], prompts: list[Prompt]) -> None:
    for share in (0.0, 0.49, 1.01, float("nan")):
        with pytest.raises(ConfigurationError, match=r"--min-stops must lie in \[0.5, 1\]"):
            Switches(min_stops=share).check()
    for restarts in (-1, 17):
        with pytest.raises(ConfigurationError, match=r"--restarts must lie in \[0, 16\]"):
            Switches(restarts=restarts).check()
    alone = open_engine(Options(folders[0], "none"))
    for switches in (Switches(ignore_stops=True), Switches(min_stops=0.9)):
        with pytest.raises(ConfigurationError, match="need a drafter; give --drafter"):
            measure_throughput(alone, prompts, switches, prepare(), progress=quiet)


@pytest.mark.slow
def test_single_graph_reports_block_times(folders: tuple[Path, Path], prompts: list[Prompt]) -> None:
    engine = open_engine(Options(folders[0], str(folders[1]), compiled=False, block="2", single_graph=True))
    document = measured(engine, prompts)
    turns = [turn for row in document["arms"][1]["samples"] for turn in row["rounds"]]
    seconds = [turn["draft_s"] + turn["verify_s"] for turn in turns]
    assert len(seconds) > 8
    assert document["summary"]["arms"]["plain"]["block_s"] is None
    assert document["summary"]["arms"]["speculative"]["block_s"] == {
        "first": seconds[:8],
        "max": max(seconds),
        "mean": sum(seconds) / len(seconds),
    }
    assert rules(document) == set()
    for figure, value in (("mean", 1e-4), ("max", 1e-4), ("first", seconds[1:9])):
        forged = json.loads(json.dumps(document))
        forged["summary"]["arms"]["speculative"]["block_s"][figure] = value
        assert rules(forged) == {"SUMMARY_MISMATCH"}
    del document["summary"]["arms"]["speculative"]["block_s"]
    assert rules(document) == {"SUMMARY_MISMATCH"}


@pytest.mark.slow
def test_kept_positions_of_plain_windows_are_reported(
    folders: tuple[Path, Path], prompts: list[Prompt]
) -> None:
    """The target's own windows are 8: wider ones bound nothing, narrower ones do."""
    for kv, broken in (("sliding-bounded:4,64", {"POLICY_NO_EFFECT"}), ("sliding-bounded:1,4", set())):
        engine = open_engine(Options(folders[0], str(folders[1]), compiled=False, kv=kv))
        given = Switches(prompts="own.jsonl", max_tokens=TOKENS)
        document = check(measure_throughput(engine, prompts, given, prepare(), progress=quiet))
        assert {row["kept_positions"] for row in document["arms"][0]["samples"]} == {7}
        assert rules(document) == broken, kv
