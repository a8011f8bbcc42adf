"""Runs are found by their request; a client that waits hears of them; API failures are reported once."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from bridge.github.api import GitHub
from bridge.github.dispatch import (
    INTERVAL_S,
    LATE_S,
    RequestRef,
    RunWatcher,
    find_run,
    runs_by_nonce,
)
from tests.bridge.github.apis import api
from tests.servers.github import TOKEN, Fault, GitHubServer

NONCE = "20260301t120000z0123456789ab"
BRANCH = f"refs/heads/mac-bridge/probe-{NONCE}"
COMMIT = "a" * 40
REQUEST = RequestRef(NONCE, BRANCH, COMMIT)


class Watch:
    """A watcher with a clock that tests move."""

    def __init__(self, server: GitHubServer, **options: float) -> None:
        self.now = 0.0
        github = api(server, **{"retries": 0, **options})
        self.watcher = RunWatcher(github, REQUEST, clock=lambda: self.now)

    def later(self, seconds: float = INTERVAL_S) -> str:
        self.now += seconds
        return "\n".join(self.watcher.poll())


@pytest.fixture
def watch(server: GitHubServer) -> Watch:
    return Watch(server)


def test_a_run_is_found_by_commit_title_or_id(server: GitHubServer, github: GitHub) -> None:
    assert find_run(github, REQUEST).run is None
    server.add_run(head_sha="b" * 40)
    other = server.add_run(event="workflow_dispatch", display_title="mac-bridge/other")
    dispatched = server.add_run(event="workflow_dispatch", display_title=BRANCH.removeprefix("refs/heads/"))
    found = find_run(github, REQUEST).run
    assert found is not None
    assert found.id == dispatched
    pushed = server.add_run(head_sha=COMMIT)
    for request, run in ((REQUEST, pushed), (RequestRef(NONCE, BRANCH, COMMIT, other), other)):
        found = find_run(github, request).run
        assert found is not None
        assert found.id == run


def test_runs_of_many_requests_come_from_one_list(server: GitHubServer, github: GitHub) -> None:
    number = server.add_run(head_branch=BRANCH.removeprefix("refs/heads/"), status="in_progress")
    server.add_job(number, "run", ("Execute the request", "in_progress"))
    server.add_run(head_branch="main")
    found = runs_by_nonce(github, [NONCE, "20260301t120000zba9876543210"])
    run = found[NONCE].run
    assert run is not None
    assert (run.id, run.machine) == (number, "studio")
    assert len(server.calls) == 2
    assert runs_by_nonce(github, []) == {}


def test_a_waiting_client_hears_of_machine_and_step(server: GitHubServer, watch: Watch) -> None:
    run = server.add_run(head_sha=COMMIT)
    first = watch.later(0)
    assert f"/actions/runs/{run}" in first
    assert "run queued" in first
    assert watch.later(1) == "", "the API is asked once an interval"
    server.runs[run]["status"] = "in_progress"
    server.add_job(run, "run", ("Check out", "completed"), ("Run the request", "in_progress"))
    assert watch.later().startswith("run in progress, on studio, run, Run the request: https://")
    assert watch.later() == "", "nothing new"
    server.runs[run].update(status="completed", conclusion="success")
    assert watch.later().startswith("run ended: success: ")
    assert watch.watcher.run is not None
    assert watch.watcher.run.as_json()["machine"] == "studio"


def test_a_missing_run_and_a_missing_machine_are_reported(server: GitHubServer, watch: Watch) -> None:
    assert watch.later(0) == ""
    assert "no workflow run was found" in watch.later(LATE_S)
    run = server.add_run(head_sha=COMMIT)
    server.add_job(run, "run")
    assert "labels: self-hosted, macOS" in watch.later()


def test_a_run_without_a_result_is_reported_once(server: GitHubServer, watch: Watch) -> None:
    run = server.add_run(head_sha=COMMIT, status="completed", conclusion="cancelled")
    assert watch.later(0).startswith("run ended: cancelled: ")
    assert watch.watcher.problem is None, "its result may have come after the last look"
    said = watch.later()
    assert "its run ended (cancelled) without a result" in said
    assert f"kakeya_mac cancel {NONCE}" in said
    assert f"kakeya_mac again {NONCE}" in said
    assert watch.later() == ""
    assert watch.watcher.problem == said
    server.runs[run].update(status="queued", conclusion=None, run_attempt=2)
    assert "run queued, attempt 2" in watch.later()
    assert watch.watcher.problem is None
    assert {call.method for call in server.calls} == {"GET"}


def test_a_run_that_was_deleted_is_missing(server: GitHubServer, github: GitHub) -> None:
    found = find_run(github, RequestRef(NONCE, BRANCH, COMMIT, 4711))
    assert found.run is None
    assert "no workflow run of it exists" in (found.problem(NONCE) or "")
    assert runs_by_nonce(github, [NONCE])[NONCE].is_missing


def test_a_young_request_may_have_no_run_yet(server: GitHubServer, github: GitHub) -> None:
    young = datetime.now(UTC).strftime("%Y%m%dt%H%M%Sz0123456789ab")
    assert find_run(github, RequestRef(young, BRANCH, COMMIT)).problem(young) is None


def test_a_run_beyond_the_list_is_not_called_missing(server: GitHubServer, github: GitHub) -> None:
    for _ in range(101):
        server.add_run(created_at="2026-04-01T12:00:00Z")
    assert not find_run(github, REQUEST).is_missing
    assert NONCE not in runs_by_nonce(github, [NONCE])


FAILURES = {
    "401": (Fault("/actions", 401, message="Bad credentials"), "token", False),
    "403": (Fault("/actions", 403, message="Resource not accessible"), "not accessible", False),
    "404": (Fault("/actions", 404, message="Not Found"), "404", False),
    "rate limit": (Fault("/actions", 429, {"retry-after": "40"}), "rate limited", True),
    "500": (Fault("/actions", 500, message="oops"), "500", True),
    "truncated": (Fault("/actions", cut=20), "did not answer", True),
}


@pytest.mark.parametrize("name", FAILURES)
def test_an_api_failure_is_reported_once_and_waiting_goes_on(
    server: GitHubServer, watch: Watch, name: str
) -> None:
    fault, said, recovers = FAILURES[name]
    server.faults = [Fault(**{**vars(fault), "times": 2})]
    server.add_run(head_sha=COMMIT)
    first = watch.later(0)
    assert said in first
    assert "waiting goes on over git" in first
    assert TOKEN not in first
    later = [watch.later(600) for _ in range(4)]
    assert not any("goes on over git" in line for line in later), later
    assert any("run queued" in line for line in later) is recovers


def test_a_rate_limit_is_waited_out_before_the_next_call(server: GitHubServer, watch: Watch) -> None:
    server.faults = [Fault("/actions", 429, {"retry-after": "40"})]
    watch.later(0)
    calls = len(server.calls)
    watch.later(39)
    assert len(server.calls) == calls
    watch.later(2)
    assert len(server.calls) > calls


def test_without_an_api_nothing_is_reported() -> None:
    assert RunWatcher(None, REQUEST).poll() == []
