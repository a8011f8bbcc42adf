"""Reports: the summary against figures computed by hand, the file whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.cache.stats import KVUse
from engine.decode import Round
from engine.errors import EngineError
from engine.evaluation.prompts import Needle, Prompt, raw_prompt
from engine.evaluation.report import build_report, now, sample, write_document
from engine.generate import Outcome
from evidence_format.figures import summarise
from evidence_format.model import Arm, ArmRole, ParityComparison, Report, ReportClaim, Sample, System
from evidence_format.parse import parse
from evidence_format.text import tokens_digest
from tests.bridge.evidence import reports


def outcome(count: int, decode_s: float, rounds: list[Round] | None = None, text: str = "t", **more: Any):
    values: dict[str, Any] = {
        "tokens": list(range(count)),
        "text": text,
        "finish": "length",
        "prefill_s": 0.5,
        "decode_s": decode_s,
        "rounds": rounds or [],
        "path": "plain",
        "cache_classes": {"KVCache": 1},
        "resident_bytes": 100 * count,
    }
    return Outcome(**values | more)


def arm_of(name: str, role: ArmRole, *rows: Sample, **system: Any) -> Arm:
    declared = {"loop": "k", "drafter": None, "block": None, "kv": "native", "restoration": None} | system
    return Arm(name=name, role=role, system=System(**declared), timing_scope="decode", samples=rows)


def two_arms() -> list[Arm]:
    plain: list[Sample] = []
    ours: list[Sample] = []
    rounds = [Round(1, 0, 0.0, 0.1), Round(8, 3, 0.2, 0.3), Round(8, 5, 0.2, 0.3)]
    for index, (plain_s, our_s) in enumerate([(1.0, 0.5), (2.0, 0.5)]):
        prompt = raw_prompt("x", f"p-{index}")
        plain.append(sample(prompt, [1, 2], outcome(11, plain_s)))
        ours.append(sample(prompt, [1, 2], outcome(11, our_s, rounds)))
    return [arm_of("plain", "baseline", *plain), arm_of("speculative", "sut", *ours, drafter="dflash")]


def test_the_summary_is_what_the_rows_give():
    summary = summarise(two_arms()).model_dump()
    ours, plain = summary["arms"]["speculative"], summary["arms"]["plain"]
    assert (ours["samples"], ours["generated_tokens"], ours["decoded_tokens"]) == (2, 22, 20)
    assert ours["median_decoded_tokens"] == 10
    assert ours["decode_tokens_per_s"] == pytest.approx(20 / 1.0)
    assert ours["end_to_end_tokens_per_s"] == pytest.approx(22 / 2.0)
    assert (ours["verify_rounds"], ours["acceptance_length"]) == (4, (4 + 6) / 2)
    assert ours["max_resident_bytes"] == 1100
    assert (plain["verify_rounds"], plain["acceptance_length"], plain["recall"]) == (0, None, None)
    [pair] = summary["comparisons"]
    assert (pair["arm"], pair["baseline"]) == ("speculative", "plain")
    assert pair["decode_ratio"] == pytest.approx(20 / (20 / 3))
    assert pair["median_decode_ratio"] == pytest.approx((2 + 4) / 2)
    assert (pair["identical_samples"], pair["compared_samples"]) == (2, 2)
    assert build(drafter_forwards=14).document["liveness"] == {  # not what the rounds would say
        "rounds": 6,
        "drafter_forwards": 14,
        "warm_up_forwards": 0,
        "restored_positions": 0,
        "fallbacks": [],
    }


def test_a_prompt_that_decoded_nothing_has_no_ratio():
    row = sample(raw_prompt("x"), [1], outcome(1, 0.0))
    [pair] = summarise([arm_of("plain", "baseline", row), arm_of("ours", "sut", row)]).comparisons
    assert (pair.decode_ratio, pair.median_decode_ratio) == (None, None)


@pytest.mark.parametrize(("text", "hit"), [("it is 4821.", True), ("it is 482 1", False), ("", False)])
def test_a_needle_is_hit_when_the_text_holds_the_answer(text: str, hit: bool):
    needle = Needle("The code is 4821.", "4821", 0.5)
    prompt = Prompt("r-1", "retrieval", "A. The code is 4821. B.", None, needle, "")
    row = sample(prompt, [1], outcome(3, 1.0, text=text)).needle
    assert row is not None
    assert row.hit is hit
    assert (row.prompt_contains_needle, row.prompt_contains_answer_outside_needle) == (True, False)
    bare = sample(prompt.without_needle(), [1], outcome(3, 1.0, text=text)).needle
    assert bare is not None
    assert bare.prompt_contains_needle is False
    twice = Prompt("r-1", "retrieval", "4821. The code is 4821. B.", None, needle, "")
    found = sample(twice, [1], outcome(3, 1.0)).needle
    assert found is not None
    assert found.prompt_contains_answer_outside_needle is True


def test_an_empty_answer_is_never_a_hit():
    prompt = Prompt("r-1", "retrieval", "A. B.", None, Needle("A.", "", 0.5), "")
    found = sample(prompt, [1], outcome(3, 1.0)).needle
    assert found is not None
    assert found.hit is False


@pytest.mark.parametrize("more", [{"prefill_s": float("nan")}, {"text": "x" * 400_001}])
def test_a_row_that_no_report_can_hold_is_an_error(more: dict[str, Any]):
    with pytest.raises(EngineError, match="no report can hold the row of r-1"):
        sample(raw_prompt("x", "r-1"), [1], outcome(3, 1.0, **more))


@pytest.mark.parametrize("bound", [7, 7.0])
def test_a_bound_is_written_as_it_was_given(bound: float):
    [claim] = build(claims=[ReportClaim(name="resident_bytes", at_most=bound)]).document["claims"]
    assert repr(claim) == repr({"name": "resident_bytes", "at_most": bound})


def test_digests_are_of_ascii_decimals_joined_by_spaces():
    import hashlib

    assert tokens_digest([12, 3]) == hashlib.sha256(b"12 3").hexdigest()


def test_rows_of_a_policy_have_bytes_restored_and_answer():
    needle = Needle("The code is 4821.", "4821", 0.5)
    prompt = Prompt("r-1", "retrieval", "A. The code is 4821. B.", None, needle, "")
    use = KVUse(layers=(1, 2), values=1000, nbytes=625)
    found = outcome(3, 1.0, text="<think>4821?</think> 48 21", kv=use, restored=12)
    coded = sample(prompt, [1], found, answer_text="48 21", distortion=(0.25, 0.5))
    row = coded.model_dump(mode="json", exclude_unset=True)
    assert row["kv"] == {
        "layers": [1, 2],
        "values": 1000,
        "bytes": 625,
        "key_distortion": 0.25,
        "value_distortion": 0.5,
    }
    assert (row["restored_positions"], row["answer_text"], row["needle"]["hit"]) == (12, "48 21", False)
    plain = sample(prompt, [1], outcome(3, 1.0, text="4821"), answer_text="4821")
    assert plain.model_fields_set.isdisjoint({"kv", "restored_positions", "answer_text"})
    joined = sample(prompt, [1], outcome(3, 1.0, text="48<think></think>21"), answer_text="4821")
    assert joined.needle is not None
    assert joined.needle.hit is False
    arm = arm_of("a", "sut", coded, plain, kv="affine:4,64@all")
    figures = summarise([arm]).arms["a"]
    assert (figures.stored_bits_per_value, figures.key_distortion) == (5.0, 0.25)
    document = build(arms=[arm]).document
    assert document["liveness"]["restored_positions"] == 12
    assert document["arms"][0]["system"]["kv"] == "affine:4,64@all"


def test_outputs_that_loop_are_counted():
    rows = [
        sample(raw_prompt("x"), [1], outcome(1, 1.0, tokens=tokens)) for tokens in ([7] * 48, list(range(48)))
    ]
    assert summarise([arm_of("a", "sut", *rows)]).arms["a"].runaway_samples == 1


def test_a_comparison_with_a_reference_is_summed_up():
    turn = {"hidden_max_abs": 0.5, "logits_max_abs": 0.25, "argmax_agreement": 1.0, "path_equal": None}
    side = {"implementation": "x", "sha256": "0" * 64}
    values: dict[str, Any] = {
        "tolerance": 1.0,
        "dtype": "float32",
        "reference": side,
        "subject": side,
        "rounds": [
            {"case": "a", "round": 1, "rows": 4, **turn},
            {"case": "a", "round": 2, "rows": 12, **turn, "argmax_agreement": 0.5, "path_equal": True},
        ],
    }
    parity = ParityComparison.model_validate(values, strict=False)
    document = build(kind="parity", arms=[], parity=parity).document
    assert document["parity"] == values
    assert document["summary"]["parity"] == {
        "cases": 1,
        "rounds": 2,
        "rows": 16,
        "hidden_max_abs": 0.5,
        "logits_max_abs": 0.25,
        "argmax_agreement": 0.625,
        "paths_equal": 1,
        "paths_compared": 1,
    }
    values["rounds"][0]["hidden_max_abs"] = None
    summed = summarise([], ParityComparison.model_validate(values, strict=False)).parity
    assert summed is not None
    assert summed.hidden_max_abs is None
    assert "parity" not in build().document


def build(**more: Any) -> Report:
    values: dict[str, Any] = {
        "kind": "throughput",
        "started": now(),
        "claims": [],
        "environment": parse(reports.dump(reports.throughput())).environment.model_dump(),
        "configuration": {},
        "arms": two_arms(),
    }
    return build_report(**values | more)


def test_a_report_is_written_whole_and_replaces_an_older_one(tmp_path: Path):
    path = tmp_path / "new" / "report.json"
    write_document(path, build().document)
    first, again = path.read_bytes(), build()
    write_document(path, again.document)
    assert json.loads(path.read_text())["schema"] == "kakeya.evidence/1"
    assert parse(path.read_bytes()) == again
    assert path.read_bytes() != first
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]


def test_a_report_that_is_no_strict_json_leaves_no_file(tmp_path: Path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_document(tmp_path / "report.json", {"figure": float("nan")})
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="cannot be written"):
        write_document(tmp_path / "file" / "report.json", build().document)


def test_results_that_fit_no_report_are_an_error():
    with pytest.raises(EngineError, match="these results fit no report"):
        build(environment={})
