"""An evaluation that is killed goes on where it was, and its report is as good as any."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from bridge.evidence.gate import judge
from engine.cli import run
from engine.evaluation.measure import run_arm
from tests.engine.evaluation.test_prompts import FACT, needle_row, write

ENGINE = [sys.executable, "-I", "-m", "engine"]
PROMPTS = 6


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KAKEYA_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def command(folders: tuple[Path, Path], tmp_path: Path) -> list[str]:
    prompt = needle_row()["prompt"]
    rows = [
        needle_row(
            id=f"r-{number}",
            prompt=f"{number} " + prompt.replace("4821", f"48{number}1"),
            answer=f"48{number}1",
            needle=FACT.replace("4821", f"48{number}1"),
        )
        for number in range(PROMPTS)
    ]
    own = str(write(tmp_path / "own.jsonl", *rows))
    models = ["--model", str(folders[0]), "--drafter", str(folders[1])]
    return ["eval", "recall", "--prompts", own, "--max-tokens", "24", *models]


def killed(command: list[str], journal: Path, rows: int, how: int = signal.SIGKILL) -> str:
    """Run until so many rows are on the disk, then end it; what it said."""
    child = subprocess.Popen([*ENGINE, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = monotonic() + 60
    while monotonic() < deadline and child.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") > rows:
            break
        sleep(0.002)
    os.kill(child.pid, how)
    out, err = child.communicate(timeout=30)
    assert out == "", "it had finished before it was ended"
    return err


def kept_rows(journal: Path) -> list[dict[str, Any]]:
    """The rows of whole lines."""
    data = journal.read_bytes()
    whole = data[: data.rfind(b"\n") + 1].splitlines()[1:]
    return [row for line in whole for row in json.loads(line.partition(b" ")[2])["rows"]]


def finished(capsys: pytest.CaptureFixture[str], command: list[str], report: Path) -> dict[str, Any]:
    capsys.readouterr()
    code = run([*command, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    document: dict[str, Any] = json.loads(report.read_text())
    assert json.loads(out)["report"] == str(report)
    return document


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("torn", [True, False])
def test_a_killed_run_resumes_with_its_rows(capsys, command: list[str], tmp_path: Path, torn: bool):
    report = tmp_path / "out" / "r.json"
    journal = tmp_path / "out" / "r.json.partial.jsonl"
    command = [*command, "--report", str(report)]
    killed(command, journal, 4)
    if torn:
        journal.write_bytes(journal.read_bytes()[:-9])
    kept = kept_rows(journal)
    document = finished(capsys, command, report)
    assert not journal.exists()
    assert document["configuration"]["resumed"] == len(kept) >= 3
    by_run = {(arm["name"], row["prompt_id"]): row for arm in document["arms"] for row in arm["samples"]}
    assert [by_run[tuple(each)] for each in document["order"]][: len(kept)] == kept
    assert len(document["order"]) == 3 * PROMPTS
    document["claims"] = []  # a random model finds nothing; the rest is judged
    assert judge(json.dumps(document).encode()).violations == ()


@pytest.mark.slow
def test_another_run_does_not_resume_it(capsys, command: list[str], tmp_path: Path):
    report = tmp_path / "r.json"
    journal = tmp_path / "r.json.partial.jsonl"
    command = [*command, "--report", str(report)]
    killed(command, journal, 2)
    assert run([*command, "--max-tokens", "20"]) == 2
    assert "max_tokens was 24, is 20" in capsys.readouterr().err
    assert journal.exists()
    document = finished(capsys, [*command, "--max-tokens", "20", "--no-resume"], report)
    assert document["configuration"]["resumed"] == 0
    assert not journal.exists()


@pytest.mark.exhaustive
def test_an_interrupt_says_where_the_rows_are(capsys, command: list[str], tmp_path: Path, state: Path):
    journal = tmp_path / "mine.jsonl"
    command = [*command, "--journal", str(journal)]
    err = killed(command, journal, 2, signal.SIGINT)
    assert f"finished rows are kept in {journal}; the same command goes on from there" in err
    code = run([*command, "--json"])
    line = json.loads(capsys.readouterr().out)
    assert code == 0
    assert json.loads(Path(line["report"]).read_text())["configuration"]["resumed"] >= 2


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("rows", [3, 0])
def test_rows_without_a_report_are_in_the_state_folder(
    capsys, command: list[str], state: Path, monkeypatch: pytest.MonkeyPatch, rows: int
):
    runs: list[bool] = []

    def stopped(*arguments: Any, **more: Any) -> Any:
        if len(runs) == rows:
            raise KeyboardInterrupt
        runs.append(True)
        return run_arm(*arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr("engine.evaluation.measure.run_arm", stopped)
        assert run(command) == 130
    assert len(list((state / "journals").iterdir())) == (1 if rows else 0)
    capsys.readouterr()
    assert run([*command, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(Path(json.loads(out)["report"]).read_text())["configuration"]["resumed"] == rows
    said = f"resumed: {rows} of {3 * PROMPTS} rows were measured before\n"
    assert err.count("resumed") == err.count(said) == (1 if rows else 0)
    assert not list((state / "journals").iterdir())


NAMES = {
    "journal and report": (["--journal", "own.json", "--report", "./own.json"], "--report own.json"),
    "journal and prompts": (["--journal", "own.jsonl"], "--prompts own.jsonl"),
    "report and prompts": (["--report", "link.jsonl"], "--prompts own.jsonl"),
    "default journal and prompts": (["--report", "own", "--prompts", "own.partial.jsonl"], "--prompts own.p"),
}


@pytest.mark.parametrize("name", NAMES)
def test_journal_report_and_prompts_are_never_one_file(
    capsys, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for file in ("own.json", "own.jsonl", "own.partial.jsonl"):
        write(tmp_path / file, needle_row())
    (tmp_path / "link.jsonl").hardlink_to(tmp_path / "own.jsonl")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    arguments, message = NAMES[name]
    assert run(["eval", "recall", "--prompts", "own.jsonl", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "are one file; give them two" in err
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_file_that_is_no_journal_stays(capsys, command: list[str], tmp_path: Path):
    notes = tmp_path / "notes.txt"
    notes.write_text("remember the milk")
    for more in ([], ["--no-resume"]):
        assert run([*command, "--journal", str(notes), *more]) == 2
        assert f"the file {notes} is no journal" in capsys.readouterr().err
    assert notes.read_text() == "remember the milk"
