"""What ``doctor`` says of GitHub's side, against a real remote and a server that speaks the API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge import settings
from bridge.bus.requests import WORKFLOW_PATH
from bridge.client.remotes import Remote
from bridge.doctor import Check, Level, examine, github
from bridge.git.repo import GitRepo
from tests.fixtures.bus import BusFixture
from tests.servers.github import TOKEN, Fault, GitHubServer, github_server

SHIPPED = Path(__file__).resolve().parents[3] / WORKFLOW_PATH


@pytest.fixture
def server(bus: BusFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[GitHubServer]:
    with github_server() as started:
        for name, value in started.environ.items():
            monkeypatch.setenv(name, value)
        yield started


def checks(bus: BusFixture, *, role: str = "client", allow_public: bool = False) -> dict[str, Check]:
    remote = Remote(bus.remote, bus.remote, "hello")
    git = GitRepo(bus.repo.clone)
    found = list(github(role, settings.load(), git, remote, allow_public=allow_public))
    assert all(check.looked_at and check.finding for check in found)
    assert all(check.fix for check in found if check.level is not Level.OK)
    assert TOKEN not in repr(found)
    return {check.name: check for check in found}


def on_main(bus: BusFixture, text: bytes) -> None:
    bus.point("refs/heads/main", bus.commit("main", {WORKFLOW_PATH: text}))


def test_all_is_well(bus: BusFixture, server: GitHubServer) -> None:
    on_main(bus, SHIPPED.read_bytes())
    found = checks(bus)
    assert {check.level for check in found.values()} == {Level.OK}, found
    assert set(found) == {"transport", "workflow", "queue", "token", "repository visibility"}
    assert found["transport"].finding.startswith("actions (its push starts a run)")


def test_a_remote_of_no_github_server_is_asked_for_nothing_more(bus: BusFixture) -> None:
    assert set(checks(bus)) == {"transport"}


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(
    ("text", "level"),
    [
        (b"on: push\nconcurrency:\n  group: a\n", Level.WARN),
        (b"on: push\nconcurrency: a\njobs:\n  x:\n    queue: max\n", Level.WARN),
        (b"on: push\nconcurrency:\n  group: a\n  # queue: max\n", Level.WARN),
        (b"on: push\nconcurrency:\n  # why\n  group: a\n  queue: max # yes\n", Level.OK),
    ],
    ids=["missing", "elsewhere", "a comment", "there"],
)
def test_a_queue_that_evicts_is_a_warning(
    bus: BusFixture, server: GitHubServer, text: bytes, level: Level
) -> None:
    on_main(bus, text)
    found = checks(bus)
    assert found["queue"].level is level
    assert found["workflow"].level is Level.OK


def test_public_repository_warns_the_client_and_refuses_the_runner(
    bus: BusFixture, server: GitHubServer
) -> None:
    server.private = False
    assert checks(bus)["repository visibility"].level is Level.WARN
    assert checks(bus, role="runner")["repository visibility"].level is Level.FAIL
    assert checks(bus, role="runner", allow_public=True)["repository visibility"].level is Level.OK


def test_without_a_token_it_says_what_cannot_be_seen(
    bus: BusFixture, server: GitHubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KAKEYA_GITHUB_TOKEN")
    found = checks(bus)["token"]
    assert (found.level, "progress cannot be seen" in found.finding) == (Level.WARN, True)


def test_a_token_that_may_only_read_is_a_warning(bus: BusFixture, server: GitHubServer) -> None:
    server.permissions = {"push": False, "pull": True}
    found = checks(bus)["token"]
    assert (found.level, "may not push" in found.finding) == (Level.WARN, True), found
    server.permissions = None  # a workflow's token: the API does not say
    assert checks(bus)["token"].level is Level.OK
    server.writes_actions = False
    found = checks(bus)["token"]
    assert (found.level, "lacks actions: write" in found.finding) == (Level.WARN, True), found
    assert server.runs == {}, "asking changes nothing"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("/actions", 401, message="Bad credentials", times=9), "token"),
        (Fault("/actions", 403, message="Resource not accessible by personal access token", times=9), "403"),
    ],
    ids=["expired", "no permission"],
)
def test_a_token_that_is_refused_is_a_failure_with_the_servers_reason(
    bus: BusFixture, server: GitHubServer, fault: Fault, said: str
) -> None:
    server.faults = [fault]
    found = checks(bus)["token"]
    assert found.level is Level.FAIL
    assert said in found.finding + found.fix


@pytest.mark.slow
def test_a_workflows_job_is_told_about_its_event_and_its_token(
    bus: BusFixture, server: GitHubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_main(bus, SHIPPED.read_bytes())

    def examined(**environ: str) -> dict[str, Check]:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return {check.name: check for check in examine("ci", settings.load(), bus.repo.clone)}

    assert examined()["event"].level is Level.WARN
    found = examined(GITHUB_ACTIONS="true", GITHUB_EVENT_NAME="pull_request")
    assert found["event"].level is Level.WARN
    assert found["token"].level is Level.OK
    assert "trusted-runners" in found["trusted runners"].fix
    assert found["push"].level is Level.OK
    assert examined(GITHUB_EVENT_NAME="pull_request_target")["event"].level is Level.FAIL
