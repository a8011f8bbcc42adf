"""Measurements end to end on tiny models: reports that fit the schema, identical tokens, sane controls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jsonschema
import mlx.core as mx
import pytest

from bridge.evidence.gate import judge
from bridge.runner.machine import engine_digest
from engine.config import Engine, Options, open_engine
from engine.device import prepare
from engine.drafters.base import Draft
from engine.drafters.block import BlockDrafter
from engine.errors import ConfigurationError, PromptError
from engine.evaluation.arms import speculate_batch
from engine.evaluation.environment import LoadWatch, busy, describe, idle_load
from engine.evaluation.measure import Evaluation, encode_all, plain_arm, run_arm
from engine.evaluation.probe import probe_machine, ring_rolls_back
from engine.evaluation.prompts import Prompt, encode, load_prompts
from engine.evaluation.recall import RecallSwitches, measure_recall
from engine.evaluation.report import sample
from engine.evaluation.rounding import Run, block_error, find_divergences, plain_gap
from engine.evaluation.throughput import PLAIN, Switches, measure_throughput
from engine.generate import GenerateSwitches, TextStep, generate
from engine.sampling import Sampler
from evidence_format.figures import summarise
from evidence_format.model import OtherLoad, Report, ReportRequest
from tests.engine import tiny
from tests.engine.evaluation.test_prompts import FACT, needle_row, write
from tests.engine.evaluation.test_report import arm_of

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = json.loads((ROOT / "docs" / "schema" / "evidence.json").read_text())
REQUEST = ReportRequest(
    nonce="20260102t030405z0123456789ab",
    workload_sha="a" * 40,
    preset_digest="b" * 64,
    engine_source="installed",
)


def quiet(done: int, total: int, phase: str, detail: str) -> None:
    assert 0 <= done <= total


def check(report: Report) -> dict[str, Any]:
    """The document as it would be read back, valid under the published schema."""
    document = json.loads(json.dumps(report.document, allow_nan=False))
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    return document


@pytest.fixture(scope="module")
def engine(folders: tuple[Path, Path]) -> Engine:
    return open_engine(Options(folders[0], str(folders[1])))


@pytest.fixture
def prompts(tmp_path: Path) -> list[Prompt]:
    rows = [{"id": f"code-{i}", "kind": "code", "prompt": f"def f{i}(x):\n" * (i + 1)} for i in range(3)]
    chat = {"id": "chat-1", "kind": "chat", "messages": [{"role": "user", "content": "hi"}]}
    return load_prompts(str(write(tmp_path / "p.jsonl", *rows, chat)))


@pytest.mark.slow
def test_throughput_compares_the_arms_prompt_by_prompt(engine: Engine, prompts: list[Prompt]):
    switches = Switches(max_tokens=24, claim="no-slowdown")
    document = check(
        measure_throughput(engine, prompts, switches, prepare(), progress=quiet, request=REQUEST)
    )
    assert document["request"]["nonce"] == REQUEST.nonce
    plain, ours, own = document["arms"]
    assert [row["tokens"] for row in ours["samples"]] == [row["tokens"] for row in plain["samples"]]
    assert [row["tokens"] for row in own["samples"]] == [row["tokens"] for row in plain["samples"]]
    assert (own["control"], own["system"]["drafter"]) == ("block_1", None)
    assert {turn["block"] for row in own["samples"] for turn in row["rounds"]} == {1}
    assert [claim["name"] for claim in document["claims"]] == ["identical_output", "no_slowdown"]
    first = [arm for arm, _ in document["order"]][::3]
    assert first == ["plain", "block-1", "plain", "block-1"]
    assert document["rounding"]["positions"] > 0
    assert document["rounding"]["max_abs_logit_error"] < 1e-2
    assert document["divergences"] == []
    assert document["liveness"]["drafter_forwards"] > 0
    for row in ours["samples"]:
        confirmed = [item["accepted"] + 1 for item in row["rounds"]]
        assert sum(confirmed[:-1]) < len(row["tokens"]) - 1 <= sum(confirmed)
        spent = sum(item["draft_s"] + item["verify_s"] for item in row["rounds"])
        assert spent <= row["decode_s"] * 1.05 + 0.002
        assert row["cache"]["classes"] == {"KVCache": 2, "SlidingRing": 4}


@pytest.mark.slow
def test_a_disturbed_measurement_starts_over_and_says_so(
    engine: Engine, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
):
    decode_s = iter([0.1] * 5 + [1.0])  # the second row of plain decoding finds the machine busy

    def timed(*arguments: Any, **more: Any) -> Any:
        return replace(run_arm(*arguments, **more), prefill_s=0.01, decode_s=next(decode_s, 0.1))

    phases: list[str] = []
    switches = Switches(max_tokens=24, claim="no-slowdown")
    monkeypatch.setattr("engine.evaluation.measure.run_arm", timed)
    document = check(
        measure_throughput(
            engine, prompts, switches, prepare(), progress=lambda *seen: phases.append(seen[2])
        )
    )
    assert document["restarts"][0]["after_samples"] == 9  # the third prompt is about as long as the second
    assert "one token took" in document["restarts"][0]["reason"]
    assert phases.count("measuring again") == 1
    assert [len(arm["samples"]) for arm in document["arms"]] == [4, 4, 4]
    assert len(document["order"]) == 12


@pytest.mark.slow
def test_a_machine_that_stays_busy_is_reported_as_it_is(
    engine: Engine, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("engine.evaluation.throughput.disturbance", lambda *_: "busy")
    switches = Switches(max_tokens=4, claim="no-slowdown", restarts=2)
    document = check(measure_throughput(engine, prompts[:2], switches, prepare(), progress=quiet))
    assert [restart["after_samples"] for restart in document["restarts"]] == [3, 3]
    assert document["configuration"]["restarts"] == 2
    assert len(document["order"]) == 6
    assert [claim["name"] for claim in document["claims"]] == ["identical_output", "no_slowdown"]


BUSY = OtherLoad(seconds=10.0, other_cpu_share=0.4, services={})


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize(
    ("idle", "timed", "claimed"), [(BUSY, None, False), (None, BUSY, False), (None, None, True)]
)
def test_auto_claims_a_speed_only_where_the_machine_was_quiet(
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    idle: OtherLoad | None,
    timed: OtherLoad | None,
    claimed: bool,
):
    rows = [{"id": f"code-{i}", "kind": "code", "prompt": f"def f{i}(x):"} for i in range(5)]
    prompts = load_prompts(str(write(tmp_path / "five.jsonl", *rows)))
    still = OtherLoad(seconds=1000.0, other_cpu_share=0.01, services={})
    monkeypatch.setattr("engine.evaluation.throughput.idle_load", lambda: idle or still)
    monkeypatch.setattr(LoadWatch, "timed_load", timed or still)
    monkeypatch.setattr("engine.evaluation.throughput.disturbance", lambda *_: None)
    document = check(measure_throughput(engine, prompts, Switches(max_tokens=40), prepare(), progress=quiet))
    assert (len(document["claims"]) == 2) is claimed
    assert (document["configuration"]["speed_not_claimed"] is None) is claimed
    assert (document["environment"]["load"]["other_cpu_share"] == 0.4) is (timed is BUSY)


@pytest.mark.slow
def test_a_busy_loop_is_seen_in_the_load() -> None:
    command = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command) for _ in range((os.cpu_count() or 1) // 4 + 1)]
    try:
        load = idle_load()
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert busy(load) is not None
    assert load.seconds >= 1


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("block", ["1", "4"])
def test_throughput_with_a_fixed_block(folders: tuple[Path, Path], prompts: list[Prompt], block: str):
    engine = open_engine(Options(folders[0], str(folders[1]), block=block))
    switches = Switches(max_tokens=12, claim="no-slowdown")
    document = check(measure_throughput(engine, prompts[:2], switches, prepare(), progress=quiet))
    plain, ours = document["arms"][:2]
    assert [row["tokens"] for row in ours["samples"]] == [row["tokens"] for row in plain["samples"]]
    blocks = {item["block"] for row in ours["samples"] for item in row["rounds"]}
    assert max(blocks) == int(block)
    if block == "1":
        assert ours["system"]["drafter"] is None
        assert [claim["name"] for claim in document["claims"]] == ["identical_output", "no_slowdown"]


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize(("count", "max_tokens"), [(4, 40), (5, 32)])
def test_too_little_to_time_claims_no_speed_by_itself(
    engine: Engine, tmp_path: Path, count: int, max_tokens: int
):
    rows = [{"id": f"code-{i}", "kind": "code", "prompt": f"def f{i}(x):"} for i in range(count)]
    prompts = load_prompts(str(write(tmp_path / "few.jsonl", *rows)))
    switches = Switches(max_tokens=max_tokens)
    document = check(measure_throughput(engine, prompts, switches, prepare(), progress=quiet))
    assert [claim["name"] for claim in document["claims"]] == ["identical_output"]


@pytest.mark.slow
def test_without_a_drafter_only_the_baseline_is_measured(folders: tuple[Path, Path], prompts: list[Prompt]):
    engine = open_engine(Options(folders[0], "none"))
    document = check(measure_throughput(engine, prompts, Switches(max_tokens=8), prepare(), progress=quiet))
    assert [arm["name"] for arm in document["arms"]] == ["plain"]
    assert (document["claims"], document["summary"]["comparisons"]) == ([], [])
    with pytest.raises(ConfigurationError, match="give --drafter"):
        measure_throughput(engine, prompts, Switches(claim="speedup"), prepare(), progress=quiet)


@pytest.mark.slow
def test_recall_runs_the_system_the_oracle_and_the_control(engine: Engine, tmp_path: Path):
    rows = [needle_row(), needle_row(id="r-2", prompt=f"2 {needle_row()['prompt']}")]
    prompts = load_prompts(str(write(tmp_path / "p.jsonl", *rows)))
    switches = RecallSwitches(max_tokens=6, min_recall=0.5, claim="parity")  # so few do not by themselves
    document = check(measure_recall(engine, prompts, switches, prepare(), progress=quiet, request=REQUEST))
    ours, oracle, control = document["arms"]
    assert [arm["role"] for arm in (ours, oracle, control)] == ["sut", "oracle", "control"]
    assert control["control"] == "no_needle"
    assert [row["tokens"] for row in ours["samples"]] == [row["tokens"] for row in oracle["samples"]]
    assert not any(row["needle"]["prompt_contains_needle"] for row in control["samples"])
    assert all(row["needle"]["prompt_contains_needle"] for row in ours["samples"])
    assert [claim["name"] for claim in document["claims"]] == ["recall_parity", "recall"]
    assert len(document["order"]) == 6
    [compared] = document["summary"]["comparisons"]
    assert (compared["arm"], compared["baseline"]) == (ours["name"], "oracle")
    assert compared["decode_ratio"] > 0


@pytest.mark.sampled(0, 3)
@pytest.mark.parametrize("block", ["auto", "4", "1"])
def test_recall_decodes_prompts_together(folders: tuple[Path, Path], tmp_path: Path, block: str):
    engine = open_engine(Options(folders[0], str(folders[1]), block=block))
    rows = [needle_row(id=f"r-{i}", prompt=f"{i} {needle_row()['prompt']}") for i in range(5)]
    prompts = load_prompts(str(write(tmp_path / "p.jsonl", *rows)))
    seen: list[int] = []
    document = check(
        measure_recall(
            engine,
            prompts,
            RecallSwitches(max_tokens=9, batch=3),
            prepare(),
            progress=lambda done, *_: seen.append(done),
        )
    )
    ours, oracle, control = document["arms"]
    assert [row["tokens"] for row in ours["samples"]] == [row["tokens"] for row in oracle["samples"]]
    assert (document["configuration"]["batch"], document["configuration"]["compiled"]) == (3, False)
    assert seen == sorted(seen)
    assert [arm for arm, _ in document["order"][:9:3]] == [ours["name"], "oracle", "no_needle"]
    assert [arm for arm, _ in document["order"][9::2]] == ["no_needle", "oracle", ours["name"]]
    for row in (*ours["samples"], *control["samples"]):
        assert row["cache"]["classes"] == {"RaggedKV": 6}
        spent = sum(item["draft_s"] + item["verify_s"] for item in row["rounds"])
        assert 0 < spent <= row["decode_s"] + 1e-6
    lasted = datetime.fromisoformat(document["finished_at"]) - datetime.fromisoformat(document["started_at"])
    whole = sum(row["prefill_s"] + row["decode_s"] for arm in document["arms"] for row in arm["samples"])
    assert whole <= lasted.total_seconds()


def test_a_prompt_that_ends_at_once_counts_in_a_batch(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    prompts = load_prompts(str(write(tmp_path / "p.jsonl", needle_row(), needle_row(id="r-2", prompt=FACT))))
    encoded = encode_all(engine, prompts)
    first = run_arm(engine, plain_arm(PLAIN), encoded[0], 4, engine.new_draft_length()).tokens[0]
    monkeypatch.setattr(type(engine.target), "stops", frozenset({first}))
    outcomes = speculate_batch(engine, encoded, 4, engine.new_draft_length())
    assert (outcomes[0].tokens, outcomes[0].finish, outcomes[0].rounds) == ([first], "stop", [])
    assert outcomes[0].decode_s == 0
    assert outcomes[0].cache_classes == outcomes[1].cache_classes == {"RaggedKV": 6}
    assert outcomes[1].rounds


def test_a_diagnosis_of_one_sequence_is_refused_for_a_batch(folders: tuple[Path, Path], tmp_path: Path):
    engine = open_engine(Options(folders[0], str(folders[1]), single_graph=True))
    prompts = load_prompts(str(write(tmp_path / "p.jsonl", needle_row())))
    with pytest.raises(ConfigurationError, match="--single-graph"):
        measure_recall(engine, prompts, RecallSwitches(batch=2), prepare(), progress=quiet)


def test_recall_needs_needles(engine: Engine, prompts: list[Prompt]):
    with pytest.raises(PromptError, match="code-0 has none"):
        measure_recall(engine, prompts, RecallSwitches(), prepare(), progress=quiet)


def test_a_probe_describes_the_machine_and_claims_nothing_else():
    document = check(probe_machine(prepare(), REQUEST))
    assert (document["arms"], document["claims"]) == ([], [{"name": "machine"}])
    assert document["configuration"]["ring_rollback_exact"] is True
    assert document["configuration"]["product_gflop_per_s"] > 0


def test_the_rings_self_test_can_fail(monkeypatch: pytest.MonkeyPatch):
    from engine.cache.ring import SlidingRing

    assert ring_rolls_back()
    monkeypatch.setattr(SlidingRing, "commit", lambda self, dropped: setattr(self, "_pending", None))
    assert not ring_rolls_back()


def generated(engine: Engine, prompt: Prompt, max_tokens: int) -> tuple[list[TextStep], dict[str, Any]]:
    """A generation's steps, and its report."""
    target, switches = engine.target, GenerateSwitches(max_tokens)
    evaluation = Evaluation("throughput", "generate", engine, switches, prepare(), resumable=False)
    tokens = encode(prompt, target.tokenizer, target.target.vocab_size, target.context)
    draft_length = engine.new_draft_length()
    steps = list(generate(engine, tokens, max_tokens, switches.options(), draft_length=draft_length))
    outcome = steps[-1].outcome
    assert outcome is not None
    return steps, check(evaluation.report_row(prompt.content, tokens, outcome))


def test_one_generation_streams_its_text_and_can_be_reported(engine: Engine, prompts: list[Prompt]):
    steps, document = generated(engine, prompts[0], 20)
    outcome = steps[-1].outcome
    assert outcome is not None
    assert all(step.outcome is None for step in steps[:-1])
    assert "".join(step.text for step in steps) == outcome.text
    assert [token for step in steps for token in step.tokens] == outcome.tokens
    assert [step.round for step in steps if step.round] == outcome.rounds
    assert document["claims"] == []
    summary = document["summary"]["arms"][document["arms"][0]["name"]]
    assert summary["generated_tokens"] == len(outcome.tokens) == 20
    assert summary["decode_tokens_per_s"] == outcome.decode_tokens_per_s
    assert (summary["verify_rounds"], summary["acceptance_length"]) == (
        outcome.verify_rounds,
        outcome.acceptance_length,
    )


def test_a_divergence_is_recorded_with_plain_decodings_gap(engine: Engine, prompts: list[Prompt]):
    target = engine.target
    tokens = encode(prompts[0], target.tokenizer, target.target.vocab_size, target.context)
    outcome = run_arm(engine, plain_arm(PLAIN), tokens, 10, engine.new_draft_length())
    row = sample(prompts[0], tokens, outcome)
    other = (*outcome.tokens[:4], (outcome.tokens[4] + 1) % tiny.VOCAB, *outcome.tokens[5:])
    plain = arm_of("plain", "baseline", row)
    ours = arm_of("speculative", "sut", row.model_copy(update={"tokens": other}))
    [found] = find_divergences(engine, [tokens], plain, ours)
    assert (found.position, found.plain_token) == (4, outcome.tokens[4])
    assert found.plain_gap == pytest.approx(plain_gap(target, tokens, 4, 2048))
    assert found.plain_gap > 0
    assert summarise([plain, ours]).comparisons[0].identical_samples == 0


def test_rounding_is_measured_along_the_rounds_that_were_run(engine: Engine):
    text = list(range(20, 40))
    found = block_error(engine.target, [Run(text[:8], text[8:], [(2, 1), (8, 2), (1, 0), (8, 7)])], 3)
    assert found["positions"] == 2 + 3 + 1 + 6  # the text ends inside the last block
    assert 0 <= found["max_abs_logit_error"] < 1e-2


def dead(self: BlockDrafter, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
    """Proposes constants, and never asks its network."""
    return Draft(mx.full((count,), 7, mx.int32))


def never_ran(document: dict[str, Any]) -> bool:
    found = judge(json.dumps(document).encode()).violations
    return "ENGINE_NEVER_RAN" in {violation.code for violation in found}


def drafted(document: dict[str, Any]) -> int:
    """Blocks in all rows."""
    rounds = [each for arm in document["arms"] for row in arm["samples"] for each in row["rounds"]]
    return sum(each["block"] >= 2 for each in rounds)


@pytest.mark.slow
def test_a_drafter_that_never_asks_its_network_is_found_out(
    folders: tuple[Path, Path], prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
):
    engine = open_engine(Options(folders[0], str(folders[1]), block="4"))
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(BlockDrafter, "propose", dead)
        measured = measure_throughput(
            engine, prompts[:2], Switches(max_tokens=12, claim="no-slowdown"), prepare(), progress=quiet
        )
        document = check(measured)
        assert drafted(document) > 0
        assert document["liveness"]["drafter_forwards"] == (0 if patched else drafted(document))
        assert never_ran(document) is patched
        _, document = generated(engine, prompts[0], 12)
        assert never_ran(document) is patched
        assert (document["liveness"]["drafter_forwards"] == 0) is patched


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("patched", [False, True])
def test_the_drafters_of_a_batch_are_counted_each_by_itself(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, patched: bool
):
    engine = open_engine(Options(folders[0], str(folders[1]), block="4"))
    rows = [needle_row(id=f"r-{i}", prompt=f"{i} {needle_row()['prompt']}") for i in range(4)]
    prompts = load_prompts(str(write(tmp_path / "p.jsonl", *rows)))
    if patched:
        monkeypatch.setattr(BlockDrafter, "propose", dead)
    switches = RecallSwitches(max_tokens=9, batch=batch)
    document = check(measure_recall(engine, prompts, switches, prepare(), progress=quiet))
    assert drafted(document) > 0
    assert document["liveness"]["drafter_forwards"] == (0 if patched else drafted(document))
    assert never_ran(document) is patched


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("kind", ["prompt-lookup", "prompt-lookup+dflash"])
def test_look_ups_are_no_forwards(folders: tuple[Path, Path], prompts: list[Prompt], kind: str):
    spec = kind if kind == "prompt-lookup" else f"prompt-lookup+{folders[1]}"
    engine = open_engine(Options(folders[0], spec, block="4"))
    switches = Switches(max_tokens=16, claim="no-slowdown")
    document = check(measure_throughput(engine, prompts[:2], switches, prepare(), progress=quiet))
    forwards = document["liveness"]["drafter_forwards"]
    assert document["arms"][1]["system"]["drafter"] == kind
    assert drafted(document) > 0
    assert forwards == 0 if kind == "prompt-lookup" else 0 < forwards <= drafted(document)
    assert not never_ran(document)


def test_the_environment_names_what_ran(engine: Engine):
    block = describe(prepare(), LoadWatch(), {"target": engine.target.card})
    assert block["models"]["target"]["parameters"] == engine.target.card.parameters > 0
    assert block["git"]["source_sha256"] == engine_digest()
    assert block["cpu_count"] >= 1
    assert block["memory_bytes"] > 2**28
