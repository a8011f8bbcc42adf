"""One job runs closed, is seen while it runs, and ends in a verdict whatever it does."""

import json
import os
import threading

import pytest

from bridge.bus.claims import read_status
from bridge.bus.git import Git
from bridge.protocol import refs
from bridge.protocol.result import Phase, Reason
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
def test_a_job_that_ends_badly_is_published_with_its_log(
    bench: Bench, preset: str, status: str, reason: str
) -> None:
    asked = bench.ask(preset)
    bench.serve_once()
    assert bench.verdict(asked.nonce) == (status, reason)
    assert bench.log(asked.nonce)


def test_the_job_sees_no_environment_home_or_key_of_the_runner(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_secret_of_the_runner_is_cut_from_the_log(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "correct horse battery")
    asked = bench.ask("leak", params={"word": "correct horse battery"})
    bench.serve_once()
    assert bench.log(asked.nonce) == "the token is [redacted:MY_SECRET_TOKEN]\n"


@pytest.mark.slow
def test_the_shorter_of_the_time_limits_holds(bench: Bench) -> None:
    asked = bench.ask("sleep", timeout_s=1)
    bench.serve_once()
    assert bench.verdict(asked.nonce) == ("failed", "timeout")


@pytest.mark.slow
def test_progress_and_log_lines_are_seen_while_the_job_runs(bench: Bench) -> None:
    stop = threading.Event()
    runner = bench.runner()
    thread = threading.Thread(target=runner.serve, kwargs={"stop": stop}, daemon=True)
    asked = bench.ask("sleep")
    thread.start()
    git, local = Git(bench.house.remote), refs.claim_ref(asked.nonce)

    def progressing() -> bool:
        commit = git.refs(local).get(local)
        status = read_status(git, commit) if commit else None
        return status is not None and status.phase is Phase.RUNNING and status.progress is not None

    wait_for(progressing, what="a heartbeat with progress")
    status = read_status(git, git.refs(local)[local])
    assert status is not None
    assert status.progress is not None
    assert (status.progress.done, status.progress.total) == (1, 4)
    assert status.progress.step == "sleeping soundly"
    stop.set()
    runner.abort()
    thread.join(30)
    assert bench.verdict(asked.nonce) == ("cancelled", "shutdown")


def test_a_failure_of_our_own_becomes_a_result_with_the_traceback_in_the_log_only(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr("bridge.runner.prepare.Preparation.argv", broken)
    asked = bench.ask()
    bench.serve_once()
    answer = bench.answer(asked.nonce)
    assert answer.result.verdict.reason is Reason.RUNNER_ERROR
    assert "ZeroDivisionError" not in answer.result.verdict.message
    assert b"ZeroDivisionError: a bug of ours" in answer.files["log.txt"]
