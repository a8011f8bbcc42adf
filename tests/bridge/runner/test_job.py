"""One job runs closed, is seen while it runs, and ends in a verdict whatever it does."""

import json
import os

import pytest

from bridge.bus.claims import read_status
from bridge.git.repo import GitRepo
from bridge.protocol import refs
from bridge.protocol.result import Phase, Progress, Reason, RunStatus
from tests.bridge.runner.bench import Bench
from tests.houses import wait_for


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
    bench: Bench, preset: str, status: str, reason: str
) -> None:
    asked = bench.ask(preset)
    bench.serve_once()
    assert bench.verdict(asked.nonce) == (status, reason)
    assert bench.log(asked.nonce)


@pytest.mark.slow
def test_job_sees_no_environment_or_home_of_the_runner(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "correct horse battery")
    asked = bench.ask("environment")
    bench.serve_once()
    seen = json.loads(bench.log(asked.nonce))
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
def test_shorter_time_limit_holds(bench: Bench) -> None:
    asked = bench.ask("sleep", timeout_s=1)
    bench.serve_once()
    assert bench.verdict(asked.nonce) == ("failed", "timeout")


@pytest.mark.slow
def test_progress_is_shown_while_the_job_runs(bench: Bench) -> None:
    asked, git = bench.ask("sleep"), GitRepo(bench.house.remote)

    def status() -> RunStatus | None:
        commit = bench.tip(refs.CLAIMS + asked.nonce)
        return None if commit is None else read_status(git, commit)

    def has_progress() -> bool:
        return (seen := status()) is not None and seen.phase is Phase.RUNNING and seen.progress is not None

    with bench.serving(bench.runner(), abort=True):
        wait_for(has_progress, what="a heartbeat with progress")
        seen = status()
        assert seen is not None
        assert seen.progress == Progress(done=1, total=4, step="sleeping soundly")
    assert bench.verdict(asked.nonce) == ("cancelled", "shutdown")


def test_bug_of_the_runner_becomes_a_result(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr("bridge.runner.job.Job.argv", broken)
    asked = bench.ask()
    bench.serve_once()
    answer = bench.answer(asked.nonce)
    assert answer.result.verdict.reason is Reason.RUNNER_ERROR
    assert "ZeroDivisionError" not in answer.result.verdict.message
    assert b"ZeroDivisionError: a bug of ours" in answer.files["log.txt"]
