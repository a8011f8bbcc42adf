"""Parity of verify forwards with single tokens, and the report of a comparison with a reference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from bridge.evidence.gate import judge
from engine.device import prepare
from engine.errors import ConfigurationError
from engine.evaluation.parity import (
    ROUNDS,
    Parity,
    ParitySwitches,
    RoundParity,
    compare_all,
    compare_target,
    measure_parity,
    open_target,
    plain_reference,
)
from engine.evaluation.prompts import load_prompts
from engine.target.loading import LoadedTarget
from engine.target.model import Target
from tests.engine.cli.parity_cases import DATA, copy
from tests.engine.evaluation.test_measurements import check, quiet
from tests.engine.evaluation.test_prompts import write


@pytest.fixture(scope="module")
def target(folders: tuple[Path, Path]) -> LoadedTarget:
    return open_target(folders[0], None)


def compared(target: LoadedTarget, tmp_path: Path, **changes: Any) -> Parity:
    prompts = load_prompts(
        str(write(tmp_path / "p.jsonl", *({"id": f"a-{i}", "prompt": f"x = {i}\n" * 4} for i in (1, 2))))
    )
    return compare_target(target, prompts, changes.pop("max_tokens", 24), 7, progress=quiet, **changes)


@pytest.mark.slow
def test_blocks_equal_single_tokens_across_rollbacks(target: LoadedTarget, tmp_path: Path):
    parity = compared(target, tmp_path)
    assert parity.passed
    assert (parity.tolerance, parity.dtype) == (1e-3, "float32")
    first = [item for item in parity.rounds if item.case == "a-1"]
    assert [item.round for item in first] == list(range(1, len(first) + 1))
    assert [item.rows for item in first][:4] == [accepted + 1 for _, accepted in ROUNDS[:4]]
    assert sum(item.rows for item in first) == 24
    assert all(item.hidden_max_abs is None and item.path_equal is None for item in parity.rounds)
    assert any(item.logits_max_abs > 0 for item in parity.rounds), "two computations, not one"


@pytest.mark.slow
def test_a_block_that_is_wrong_is_found(
    target: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    forward = Target.forward

    def bent(self: Target, tokens: mx.array, *rest: Any) -> Any:
        logits, rows = forward(self, tokens, *rest)
        return logits + (0.01 if 1 < tokens.shape[1] < 7 else 0), rows

    monkeypatch.setattr("engine.session.CompiledForward.of", lambda *_: None)
    monkeypatch.setattr(Target, "forward", bent)
    parity = compared(target, tmp_path)
    assert not parity.passed
    failed = [item for item in parity.rounds if item.logits_max_abs > 1e-3]
    blocks = [ROUNDS[(item.round - 1) % len(ROUNDS)][0] for item in failed]
    assert failed
    assert set(blocks) <= {2, 3, 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tolerance": -1.0}, "--tolerance"),
        ({"tolerance": float("nan")}, "--tolerance"),
        ({"max_tokens": 1}, "--max-tokens"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    target: LoadedTarget, tmp_path: Path, changes: dict[str, Any], message: str
):
    with pytest.raises(ConfigurationError, match=message):
        compared(target, tmp_path, **changes)


def round_of(**changes: Any) -> RoundParity:
    return replace(RoundParity("c", 1, 1e-6, 1e-6, 1.0, None, 20), **changes)


@pytest.mark.parametrize(("dtype", "share", "passed"), [("float32", 0.95, False), ("bfloat16", 0.95, True)])
def test_near_ties_may_turn_in_half_precision_alone(dtype: str, share: float, passed: bool):
    assert Parity((round_of(argmax_agreement=share),), 1e-4, dtype).passed is passed
    assert not Parity((round_of(argmax_agreement=0.5),), 1e-4, dtype).passed


@pytest.mark.parametrize(
    "changes", [{"hidden_max_abs": 2e-4}, {"logits_max_abs": 2e-4}, {"path_equal": False}]
)
def test_every_figure_decides(changes: dict[str, Any]):
    assert not Parity((round_of(**changes),), 1e-4).passed


def reported(**switches: Any) -> dict[str, Any]:
    return check(measure_parity(ParitySwitches(**switches), prepare(), progress=quiet)[1])


def test_report_of_stored_outputs_names_both_sides():
    document = reported(golden=DATA / "full", reference="dflash 0.1.0 (torch)")
    assert judge(json.dumps(document).encode()).violations == ()
    assert document["claims"] == [{"name": "parity", "at_most": 1e-4}]
    parity = document["parity"]
    assert parity["reference"]["implementation"] == "dflash 0.1.0 (torch)"
    assert parity["subject"]["sha256"] == document["environment"]["git"]["source_sha256"]
    assert parity["subject"]["implementation"].startswith("kakeya engine ")
    assert [(row["case"], row["round"], row["rows"]) for row in parity["rounds"]] == [
        ("full", 1, 8),
        ("full", 2, 8),
    ]
    assert (document["arms"], document["order"]) == ([], [])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_has_a_tolerance_of_its_own(dtype: str):
    document = reported(golden=DATA / "full", dtype=dtype, reference="dflash 0.1.0 (torch)")
    assert judge(json.dumps(document).encode()).violations == ()
    largest = max(row["logits_max_abs"] for row in document["parity"]["rounds"])
    assert 1e-3 < largest < document["parity"]["tolerance"]
    assert document["configuration"]["dtype"] == document["parity"]["dtype"] == dtype


def test_a_failed_comparison_is_reported_and_rejected():
    document = reported(golden=DATA / "full", tolerance=1e-9, reference="dflash 0.1.0 (torch)")
    codes = {violation.code for violation in judge(json.dumps(document).encode()).violations}
    assert "PARITY_TOLERANCE" in codes


def test_report_of_a_target_names_mlx_lm_and_the_model(folders: tuple[Path, Path], tmp_path: Path):
    prompts = str(write(tmp_path / "p.jsonl", {"id": "a-1", "prompt": "x = 1\n" * 4}))
    document = reported(target=True, model=folders[0], prompts=prompts, max_tokens=16)
    assert judge(json.dumps(document).encode()).violations == ()
    assert document["parity"]["reference"]["implementation"].startswith("mlx_lm ")
    assert set(document["environment"]["models"]) == {"target"}
    assert all(row["hidden_max_abs"] is None for row in document["parity"]["rounds"])


def test_reference_has_its_files_digest_and_the_cases_name(tmp_path: Path):
    one, both = (compare_all(folder)[1] for folder in (DATA / "full", DATA))
    assert one.sha256 != both.sha256
    assert one.implementation == "unknown"
    assert compare_all(copy("full", tmp_path))[1] == one

    def sign(arrays: dict[str, Any]) -> None:
        arrays["reference"] = "someone's torch"

    signed = copy("full", tmp_path / "signed", sign)
    assert compare_all(signed)[1].sha256 != one.sha256
    document = reported(golden=signed)
    assert document["parity"]["reference"]["implementation"] == "someone's torch"
    document = reported(golden=signed, reference="named here")
    assert document["parity"]["reference"]["implementation"] == "named here"
    assert plain_reference() == plain_reference()


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({}, "give either --golden DIR or --target"),
        ({"golden": DATA, "target": True}, "give either --golden DIR or --target"),
        ({"target": True, "reference": "x"}, "leave it out with --target"),
        ({"target": True, "limit": 0}, "--limit must be at least 1"),
        ({"golden": DATA, "dtype": "int8"}, "--dtype 'int8' is not one of float32, float16, bfloat16"),
    ],
)
def test_switches_that_make_no_sense_are_refused(switches: dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        measure_parity(ParitySwitches(**switches), prepare(), progress=quiet)
