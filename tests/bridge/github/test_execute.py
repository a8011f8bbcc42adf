"""The Mac's job: what may run runs closed, the rest is refused, and every way out is a signed result."""

from __future__ import annotations

import signal
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bridge.bus.cancels import CancelOutcome, request_cancel
from bridge.bus.requests import RefValue
from bridge.errors import BusError, MachineError
from bridge.git.cache import GitCache
from bridge.github.dispatch import RequestRef
from bridge.github.workflow import Artifact, digest_of, read_artifact
from bridge.protocol import refs
from bridge.protocol.manifest import new_cancel
from bridge.protocol.result import parse_result
from bridge.runner.child import Supervisor
from bridge.runner.daemon import hold_name
from tests.bridge.github.jobs import WorkflowJobs
from tests.bridge.github.runs import ask
from tests.fixtures.repo import BIN, wait_for
from tests.fixtures.runner import RunnerFixture


def test_execute_writes_a_signed_result_into_its_folder(jobs: WorkflowJobs) -> None:
    manifest = jobs.request()
    done = jobs.execute(manifest, attempt=3)
    assert done is not None
    found = read_artifact(jobs.runner.repo.root / "out-1", manifest.nonce, done.digest)
    assert found is not None
    assert found.digest == done.digest
    result = parse_result(found.files["result.json"])
    assert result.attempt == 3
    assert result.workload_sha == manifest.workload_sha
    assert {file.path for file in result.files} == {"log.txt"}
    assert found.files == done.files
    assert "result.json.sig" in done.files
    root = f".mac-bridge/results/{manifest.nonce}/"
    assert digest_of({root + path: data for path, data in found.files.items()}) == found.digest


def test_phases_and_output_are_lines_of_the_log(jobs: WorkflowJobs) -> None:
    jobs.execute(jobs.request(params={"word": "::error::x"}))
    assert "| hello from ::error::x" in jobs.lines
    assert any(line.startswith("passed/ok") for line in jobs.lines)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"preset": "no-such"}, "unknown_preset"),
        ({"params": {"word": "-x"}}, "bad_parameter"),
        ({"preset": "tests"}, "policy"),
        ({"audience": "github.com/another/project"}, "wrong_audience"),
        (
            {
                "created_at": datetime.now(UTC).replace(microsecond=0) - timedelta(hours=3),
                "expires_at": datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1),
            },
            "expired",
        ),
    ],
)
@pytest.mark.sampled(5, 1)
def test_the_machines_own_policy_decides(jobs: WorkflowJobs, changes: dict[str, Any], reason: str) -> None:
    assert jobs.verdict(jobs.request(**changes)) == ("refused", reason)
    assert not any("hello" in line for line in jobs.lines)


def test_pushed_commit_counts_even_if_its_branch_moved(jobs: WorkflowJobs) -> None:
    repo, manifest = jobs.runner.repo, jobs.request()
    asked = jobs.ref(manifest)
    named = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    commit = ("commit-tree", f"{asked.commit}^{{tree}}", "-p", asked.commit, "-m", "mine")
    other = repo.git(*named, *commit, cwd=repo.remote)
    repo.git("update-ref", manifest.result_ref, other, cwd=repo.remote)
    assert jobs.result(asked).request_commit == asked.commit


def test_a_deleted_branch_cancels_the_request_before_it_starts(jobs: WorkflowJobs) -> None:
    request = jobs.ref(jobs.request())
    jobs.runner.repo.git("update-ref", "-d", request.branch, cwd=jobs.runner.repo.remote)
    assert jobs.verdict(request) == ("cancelled", "requested")
    assert not any("hello" in line for line in jobs.lines)


def test_a_cancel_request_ends_a_request_before_it_starts(jobs: WorkflowJobs) -> None:
    manifest = jobs.request()
    asked = jobs.ref(manifest)
    cache = GitCache(jobs.runner.repo.root / "cache.git", str(jobs.runner.repo.remote))
    cache.prepare()
    cancel = new_cancel(asked.nonce, asked.commit, requested_by="me")
    outcome = request_cancel(cache, cancel, RefValue(asked.branch, asked.commit))
    assert outcome is CancelOutcome.ASKED
    assert jobs.verdict(asked) == ("cancelled", "requested")


@pytest.mark.slow
def test_a_commit_that_is_nowhere_is_an_error_and_no_result(jobs: WorkflowJobs) -> None:
    manifest = jobs.request()
    with pytest.raises(BusError, match="does not have the request commit"):
        jobs.execute(RequestRef(manifest.nonce, manifest.result_ref, "1" * 40))


def test_both_jobs_leave_an_embedded_request_alone(jobs: WorkflowJobs) -> None:
    asked = jobs.ref(jobs.request(transport="embedded"))
    assert jobs.execute(asked) is None
    folder = jobs.runner.repo.root / "out-1"
    assert not list(folder.iterdir())
    outcome = jobs.publish(asked, folder, "", run_result="success")
    assert (outcome.exit_code, outcome.judged) == (0, None)
    assert refs.INBOX + asked.nonce in jobs.runner.repo.remote_refs()


def test_another_commit_under_an_answered_name_is_a_replay(jobs: WorkflowJobs) -> None:
    manifest = jobs.request()
    jobs.execute(manifest)
    jobs.runner.repo.git("update-ref", "-d", manifest.result_ref, cwd=jobs.runner.repo.remote)
    jobs.runner.repo.git("update-ref", "-d", refs.INBOX + manifest.nonce, cwd=jobs.runner.repo.remote)
    other = jobs.runner.ask(**{**manifest.model_dump(), "requested_by": "another user"})
    assert jobs.verdict(other) == ("refused", "replayed")


@pytest.mark.slow
def test_request_with_a_result_on_its_branch_is_not_run(jobs: WorkflowJobs) -> None:
    manifest, run = ask(jobs.runner)
    assert run.publish("--run-result", "failure").code == 5
    assert jobs.verdict(RequestRef(manifest.nonce, run.branch, run.commit)) == ("refused", "replayed")


@pytest.mark.slow
def test_it_waits_for_the_machine_and_says_so(jobs: WorkflowJobs) -> None:
    config = jobs.runner.config_of()
    asked = jobs.ref(jobs.request())
    done: list[Artifact | None] = []
    config.jobs.mkdir(exist_ok=True)
    with Supervisor(config.lock):
        thread = threading.Thread(target=lambda: done.append(jobs.execute(asked)))
        thread.start()
        wait_for(lambda: any("waiting: another job" in line for line in jobs.lines))
    thread.join(30)
    assert done[0] is not None
    assert done[0].verdict.status == "passed"
    assert sum("waiting" in line for line in jobs.lines) == 1


@pytest.mark.slow
def test_a_request_that_expires_while_it_waits_is_refused(jobs: WorkflowJobs) -> None:
    config = jobs.runner.config_of()
    soon = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=5)
    asked = jobs.ref(jobs.request(expires_at=soon))
    with Supervisor(config.lock):
        assert jobs.verdict(asked) == ("refused", "expired")
    assert any("waiting: another job" in line for line in jobs.lines)


@pytest.mark.slow
def test_a_request_for_other_machines_is_refused(jobs: WorkflowJobs) -> None:
    assert jobs.verdict(jobs.request(on="chip=no-such-chip")) == ("refused", "machine_unfit")


@pytest.mark.slow
def test_it_waits_for_another_run_of_its_name(jobs: WorkflowJobs) -> None:
    asked = jobs.ref(jobs.request())
    done: list[Artifact | None] = []
    with hold_name(jobs.runner.config_of()):
        thread = threading.Thread(target=lambda: done.append(jobs.execute(asked)))
        thread.start()
        wait_for(lambda: any("already runs on this machine" in line for line in jobs.lines))
    thread.join(30)
    assert done[0] is not None


@pytest.mark.slow
def test_a_run_that_is_cancelled_while_it_waits_seals_that(jobs: WorkflowJobs) -> None:
    config = jobs.runner.config_of()
    asked = jobs.ref(jobs.request())
    done: list[Artifact | None] = []
    config.jobs.mkdir(exist_ok=True)
    with Supervisor(config.lock):
        thread = threading.Thread(target=lambda: done.append(jobs.execute(asked)))
        thread.start()
        wait_for(lambda: any("waiting" in line for line in jobs.lines))
        jobs.stop.set()
        thread.join(30)
    assert done[0] is not None
    verdict = done[0].verdict
    assert (verdict.status, verdict.reason) == ("cancelled", "requested")
    assert "had not been started" in verdict.message


@pytest.mark.slow
def test_outside_the_owners_hours_a_request_waits(jobs: WorkflowJobs) -> None:
    now = datetime.now().astimezone()
    begin, end = now + timedelta(hours=2), now + timedelta(hours=3)
    jobs.runner.policy(f'hours = ["{begin:%H:%M}-{end:%H:%M}"]\n')
    asked = jobs.ref(jobs.request())
    done: list[Artifact | None] = []
    thread = threading.Thread(target=lambda: done.append(jobs.execute(asked)))
    thread.start()
    wait_for(lambda: any("not now: waits for the hours" in line for line in jobs.lines))
    jobs.stop.set()
    thread.join(30)
    assert done[0] is not None
    assert done[0].verdict.status == "cancelled"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.sampled(0, 1)
def test_a_cancelled_run_ends_its_job_and_seals_that(runner: RunnerFixture, number: int) -> None:
    _, run = ask(runner, "sleep")
    argv = [str(BIN / "kakeya_mac"), "runner", "execute", "--out", str(run.out), "--name", "mac"]
    process = subprocess.Popen(
        argv,
        env={**runner.repo.env, **run.environment("run")},
        cwd=runner.repo.root,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    assert any("sleeping soundly" in line for line in lines)
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 0
    outputs = run.outputs("run")
    assert (outputs["status"], outputs["reason"]) == ("cancelled", "requested")
    assert not runner.running("sleep.py")
    assert run.publish("--run-result", "cancelled").code == 5


def test_secret_of_the_run_is_redacted_in_the_log(
    jobs: WorkflowJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAKEYA_GITHUB_TOKEN", "ghs_secret_of_the_run")
    jobs.runner.install({"leak": "print('the token is', arg)"})
    done = jobs.execute(jobs.request("leak", params={"word": "ghs_secret_of_the_run"}))
    assert "| the token is [redacted:KAKEYA_GITHUB_TOKEN]" in jobs.lines
    assert done is not None
    assert b"ghs_secret" not in done.files["log.txt"]


@pytest.mark.slow
def test_a_folder_that_holds_something_stops_it_before_the_job(jobs: WorkflowJobs) -> None:
    manifest = jobs.request()
    (jobs.runner.repo.root / "out-1").mkdir()
    (jobs.runner.repo.root / "out-1" / "old").touch()
    with pytest.raises(MachineError, match="is not empty"):
        jobs.execute(manifest)
    assert not any("hello" in line for line in jobs.lines)


@pytest.mark.slow
def test_a_policy_that_is_wrong_runs_nothing(runner: RunnerFixture) -> None:
    runner.policy("allow_everything = true\n")
    _, run = ask(runner)
    done = run.execute()
    assert done.code == 2
    assert "allow_everything" in done.err
    assert not run.out.exists()
