"""``eval server``: tables, one JSON line, a report; a server that fails a check is exit 1 and no report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridge.evidence.gate import judge_file
from engine.cli import run
from engine.server import app
from tests.engine.evaluation.test_prompts import write

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KAKEYA_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def small(folders: tuple[Path, Path], tmp_path: Path) -> list[str]:
    """A small comparison of the tiny pair."""
    rows = [{"id": f"a-{i}", "prompt": f"x = {i}\n" * 3} for i in range(2)]
    own = str(write(tmp_path / "own.jsonl", *rows))
    pair = ["--model", str(folders[0]), "--drafter", str(folders[1])]
    return ["--prompts", own, "--max-tokens", "12", "--clients", "2", *pair]


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(["eval", "server", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def last_json(out: str) -> dict[str, Any]:
    return json.loads(out.strip().splitlines()[-1])


def test_checks_pass_and_the_gate_accepts_the_report(capsys, small: list[str], tmp_path: Path):
    report = tmp_path / "s.json"
    code, out, err = call(capsys, *small, "--report", str(report))
    assert code == 0, err
    assert "│ clients       │ passed │" in out
    assert "│ a       │         2 │  2 │" in out
    found = last_json(out)
    assert (found["kind"], found["report"]) == ("quality", str(report))
    assert set(found["checks"].values()) == {None}
    assert found["identical_by_set"] == {"a": [2, 2]}
    assert judge_file(report).violations == ()
    assert "progress 14/14 checking rounding and divergences" in err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_check_that_fails_is_exit_1_and_no_report(
    capsys, small: list[str], tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
):
    monkeypatch.setattr(app, "_is_among", lambda given, keys: True)
    report = tmp_path / "s.json"
    code, out, err = call(capsys, *small, "--report", str(report), *["--json"] * as_json)
    assert code == 1
    assert "kakeya_engine: 1 of 7 checks of the server failed; key: answered 200, not 401" in err
    found = last_json(out)
    assert found["report"] is None
    assert [name for name, fault in found["checks"].items() if fault] == ["key"]
    assert (len(out.splitlines()) == 1) is as_json
    assert not report.exists()
    assert not state.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--clients", "1"), "--clients must be at least 2, not 1"),
        (("--block", "none"), "--block must be auto or a number"),
        (("--model", "demo", "--id", "demo"), "--model serves a folder; leave out --registry and --id"),
        (("--drafter", "prompt-lookup"), "--drafter goes with --model"),
        (("--id", "nobody"), "there is no model 'nobody'; there are "),
        (("--kv", "sink-window:4,16"), "may not ask for the KV policy sink-window:4,16"),
        (("--id", "demo@native", "--kv", "affine8"), "name one"),
        (("--thinking", "on", "--prompts", "code", "--limit", "1"), "add --chat"),
        (("--request-nonce", "x"), "missing"),
    ],
)
def test_switches_that_make_no_sense_are_exit_2(capsys, arguments: tuple[str, ...], message: str):
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_a_model_that_is_not_here_is_exit_2(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    code, out, err = call(capsys, "--id", "mistral-7b", "--limit", "1")
    assert (code, out) == (2, "")
    assert "mistral-7b" in err


def test_help_shows_how(capsys):
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert "kakeya_engine eval server --report server.json" in out
