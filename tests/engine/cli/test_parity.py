"""``parity``: the drafter networks equal the published implementation, and what differs is shown."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.cli import run
from tests.engine.cli.parity_cases import DATA, Arrays, copy, parity
from tests.engine.evaluation.test_prompts import write

BOUND = (
    *("--request-nonce", "20260102t030405z0123456789ab"),
    *("--workload-sha", "a" * 40),
    *("--preset-digest", "b" * 64),
    *("--engine-source", "installed"),
)
CASES = sorted(path.name for path in DATA.iterdir() if path.is_dir())


def test_stored_references_have_their_digests():
    lines = (DATA / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split() for line in lines)}
    found = {str(path.relative_to(DATA)): path for path in DATA.glob("*/*")}
    assert listed.keys() == found.keys()
    for name, path in found.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == listed[name]


def test_every_case_equals_the_published_implementation(capsys):
    code, out, err = parity(capsys, DATA, "--json")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 1
    document = json.loads(out)
    assert (document["tolerance"], document["passed"]) == (1e-4, True)
    assert [(row["case"], row["round"]) for row in document["cases"]] == [
        (c, r) for c in CASES for r in (1, 2)
    ]
    for row in document["cases"]:
        assert 0 < row["hidden_max_abs"] < 1e-4  # nothing is equal to the bit: it was computed
        assert 0 < row["logits_max_abs"] < 1e-4
        assert row["argmax_agreement"] == 1.0
        assert row["path_equal"] is (True if row["case"].startswith("dflash2") else None)


def rows_of(out: str) -> list[list[str]]:
    """The cells of the table."""
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    return [cells for cells in lines if cells]


def test_case_prints_a_row_per_round_and_the_json_line(capsys):
    code, out, err = parity(capsys, DATA / "dflash2")
    assert (code, err) == (0, "")
    document = json.loads(out.splitlines()[-1])
    assert document["passed"] is True
    assert set(document) == {"kind", "cases", "tolerance", "passed"}
    assert rows_of(out) == [
        [
            *("dflash2", str(row["round"])),
            *(f"{row[name]:.2e}" for name in ("hidden_max_abs", "logits_max_abs")),
            *("1.0000", "equal", "yes"),
        ]
        for row in document["cases"]
    ]
    assert [row["round"] for row in document["cases"]] == [1, 2]
    assert "tolerance 0.0001" in out.splitlines()[0]


def test_what_differs_is_shown_in_the_table_too(capsys, tmp_path: Path):
    folder = copy("dflash2", tmp_path, swap_path)
    code, out, err = parity(capsys, folder)
    assert code == 1
    assert "1 of 2 rounds differ" in err
    assert [row[4:] for row in rows_of(out)] == [["1.0000", "equal", "yes"], ["1.0000", "DIFFERS", "NO"]]
    code, out, _ = parity(capsys, copy("full", tmp_path, swap_choice))
    assert code == 1
    assert [row[4:] for row in rows_of(out)] == [["0.8750", "-", "NO"], ["1.0000", "-", "yes"]]
    assert json.loads(out.splitlines()[-1])["passed"] is False


def test_above_the_tolerance_is_exit_1(capsys):
    code, out, err = parity(capsys, DATA / "full", "--tolerance", "1e-9", "--json")
    assert code == 1
    assert "2 of 2 rounds differ" in err
    document = json.loads(out)
    assert (document["passed"], document["cases"][0]["argmax_agreement"]) == (False, 1.0)


def test_tolerance_is_the_largest_difference_that_passes(capsys):
    _, out, _ = parity(capsys, DATA / "full", "--json")
    rows = json.loads(out)["cases"]
    largest = max(row[name] for row in rows for name in ("hidden_max_abs", "logits_max_abs"))
    for tolerance, expected in ((largest, 0), (largest * (1 - 1e-9), 1)):
        code, out, _ = parity(capsys, DATA / "full", "--tolerance", repr(tolerance), "--json")
        assert (code, json.loads(out)["tolerance"]) == (expected, tolerance)


def shift_hidden(arrays: Arrays) -> None:
    arrays["round2_hidden"][0, 3, 5] += 2e-4


def shift_logits(arrays: Arrays) -> None:
    arrays["round1_logits"][0, 0, 0] += 2e-4


def swap_choice(arrays: Arrays) -> None:
    """Another likeliest token in the reference; the tolerance given lets the logits pass."""
    row = arrays["round1_logits"][0, 2]
    row[(row.argmax() + 1) % len(row)] = row.max() + 1


def swap_path(arrays: Arrays) -> None:
    arrays["round2_path"][0, 6] ^= 1


@pytest.mark.parametrize(
    ("case", "change", "tolerance", "field", "failing"),
    [
        ("full", shift_hidden, "1e-4", "hidden_max_abs", 1),
        ("full", shift_logits, "1e-4", "logits_max_abs", 0),
        ("full", swap_choice, "1e3", "argmax_agreement", 0),
        ("dflash2", swap_path, "1e3", "path_equal", 1),
    ],
)
def test_difference_is_exit_1_and_shown_in_its_round(
    case: str, change: Any, tolerance: str, field: str, failing: int, capsys, tmp_path: Path
):
    folder = copy(case, tmp_path, change)
    code, out, _ = parity(capsys, folder, "--tolerance", tolerance, "--json")
    assert code == 1
    rows = json.loads(out)["cases"]
    assert [row["passed"] for row in rows] == [number != failing for number in (0, 1)]
    wrong, right = rows[failing][field], rows[1 - failing][field]
    if field == "argmax_agreement":
        assert (wrong, right) == (7 / 8, 1.0)
    elif field == "path_equal":
        assert (wrong, right) == (False, True)
    else:
        assert right < 1e-4 < wrong


@pytest.mark.parametrize("name", ["round1_hidden", "round2_logits"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_reference_that_is_not_finite_never_passes(capsys, tmp_path: Path, name: str, value: float):
    def spoil(arrays: Arrays) -> None:
        arrays[name][0, 0, 0] = value

    code, out, _ = parity(capsys, copy("dflash2", tmp_path, spoil), "--json")
    assert code == 1
    assert not json.loads(out)["passed"]


def test_outputs_that_are_not_finite_never_pass(capsys, tmp_path: Path):
    """Weights so large that float32 overflows on the way."""
    folder = copy("full", tmp_path)
    weights = mx.load(str(folder / "model.safetensors"))
    weights["norm.weight"] = weights["norm.weight"] * 1.5e38
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    code, out, _ = parity(capsys, folder, "--tolerance", "1e308", "--json")
    assert code == 1
    row = json.loads(out)["cases"][0]
    assert (row["hidden_max_abs"], row["passed"]) == (None, False)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_has_its_own_tolerance(capsys, dtype: str):
    code, out, _ = parity(capsys, DATA / "full", "--dtype", dtype, "--json")
    document = json.loads(out)
    assert (code, document["passed"]) == (0, True)
    assert 1e-4 < max(row["logits_max_abs"] for row in document["cases"]) < document["tolerance"]
    code, out, err = parity(capsys, DATA / "full", "--dtype", dtype, "--tolerance", "1e-4", "--json")
    assert (code, json.loads(out)["passed"]) == (1, False)
    assert "2 of 2 rounds differ" in err


@pytest.mark.parametrize("bound", [False, True])
def test_a_report_is_written_where_it_is_asked_for(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: bool
):
    monkeypatch.setenv("KAKEYA_STATE", str(tmp_path / "state"))
    where = tmp_path / "parity.json"
    flags = BOUND if bound else ("--report", where)
    code, out, _ = parity(capsys, DATA / "full", "--reference", "dflash 0.1.0 (torch)", "--json", *flags)
    assert code == 0
    document = json.loads(out)
    report = json.loads(Path(document["report"]).read_text())
    assert (report["kind"], "request" in report) == ("parity", bound)
    assert bound or document["report"] == str(where)
    assert [row["logits_max_abs"] for row in report["parity"]["rounds"]] == [
        row["logits_max_abs"] for row in document["cases"]
    ]


def test_a_target_is_compared_with_plain_decoding(capsys, folders: tuple[Path, Path], tmp_path: Path):
    own = write(tmp_path / "own.jsonl", {"id": "a-1", "prompt": "x = 1"})
    arguments = ["parity", "--target", "--model", str(folders[0]), "--prompts", str(own), "--max-tokens", "9"]
    assert run(arguments) == 0
    out, err = capsys.readouterr()
    assert "progress 1/1 comparing" in err
    document = json.loads(out.splitlines()[-1])
    assert document["passed"] is True
    assert [row["case"] for row in document["cases"]] == ["a-1"] * 3
    assert "hidden_max_abs" not in document["cases"][0]
    assert [row[2] for row in rows_of(out)] == ["-"] * 3


def test_help_shows_how(capsys):
    assert run(["parity", "--help"]) == 0
    assert "kakeya_engine parity --golden" in capsys.readouterr().out
