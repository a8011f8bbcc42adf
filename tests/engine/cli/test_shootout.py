"""``eval kv`` and ``eval quality``: a table, one JSON line, a report, and bad switches before any work."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from bridge.evidence.gate import judge_file
from engine.cli import run
from engine.cli.tables import KV_NOTES
from engine.evaluation.haystack import generate
from engine.evaluation.prompts import tokens_of
from engine.generate import ChatSwitches
from engine.target.loading import load_target
from evidence_format.text import tokens_digest
from tests.engine.evaluation.test_prompts import needle_row, write


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KAKEYA_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def models(folders: tuple[Path, Path]) -> list[str]:
    return ["--model", str(folders[0]), "--drafter", str(folders[1])]


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(["eval", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def last_json(out: str) -> dict[str, Any]:
    return json.loads(out.strip().splitlines()[-1])


@pytest.mark.slow
def test_one_command_prints_the_shootout(capsys, models: list[str], tmp_path: Path):
    report = tmp_path / "kv.json"
    code, out, err = call(
        capsys,
        *("kv", "--policies", "sink-window:2,20 sliding-bounded:1,4", "--context", "330", "--depths", "0.2"),
        *("--per-depth", "1", "--speed-prompts", "none", "--max-tokens", "8", "--answer-tokens", "4"),
        *("--no-compile", "--report", str(report), *models),
    )
    assert code == 0, err
    lines = out.splitlines()
    table = [line.strip() for line in lines].index("KV policies")
    assert [line.split()[0] for line in lines[table + 2 : table + 5]] == [
        "native",
        "sink-window:2,20@all",
        "sliding-bounded:1,4@sliding",
    ]
    assert all(len(line) <= 80 for line in lines[:-1])
    found = last_json(out)
    assert (found["kind"], found["claims"], found["report"]) == ("kv", [], str(report))
    assert [line["policy"] for line in found["policies"]] == [
        "native",
        "sink-window:2,20@all",
        "sliding-bounded:1,4@sliding",
    ]
    assert set(found["recall_by_depth"]) == {"oracle", "native", "no_needle"} | {
        line["policy"] for line in found["policies"]
    }
    assert judge_file(report).violations == ()
    assert "progress 5/5 checking kv" in err


@pytest.mark.slow
def test_quality_counts_equal_outputs_by_set(capsys, models: list[str], tmp_path: Path):
    rows = [{"id": f"a-{i}", "prompt": f"x = {i}\n" * 3} for i in range(3)]
    own, report = str(write(tmp_path / "own.jsonl", *rows)), tmp_path / "q.json"
    arguments = ("quality", "--prompts", own, "--max-tokens", "12", "--report", str(report), *models)
    code, out, err = call(capsys, *arguments)
    assert code == 0, err
    assert "│ a       │         3 │  3 │" in out
    assert "ours: 0 of 3 outputs run away in repetition" in out
    assert last_json(out)["identical_by_set"] == {"a": [3, 3]}
    assert judge_file(report).violations == ()
    code, out, _ = call(capsys, *arguments, "--kv", "sink-window:1,2", "--json")
    assert code == 0
    assert len(out.splitlines()) == 1
    assert last_json(out)["claims"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kv", "--policies", "lattice:e9,3"), "'e9' is no lattice"),
        (("kv", "--policies", ""), "at least one policy"),
        (("kv", "--kv", "affine:4,64"), "give --policies 'affine:4,64' in place of --kv"),
        (("kv", "--depths", "deep"), "--depths 'deep'"),
        (("kv", "--claim-parity", "sink-window"), "add --speed-prompts none"),
        (("kv", "--context", "60"), "too short"),
        (("quality", "--claim", "match"), "--min-match go together"),
        (("quality", "--min-match", "0.5"), "--min-match go together"),
        (("quality", "--drafter", "none", "--limit", "1"), "nothing to compare"),
        (("quality", "--kv", "restored:exact", "--limit", "1"), "without its controls"),
    ],
)
def test_switches_that_make_no_sense_are_exit_2(capsys, arguments: tuple[str, ...], message: str):
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("name", ["kv", "quality"])
def test_help_shows_how(capsys, name: str):
    code, out, _ = call(capsys, name, "--help")
    assert code == 0
    assert f"kakeya_engine eval {name} --report {name}.json" in out


def test_the_legend_fits_a_narrow_terminal():
    assert max(map(len, KV_NOTES.splitlines())) <= 80


NONCE = "20260102t030405z0123456789ab"
BOUND = (
    *("--request-nonce", NONCE, "--workload-sha", "a" * 40),
    *("--preset-digest", "b" * 64, "--engine-source", "installed"),
)
FROM_NONCE = int(hashlib.sha256(NONCE.encode()).hexdigest()[:8], 16)
MADE_UP = ("--context", "330", "--depths", "0.2", "--per-depth", "1", "--max-tokens", "3", "--no-compile")


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize(
    ("given", "seed"),
    [((), 0), (BOUND, FROM_NONCE), ((*BOUND, "--seed", "nonce"), FROM_NONCE), ((*BOUND, "--seed", "5"), 5)],
)
def test_made_up_prompts_take_their_seed_from_the_request(
    capsys, models: list[str], tmp_path: Path, given: tuple[str, ...], seed: int
):
    tokenizer = load_target(Path(models[1])).tokenizer
    [prompt] = generate(tokenizer, context=330, depths=(0.2,), per_depth=1, seed=seed)
    expected = tokens_digest(tokens_of(prompt, tokenizer, ChatSwitches()))
    for command in (("recall",), ("kv", "--policies", "sink-window:2,20", "--speed-prompts", "none")):
        more = ("--answer-tokens", "3") if command[0] == "kv" else ()
        report = tmp_path / f"{command[0]}.json"
        code, _, err = call(capsys, *command, *more, *MADE_UP, "--report", str(report), *given, *models)
        assert code == 0, err
        document = json.loads(report.read_text())
        assert document["configuration"]["seed"] == seed
        assert document["arms"][0]["samples"][0]["prompt_sha256"] == expected


@pytest.mark.slow
def test_prompts_of_a_file_keep_their_order(capsys, models: list[str], tmp_path: Path):
    report = tmp_path / "recall.json"
    rows = [
        needle_row(id=f"own-{number}", prompt=f"{number} {needle_row()['prompt']}") for number in range(4)
    ]
    file = write(tmp_path / "own.jsonl", *rows)
    more = ("--prompts", str(file), "--max-tokens", "2", "--no-compile", "--report", str(report))
    code, _, err = call(capsys, "recall", *more, *BOUND, *models)
    assert code == 0, err
    document = json.loads(report.read_text())
    assert document["configuration"]["seed"] == 0
    ids = [row["prompt_id"] for row in document["arms"][0]["samples"]]
    assert ids == ["own-0", "own-1", "own-2", "own-3"]


def test_a_seed_that_is_no_number_is_refused(capsys, models: list[str]):
    code, _, err = call(capsys, "kv", "--seed", "moon", *models)
    assert code == 2
    assert "'moon' is not a valid integer" in err


def test_acceptance_has_a_report_a_drafter_and_one_table(
    capsys: pytest.CaptureFixture[str], models: list[str], tmp_path: Path
):
    short = tmp_path / "short.jsonl"
    write(short, {"id": "one", "prompt": "ab ab ab ab"})
    switches = [
        "--speed-limit=1",
        "--max-tokens=4",
        "--block=2",
        "--policies=sink-window:1,8",
        f"--speed-prompts={short}",
    ]
    report = tmp_path / "matrix.json"
    code, out, err = call(
        capsys, "acceptance", *models, "--drafter=prompt-lookup", *switches, f"--report={report}"
    )
    assert (code, out.count('{"kind"')) == (0, 1), err
    rows = json.loads(out.splitlines()[-1])["drafters"]
    assert [(row["drafter"], row["report"]) for row in rows] == [
        ("drafter", str(report)),
        ("prompt-lookup", str(tmp_path / "matrix-prompt-lookup.json")),
    ]
    for row, name in zip(rows, ("dflash", "prompt-lookup"), strict=True):
        document = json.loads(Path(row["report"]).read_text())
        assert {arm["system"]["drafter"] for arm in document["arms"]} == {name}
        assert {each["policy"] for each in row["policies"]} == {"native", "sink-window:1,8@all"}
