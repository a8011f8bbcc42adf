"""Whole pairs: our loop drafts and emits what the published one did, and any difference shows."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from bridge.evidence.gate import judge
from tests.engine.cli import parity_cases
from tests.engine.cli.parity_cases import Arrays, parity

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data" / "pairs"
CASES = ("gemma4_nested", "gemma4_text", "llama_untied", "qwen35")


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


def rows_of(
    capsys: pytest.CaptureFixture[str], expected: int, *arguments: str | Path
) -> list[dict[str, Any]]:
    code, out, err = parity(capsys, *arguments, "--json")
    assert code == expected, err
    document = json.loads(out)
    assert document["passed"] is (expected == 0)
    rows: list[dict[str, Any]] = document["cases"]
    return rows


def failing(rows: list[dict[str, Any]]) -> list[int]:
    return [row["round"] for row in rows if not row["passed"]]


def test_stored_references_have_their_digests():
    lines = (DATA / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split() for line in lines)}
    found = {str(path.relative_to(DATA)): path for path in DATA.glob("*/**/*") if path.is_file()}
    assert listed.keys() == found.keys()
    for name, path in found.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == listed[name]


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("case", CASES)
def test_pair_equals_the_published_loop(case: str, capsys):
    rows = rows_of(capsys, 0, DATA / case)
    with np.load(DATA / case / "golden.npz") as stored:
        full = (stored["drafts"] >= 0).all(axis=1)
        assert stored["accepted"][full].max() > 1  # a draft was confirmed on the way
    assert [(row["case"], row["round"]) for row in rows] == [(case, n + 1) for n in range(int(full.sum()))]
    for row in rows:
        assert 0 < row["logits_max_abs"] < 1e-4
        assert (row["argmax_agreement"], row["tokens_equal"]) == (1.0, True)
        assert "hidden_max_abs" not in row


@pytest.mark.slow
def test_pairs_of_other_seeds_equal_the_published_package(capsys, tmp_path: Path):
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--no-deps"]
    target = ["--python", sys.executable, "--target", str(tmp_path / "packages")]
    subprocess.run([*uv, *target, "dflash==0.1.0"], check=True)
    path = os.pathsep.join([str(tmp_path / "packages"), str(ROOT)])
    for seed in ("0", "1", "2"):
        made = [sys.executable, "scripts/make_pair_references.py", str(tmp_path / seed), seed]
        subprocess.run(made, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": path})
        rows = rows_of(capsys, 0, tmp_path / seed)
        assert {row["case"] for row in rows} == set(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma4_text", "gemma4_nested"])
def test_missing_embedding_scale_fails_every_round(case: str, capsys, tmp_path: Path):
    folder = copy(case, tmp_path)
    config = json.loads((folder / "drafter" / "config.json").read_text())
    nested = config["dflash_config"]
    nested["input_embedding_scale"] = nested.get("input_embedding_scale", 1.0) / 32**0.5
    (folder / "drafter" / "config.json").write_text(json.dumps(config))
    rows = rows_of(capsys, 1, folder)
    assert failing(rows) == [row["round"] for row in rows]


def test_folders_may_hold_cases_of_both_layouts(capsys, tmp_path: Path):
    copy("gemma4_text", tmp_path)
    parity_cases.copy("full", tmp_path)
    rows = rows_of(capsys, 0, tmp_path)
    assert {(row["case"], "hidden_max_abs" in row, "tokens_equal" in row) for row in rows} == {
        ("full", True, False),
        ("gemma4_text", False, True),
    }


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("mixed", [False, True])
def test_the_gate_accepts_the_report_of_a_pair(mixed: bool, capsys, tmp_path: Path):
    cases = tmp_path / "cases"
    copy("qwen35", cases)
    if mixed:
        parity_cases.copy("dflash2", cases)
    where = tmp_path / "report.json"
    code, _, err = parity(capsys, cases, "--report", where, "--reference", "dflash 0.1.0", "--json")
    assert code == 0, err
    assert judge(where.read_bytes()).violations == ()
    spoilt = json.loads(where.read_text())
    next(turn for turn in spoilt["parity"]["rounds"] if turn["tokens_equal"])["tokens_equal"] = False
    assert [v.code for v in judge(json.dumps(spoilt).encode()).violations] == ["PARITY_TOLERANCE"]


@pytest.mark.slow
def test_reference_digest_covers_every_file_of_the_pair(capsys, tmp_path: Path):
    digests = set()
    for name in ("", "target/config.json", "drafter/config.json"):
        folder = copy("llama_untied", tmp_path / (name.partition("/")[0] or "plain"))
        if name:
            (folder / name).write_text((folder / name).read_text() + "\n")
        where = folder.parent / "report.json"
        assert parity(capsys, folder, "--report", where)[0] == 0
        reference = json.loads(where.read_text())["parity"]["reference"]
        assert reference["implementation"] == "dflash 0.1.0 (mlx)"
        digests.add(reference["sha256"])
    assert len(digests) == 3


def test_the_table_shows_tokens_that_differ(capsys, tmp_path: Path):
    code, out, err = parity(capsys, copy("llama_untied", tmp_path, put("tokens", 5, 9)))
    assert code == 1
    assert "1 of 18 rounds differ" in err
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    assert [row[1] for row in cells if row and row[5] == "DIFFERS"] == ["5"]


def put(name: str, index: Any, value: Any) -> Callable[[Arrays], None]:
    return lambda arrays: arrays[name].__setitem__(index, value)


def add(name: str, index: Any, value: Any) -> Callable[[Arrays], None]:
    return lambda arrays: arrays[name].__setitem__(index, arrays[name][index] + value)


def one_more_accepted(arrays: Arrays) -> None:
    """The reference took one more token in its third round, and one less in the one that took two."""
    two = int((arrays["accepted"] > 1).argmax())
    arrays["accepted"][2] += 1
    arrays["accepted"][two] -= 1


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize(
    ("case", "change", "rounds", "field"),
    [
        ("qwen35", add("drafts", (6, 2), -1), [7], "argmax_agreement"),
        ("gemma4_nested", add("drafts", (6, 2), -1), [7], "argmax_agreement"),
        ("qwen35", add("logits", (1, 4, 7), 0.01), [2], "logits_max_abs"),
        ("qwen35", put("logits", (1, 4, 7), np.nan), [2], "logits_max_abs"),
        ("qwen35", add("tokens", 0, 1), [1], "tokens_equal"),
        ("llama_untied", add("tokens", 3, 1), [3], "tokens_equal"),
        (
            "llama_untied",
            add("tokens", -1, -1),
            [18],
            "tokens_equal",
        ),  # of a shorter block: in the last round
    ],
)
def test_difference_is_exit_1_and_shown_in_its_round(
    case: str, change: Any, rounds: list[int], field: str, capsys, tmp_path: Path
):
    found = rows_of(capsys, 1, copy(case, tmp_path, change))
    assert failing(found) == rounds
    wrong = found[rounds[0] - 1]
    right = found[rounds[0] % len(found)]
    assert {name for name in wrong if wrong[name] != right[name] and name not in ("round", "passed")} <= {
        field,
        "logits_max_abs",
    }
    assert wrong[field] != right[field]


def test_another_count_of_accepted_tokens_differs(capsys, tmp_path: Path):
    rows = rows_of(capsys, 1, copy("qwen35", tmp_path, one_more_accepted))
    assert 3 in failing(rows)
    assert rows[2]["tokens_equal"] is False


def test_reference_that_ends_within_a_block_is_compared(capsys, tmp_path: Path):
    """As where a stop token is among those a round emitted."""

    def stop(arrays: Arrays) -> None:
        two = int((arrays["accepted"] > 1).argmax())
        arrays["accepted"][two] = 1
        for name in ("drafts", "logits", "accepted"):
            arrays[name] = arrays[name][: two + 1]
        arrays["tokens"] = arrays["tokens"][: 1 + int(arrays["accepted"].sum())]

    rows_of(capsys, 0, copy("qwen35", tmp_path, stop))


def drop(name: str) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.__delitem__(name)


def cut(name: str) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.update({name: arrays[name][..., :-1]})


def turn(name: str, kind: Any) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.update({name: arrays[name].astype(kind)})


def empty(name: str) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.update({name: arrays[name][:0]})


ARRAYS = ("prompt", "drafts", "logits", "accepted", "tokens")


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((drop(name), f"golden.npz lacks {name}") for name in ARRAYS),
        *((turn(name, str), f"{name} is of type") for name in ARRAYS),
        (turn("drafts", np.float32), "drafts is of type float32"),
        (cut("logits"), "logits is (24, 5, 299), should be (24, 5, 300)"),
        (cut("drafts"), "logits is (24, 5, 300), should be (24, 4, 300)"),
        (cut("accepted"), "accepted is (23,), should be (24)"),
        (cut("tokens"), "tokens holds 25; the first and those accepted are 26"),
        (empty("prompt"), "prompt is (0,), should be (rows)"),
        (empty("tokens"), "tokens is (0,), should be (rows)"),
        (empty("drafts"), "drafts is (0, 5), should be (rows, rows)"),
        (put("prompt", 0, 300), "prompt holds tokens outside the vocabulary of 300"),
        (put("tokens", 0, -1), "tokens holds tokens outside the vocabulary of 300"),
        (put("drafts", (2, 0), 300), "drafts of round 3 holds tokens outside the vocabulary of 300"),
        (put("drafts", (2, 0), -7), "drafts of round 3 holds tokens outside"),
        (put("drafts", (2, 1), -1), "drafts of round 3 are"),
        (put("drafts", (2, 4), -1), "drafts must begin with full blocks"),
        (put("drafts", slice(None), -1), "drafts of round 1 are"),
        (put("accepted", 3, 0), "accepted of round 4 is 0; 5 drafts emit 1 to 6 tokens"),
        (put("accepted", 3, 7), "accepted of round 4 is 7; 5 drafts emit 1 to 6 tokens"),
        (lambda arrays: arrays.update(reference=np.zeros(3)), "reference is (3,), should be ()"),
    ],
)
def test_a_reference_that_cannot_be_used_is_exit_2(change: Any, message: str, capsys, tmp_path: Path):
    code, out, err = parity(capsys, copy("qwen35", tmp_path, change), "--json")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: shutil.rmtree(folder / name)


def other_drafter(folder: Path) -> None:
    shutil.rmtree(folder / "drafter")
    shutil.copytree(parity_cases.DATA / "full", folder / "drafter")


def damaged(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100]) and None


def infinite(folder: Path) -> None:
    file = str(folder / "drafter" / "model.safetensors")
    weights = mx.load(file)
    mx.save_safetensors(file, weights | {"fc.weight": mx.full(weights["fc.weight"].shape, mx.inf)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove("golden.npz"), "golden.npz is missing"),
        (damaged("golden.npz"), "golden.npz is corrupt"),
        (without("target"), "target"),
        (without("drafter"), "drafter"),
        (remove("target/config.json"), "config.json is missing"),
        (damaged("target/model.safetensors"), "model.safetensors is corrupt"),
        (damaged("drafter/model.safetensors"), "model.safetensors is corrupt"),
        (infinite, "fc.weight holds NaN or infinite weights"),
        (other_drafter, "this drafter is for another target"),
    ],
)
def test_models_that_cannot_be_used_are_exit_2(change: Any, message: str, capsys, tmp_path: Path):
    folder = copy("qwen35", tmp_path)
    change(folder)
    code, out, err = parity(capsys, folder, "--json")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err
