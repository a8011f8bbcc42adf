"""One job runs closed, is seen while it runs, and ends in a verdict whatever it does."""

import json
import os

import pytest

from bridge.bus.claims import read_status
from bridge.git.repo import GitRepo
from bridge.protocol import refs
from bridge.protocol.result import Phase, Progress, Reason, RunStatus
from tests.fixtures.repo import wait_for
from tests.fixtures.runner import RunnerFixture


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("preset", "status", "reason"),
    [
        ("fail", "failed", "exit_code"),
        ("stubborn", "failed", "timeout"),
        ("flood", "failed", "output_limit"),
    ],
)
def test_job_that_ends_badly_is_published_with_its_log(
    runner: RunnerFixture, preset: str, status: str, reason: str
) -> None:
    asked = runner.ask(preset)
    runner.serve_once()
    assert runner.verdict(asked.nonce) == (status, reason)
    assert runner.log(asked.nonce)


@pytest.mark.slow
def test_job_sees_no_environment_or_home_of_the_runner(
    runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "correct horse battery")
    asked = runner.ask("environment")
    runner.serve_once()
    seen = json.loads(runner.log(asked.nonce))
    assert "MY_SECRET_TOKEN" not in seen
    assert seen["HOME"] != os.environ.get("HOME")
    assert asked.nonce in seen["HOME"]
    assert asked.nonce in seen["TMPDIR"]
    assert set(seen) <= {
        *(
            "PATH",
            "PWD",  # bubblewrap's
            "HOME",
            "TMPDIR",
            "LANG",
            "LC_ALL",
            "PYTHONDONTWRITEBYTECODE",
            "HF_HUB_OFFLINE",
            "NO_COLOR",
        ),
        *("KAKEYA_BLAS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TZ"),
    }


@pytest.mark.slow
def test_shorter_time_limit_holds(runner: RunnerFixture) -> None:
    asked = runner.ask("sleep", timeout_s=1)
    runner.serve_once()
    assert runner.verdict(asked.nonce) == ("failed", "timeout")


@pytest.mark.slow
def test_progress_is_shown_while_the_job_runs(runner: RunnerFixture) -> None:
    asked, git = runner.ask("sleep"), GitRepo(runner.repo.remote)

    def status() -> RunStatus | None:
        commit = runner.tip(refs.CLAIMS + asked.nonce)
        return None if commit is None else read_status(git, commit)

    def has_progress() -> bool:
        return (seen := status()) is not None and seen.phase is Phase.RUNNING and seen.progress is not None

    with runner.serving(runner.daemon(), abort=True):
        wait_for(has_progress, what="a heartbeat with progress")
        seen = status()
        assert seen is not None
        assert seen.progress == Progress(done=1, total=4, step="sleeping soundly")
    assert runner.verdict(asked.nonce) == ("cancelled", "shutdown")


def test_bug_of_the_runner_becomes_a_result(runner: RunnerFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr("bridge.runner.job.Job.argv", broken)
    asked = runner.ask()
    runner.serve_once()
    answer = runner.answer(asked.nonce)
    assert answer.result.verdict.reason is Reason.RUNNER_ERROR
    assert "ZeroDivisionError" not in answer.result.verdict.message
    assert b"ZeroDivisionError: a bug of ours" in answer.files["log.txt"]
