"""Paired runs through the real commands: two commits, or two sets of parameters, by turns in one job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.repo import RepoFixture

# A job that sees the folder of the other side fails.
ALONE = """
import pathlib, time
try:
    assert len(list(pathlib.Path.cwd().parents[1].iterdir())) == 1
except PermissionError:
    pass
"""
WHO = ("-c", "user.name=t", "-c", "user.email=t@example.org")
PRESETS = {
    "bench": """
summary = "A program of the commit."
argv = ["${python}", "-I", "bench.py"]
timeout_s = 100
engine = "workload"
workspace = "full"
""",
    "pause": """
summary = "An installed program."
argv = ["${python}", "-I", "-c", "import sys, time; time.sleep(float(sys.argv[1]))", "{seconds}"]
timeout_s = 100
engine = "installed"
workspace = "none"

[params.seconds]
type = "number"
minimum = 0
maximum = 5
default = 0.05
description = "how long it takes"
""",
}


@pytest.fixture
def serving(repo: RepoFixture) -> Iterator[RepoFixture]:
    """A repository with a runner that has both presets and runs code of commits."""
    config = Path(repo.env["KAKEYA_CONFIG"])
    (config / "presets").mkdir(parents=True)
    for name, text in PRESETS.items():
        (config / "presets" / f"{name}.toml").write_text(f'name = "{name}"\n{text}')
    (config / "policy.toml").write_text("allow_repo_code = true\n")
    (config / "policy.toml").chmod(0o600)
    with repo.runner():
        yield repo


def commit(repo: RepoFixture, seconds: float) -> str:
    (repo.clone / "bench.py").write_text(f"{ALONE}time.sleep({seconds})\n")
    repo.git("add", "bench.py")
    repo.git(*WHO, "commit", "-q", "-m", f"takes {seconds} s")
    return repo.head()


@pytest.mark.parametrize(
    ("limit", "verdicts"),
    [
        # Perhaps too few blocks to tell, but then nothing else is said.
        pytest.param("12", {"slower", "inconclusive"}, id="short", marks=pytest.mark.slow),
        pytest.param("100", {"slower"}, id="whole", marks=pytest.mark.exhaustive),
    ],
)
def test_a_planted_difference_of_two_commits_is_found(
    serving: RepoFixture, tmp_path: Path, limit: str, verdicts: set[str]
):
    before, after = commit(serving, 0.1), commit(serving, 0.2)
    words = ("--preset", "bench", "--against", "HEAD~1", "--timeout", limit, "--wait", "120", "--json")
    done = serving.kakeya("run", *words)
    assert done.code == 0, done.err + serving.runner_log()
    found = done.json["paired"]
    assert found["verdict"] in verdicts, found
    assert found["metric"] == "command_s"
    assert found["verdict"] == "inconclusive" or found["interval"][0] > 1.1, found
    assert (found["workload"]["workload_sha"], found["against"]["workload_sha"]) == (after, before)
    assert "paired" in done.json["untrusted"]
    # The record says how, and what is changed in it is found by the gate.
    handle = done.json["nonce"]
    shown = serving.kakeya("result", handle, "-o", str(tmp_path / "out"))
    assert f"{found['verdict'].upper()}  against {before[:12]}" in shown.out
    record = json.loads((tmp_path / "out" / "paired.json").read_text())
    sides = [run["side"] for run in record["runs"] if not run["warm_up"]]
    assert sides == ["workload", "against", "against", "workload"] * (len(sides) // 4)
    record["summary"]["verdict"] = "faster"
    (tmp_path / "changed.json").write_text(json.dumps(record))
    gate = serving.kakeya("gate", str(tmp_path / "changed.json"))
    assert gate.code == 3
    assert "SUMMARY_MISMATCH" in gate.out


@pytest.mark.exhaustive
def test_two_sets_of_parameters_are_compared(serving: RepoFixture):
    sides = ("-p", "seconds=0.02", "--against-params", "seconds=0.12")
    done = serving.kakeya("run", "--preset", "pause", *sides, "--wait", "120", "--json")
    assert done.code == 0, done.err + serving.runner_log()
    assert done.json["paired"]["verdict"] == "faster"
    assert done.json["paired"]["against"]["params"] == {"seconds": 0.12}
    again = serving.kakeya("again", done.json["nonce"], "--dry-run")
    assert json.loads(again.out)["manifest"]["against"]["params"] == {"seconds": 0.12}


@pytest.mark.slow
def test_a_run_that_fails_ends_the_job_and_says_which_side(serving: RepoFixture):
    commit(serving, 0.0)
    (serving.clone / "bench.py").write_text("raise SystemExit(4)\n")
    serving.git(*WHO, "commit", "-qam", "fails")
    done = serving.kakeya("run", "--preset", "bench", "--against", "HEAD~1", "--wait", "60", "--json")
    assert (done.code, done.json["reason"]) == (1, "exit_code")
    assert done.json["message"].startswith(f"run 1 (workload, {serving.head()[:12]}): ")
    assert done.json["paired"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--preset", "probe", "--against", "HEAD"), "would compare nothing"),
        (("--preset", "throughput", "--against-params", "limit=8", "-p", "limit=8"), "has already"),
        (("--preset", "throughput", "--against-params", "nothing=1"), "nothing"),
        (("--preset", "tests", "--against", "no-such-branch"), "no-such-branch"),
    ],
)
def test_a_paired_run_that_compares_nothing_is_refused(repo: RepoFixture, words: tuple[str, ...], said: str):
    done = repo.kakeya("run", *words, "--dry-run")
    assert done.code == 2
    assert said in done.err
