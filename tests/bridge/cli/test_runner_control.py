"""`kakeya_mac runner status`, `drain` and `stop`: a runner of this machine, from another terminal."""

from __future__ import annotations

import os
import sys

import psutil
import pytest

from bridge.runner import control
from tests.fixtures.repo import RepoFixture, wait_for
from tests.fixtures.runner import RunnerFixture


@pytest.mark.slow
def test_a_runner_drains_takes_requests_again_and_is_stopped(repo: RepoFixture):
    runner = RunnerFixture(repo)
    runner.install({"wait": "import time; time.sleep(4)"})
    assert repo.kakeya("runner", "status").code == 1
    assert repo.kakeya("runner", "drain").code == 6

    def row() -> dict:
        return (repo.kakeya("runner", "status", "--json").json["runners"] or [{}])[0]

    with repo.runner("--idle", "0.1") as process:
        wait_for(lambda: row().get("serving"), 20, "a runner that serves")
        assert (row()["pid"], row()["state"], row()["service"]) == (process.pid, "idle", None)
        first = runner.ask("wait")
        wait_for(lambda: row()["job"], 20, "the job")
        assert (row()["job"]["handle"], row()["state"]) == (first.nonce, "busy")

        drained = repo.kakeya("runner", "drain", "--json")
        assert (drained.code, drained.json["draining"]) == (0, True)
        second = runner.ask("wait")
        ask = ("run", "--preset", "wait", "--require-runner", "--json")
        wait_for(lambda: "draining" in repo.kakeya("runners").out, 20, "the registration")
        refused = repo.kakeya(*ask)
        assert refused.code == 9
        assert f"testmac: {control.DRAINS}" in refused.json["message"]
        wait_for(lambda: row()["job"] is None, 20, "the end of the job")
        assert runner.verdict(first.nonce) == ("passed", "ok")
        assert "draining: it takes nothing new" in repo.kakeya("runner", "status").out
        assert runner.tip(second.result_ref) == runner.tip(f"refs/mac-bridge/inbox/{second.nonce}")

        assert repo.kakeya("runner", "drain", "--off").code == 0
        wait_for(
            lambda: runner.left(second.nonce) and _answered(runner, second.nonce), 20, "the second result"
        )
        stopped = repo.kakeya("runner", "stop", "--json")
        assert (stopped.code, stopped.json["serving"]) == (0, False)
        assert process.wait(10) == 0
    assert repo.kakeya("runner", "status").code == 1
    assert repo.kakeya("runner", "stop").code == 6


def _answered(runner: RunnerFixture, nonce: str) -> bool:
    return not any("inbox" in ref for ref in runner.left(nonce))


def test_a_status_of_a_process_that_is_gone_is_of_no_runner() -> None:
    own = control.own_status("mac", "/bus", "2026-03-01T12:00:00Z")
    assert (own.pid, own.is_serving) == (os.getpid(), True)
    # The number was given to another process.
    assert not own.model_copy(update={"began": own.began - 60}).is_serving
    assert not own.model_copy(update={"pid": max(psutil.pids()) + 1}).is_serving


@pytest.mark.skipif(sys.platform == "darwin", reason="there launchd is told by the parent process")
def test_a_process_that_systemd_started_is_a_service() -> None:
    assert control.service_of({}) is None
    assert control.service_of({"SYSTEMD_EXEC_PID": "1"}) is None  # of the shell that started it
    assert (control.service_of({"SYSTEMD_EXEC_PID": str(os.getpid())}) or "").startswith("systemd")


@pytest.mark.parametrize(
    ("service", "command"),
    [
        ("launchd org.kakeya-mac.serve", "sudo launchctl bootout system/org.kakeya-mac.serve"),
        ("systemd mac.service", "sudo systemctl stop mac.service"),
    ],
)
def test_how_a_service_is_ended_is_said(service: str, command: str) -> None:
    assert control.ending_command(service) == command
