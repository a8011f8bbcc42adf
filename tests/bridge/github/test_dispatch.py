"""Runs are found by their request; a client that waits hears of them; API failures are reported once."""

from __future__ import annotations

import pytest

from bridge.github.api import GitHub
from bridge.github.dispatch import (
    INTERVAL_S,
    LATE_S,
    MAX_RERUNS,
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
    assert find_run(github, REQUEST) is None
    server.add_run(head_sha="b" * 40)
    other = server.add_run(event="workflow_dispatch", display_title="mac-bridge/other")
    dispatched = server.add_run(event="workflow_dispatch", display_title=BRANCH.removeprefix("refs/heads/"))
    found = find_run(github, REQUEST)
    assert found is not None
    assert found.id == dispatched
    pushed = server.add_run(head_sha=COMMIT)
    for request, run in ((REQUEST, pushed), (RequestRef(NONCE, BRANCH, COMMIT, other), other)):
        found = find_run(github, request)
        assert found is not None
        assert found.id == run


def test_runs_of_many_requests_come_from_one_list(server: GitHubServer, github: GitHub) -> None:
    number = server.add_run(head_branch=BRANCH.removeprefix("refs/heads/"), status="in_progress")
    server.add_job(number, "run", ("Execute the request", "in_progress"))
    server.add_run(head_branch="main")
    found = runs_by_nonce(github, [NONCE, "20260301t120000zba9876543210"])
    assert list(found) == [NONCE]
    assert (found[NONCE].id, found[NONCE].machine) == (number, "studio")
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
    assert "no workflow run exists" in watch.later(LATE_S)
    run = server.add_run(head_sha=COMMIT)
    server.add_job(run, "run")
    assert "labels: self-hosted, macOS" in watch.later()


def test_an_evicted_run_is_rerun_up_to_the_limit(server: GitHubServer, watch: Watch) -> None:
    run = server.add_run(head_sha=COMMIT)
    for attempt in range(1, MAX_RERUNS + 1):
        server.runs[run].update(status="completed", conclusion="cancelled")
        assert f"re-run (attempt {attempt + 1})" in watch.later()
        assert server.runs[run]["run_attempt"] == attempt + 1
    server.runs[run].update(status="completed", conclusion="cancelled")
    assert "which is the limit" in watch.later()
    assert watch.later() == ""
    assert len(server.of("POST", "/rerun")) == MAX_RERUNS


def test_a_run_cancelled_on_a_machine_is_not_rerun(server: GitHubServer, watch: Watch) -> None:
    run = server.add_run(head_sha=COMMIT, status="completed", conclusion="cancelled")
    server.add_job(run, "run", ("Run the request", "completed"))
    assert "run ended: cancelled" in watch.later()
    assert server.of("POST", "/rerun") == []


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
