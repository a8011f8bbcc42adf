"""``parity``: the drafter networks equal the published implementation, and a bad reference never passes."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.cli import run

DATA = Path(__file__).parents[2] / "data" / "dflash"
CASES = sorted(path.name for path in DATA.iterdir() if path.is_dir())
Arrays = dict[str, Any]


def parity(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = run(["parity", "--golden", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def copy(case: str, folder: Path, change: Callable[[Arrays], None] | None = None) -> Path:
    """A case of its own, its reference arrays changed."""
    made = folder / case
    shutil.copytree(DATA / case, made)
    if change is not None:
        with np.load(made / "golden.npz") as stored:
            arrays = dict(stored)
        change(arrays)
        np.savez(made / "golden.npz", **arrays)
    return made


def test_the_stored_references_are_those_that_were_made():
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


def test_one_case_prints_a_table_and_then_the_line(capsys):
    code, out, _ = parity(capsys, DATA / "dflash2")
    assert code == 0
    assert "dflash2" in out.splitlines()[4]
    assert json.loads(out.splitlines()[-1])["passed"] is True


def test_above_the_tolerance_is_exit_1(capsys):
    code, out, err = parity(capsys, DATA / "full", "--tolerance", "1e-9", "--json")
    assert code == 1
    assert "2 of 2 rounds differ" in err
    document = json.loads(out)
    assert (document["passed"], document["cases"][0]["argmax_agreement"]) == (False, 1.0)


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
def test_any_difference_is_exit_1_and_shown_where_it_is(
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


def test_outputs_of_ours_that_are_not_finite_never_pass(capsys, tmp_path: Path):
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


def drop(name: str) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.__delitem__(name)


def put(name: str, index: Any, value: Any) -> Callable[[Arrays], None]:
    return lambda arrays: arrays[name].__setitem__(index, value)


def cut(name: str) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.update({name: arrays[name][..., :-1]})


def turn(name: str, kind: Any) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.update({name: arrays[name].astype(kind)})


NAMES = (
    "target_embedding",
    "target_lm_head",
    "target_hidden",
    "blocks",
    "spans",
    "round1_hidden",
    "round2_path",
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((drop(name), f"lacks {name}") for name in NAMES),
        *((cut(name), f"{name} is \\(") for name in NAMES if name != "blocks"),
        (cut("blocks"), r"round1_hidden is \(1, 8, 64\), should be \(1, 7, 64\)"),
        (put("round1_hidden", (0, 0, 0), np.nan), "round1_hidden holds NaN or infinity"),
        (put("round2_logits", (0, 0, 0), np.nan), "round2_logits holds NaN or infinity"),
        (put("target_hidden", (0, 0, 0), np.inf), "target_hidden holds NaN or infinity"),
        (turn("blocks", np.float32), "blocks is of type float32"),
        (turn("round1_logits", np.complex64), "round1_logits is of type complex64"),
        (turn("target_lm_head", str), "target_lm_head is of type"),
        (put("blocks", (0, 0), 512), "blocks holds tokens outside the vocabulary of 512"),
        (put("blocks", (1, 3), -1), "blocks holds tokens outside"),
        (put("round1_path", (0, 0), 4000), "round1_path holds tokens outside"),
        (put("spans", (1, 0), 20), "spans .* do not run on"),
        (put("spans", (1, 1), 30), "spans .* do not run on from 0 within 29 rows"),
        (put("spans", (0, 1), -3), "spans .* do not run on"),
    ],
)
def test_a_reference_that_cannot_be_used_is_exit_2(change: Any, message: str, capsys, tmp_path: Path):
    code, out, err = parity(capsys, copy("dflash2", tmp_path, change), "--json")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert re.search(message, err)


def cut_file(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100]) and None


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def set_weight(folder: Path) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    weights["fc.weight"] = mx.full(weights["fc.weight"].shape, mx.nan)
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def widen(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["conv_kernel_size"] = 4
    (folder / "config.json").write_text(json.dumps(config))


def flip_bytes(folder: Path) -> None:
    data = bytearray((folder / "golden.npz").read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    (folder / "golden.npz").write_bytes(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "golden.npz").unlink(), "golden.npz is missing"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no model"),
        (cut_file("golden.npz"), "golden.npz is corrupt"),
        (cut_file("model.safetensors"), "model.safetensors is corrupt"),
        (write("golden.npz", b"no zip"), "golden.npz is corrupt"),
        (write("golden.npz", b""), "golden.npz is corrupt"),
        (flip_bytes, "golden.npz is corrupt"),
        (write("config.json", b"[]"), "config.json does not hold a JSON object"),
        (set_weight, "fc.weight holds NaN"),
        (widen, "base_kernel"),
    ],
)
def test_files_that_cannot_be_used_are_exit_2(change: Any, message: str, capsys, tmp_path: Path):
    folder = copy("dflash2", tmp_path)
    change(folder)
    code, out, err = parity(capsys, folder, "--json")
    assert (code, out) == (2, "")
    assert message in err


def test_a_bad_case_among_good_ones_stops_all_before_any_work(capsys, tmp_path: Path):
    copy("full", tmp_path)
    (copy("dynamic", tmp_path) / "golden.npz").unlink()
    code, out, err = parity(capsys, tmp_path)
    assert (code, out) == (2, "")
    assert "dynamic/golden.npz is missing" in err


@pytest.mark.parametrize("arguments", [("nowhere",), (".", "--tolerance", "nan"), (".", "--tolerance", "-1")])
def test_arguments_that_make_no_sense_are_exit_2(
    arguments: tuple[str, ...], capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    copy("full", tmp_path)
    monkeypatch.chdir(tmp_path)
    code, out, err = parity(capsys, *arguments)
    assert (code, out) == (2, "")
    assert arguments[-1] in err


def test_a_folder_without_cases_is_exit_2(capsys, tmp_path: Path):
    code, _, err = parity(capsys, tmp_path)
    assert code == 2
    assert "holds no case" in err


def test_help_shows_how(capsys):
    assert run(["parity", "--help"]) == 0
    assert "kakeya_engine parity --golden" in capsys.readouterr().out
