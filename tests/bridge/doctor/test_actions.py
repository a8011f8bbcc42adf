"""What ``doctor`` says of GitHub's side, against a real remote and a server that speaks the API."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from bridge import settings
from bridge.bus.requests import WORKFLOW_PATH
from bridge.client.remotes import Remote
from bridge.doctor import Check, Level, examine, transports
from bridge.git.repo import GitRepo
from tests.fixtures.bus import BusFixture
from tests.servers.github import SLUG, TOKEN, Fault, GitHubServer, github_server

FILE = b"on: push\njobs: {}\n"


@pytest.fixture
def server(bus: BusFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[GitHubServer]:
    bus.put_on_github(monkeypatch)
    with github_server() as started:
        for name in ("KAKEYA_GITHUB_API", "KAKEYA_GITHUB_TOKEN"):
            monkeypatch.setenv(name, started.environ[name])
        yield started


def checks(
    bus: BusFixture,
    *,
    role: str = "client",
    allow_public: bool = False,
    has_runner: bool = False,
) -> dict[str, Check]:
    address = os.environ.get("KAKEYA_REMOTE", bus.remote)
    flags = {"has_runner": has_runner, "allow_public": allow_public}
    remote = Remote(address, address, "hello")
    found = list(transports(role, settings.load(), GitRepo(bus.repo.clone), remote, **flags))
    assert all(check.looked_at and check.finding for check in found)
    assert all(check.fix for check in found if check.level is not Level.OK)
    assert TOKEN not in repr(found)
    return {check.name: check for check in found}


def on_main(bus: BusFixture, text: bytes) -> None:
    bus.point("refs/heads/main", bus.commit("main", {WORKFLOW_PATH: text}))


def test_all_is_well(bus: BusFixture, server: GitHubServer) -> None:
    on_main(bus, FILE)
    found = checks(bus)
    assert {check.level for check in found.values()} == {Level.OK}, found
    assert set(found) == {"git server", "transport", "workflow", "token", "repository visibility"}
    assert found["git server"].finding.startswith("github.com: ")
    assert found["transport"].finding.startswith("actions (its push starts a run)")


def test_a_folder_is_asked_for_nothing_more(bus: BusFixture) -> None:
    found = checks(bus)
    assert set(found) == {"git server", "transport"}
    assert {check.level for check in found.values()} == {Level.OK}, found


ELSEWHERE = f"git@git.example.org:{SLUG}.git"
NEITHER = "git.example.org, neither github.com nor ghe.com: requests travel by a runner's daemon"


@pytest.fixture
def elsewhere(bus: BusFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[GitHubServer]:
    """The API of a server other than github.com, which the remote is on."""
    assert bus.put_on_github(monkeypatch, "git.example.org") == ELSEWHERE
    with github_server() as started:
        for name in ("KAKEYA_GITHUB_API", "KAKEYA_GITHUB_TOKEN"):
            monkeypatch.setenv(name, started.environ[name])
        on_main(bus, FILE)
        yield started


def test_another_server_is_told_by_its_address(bus: BusFixture, elsewhere: GitHubServer) -> None:
    found = checks(bus)
    assert set(found) == {"git server", "transport"}, "what needs artifacts is not looked at"
    assert {check.level for check in found.values()} == {Level.OK}, found
    assert found["git server"].finding.startswith(NEITHER)
    assert found["transport"].finding.startswith("embedded (a runner's daemon takes it)")
    assert elsewhere.calls == []


def test_githubs_runner_on_another_server_is_a_warning(
    bus: BusFixture, elsewhere: GitHubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KAKEYA_GITHUB_API")  # so the visibility cannot be asked
    found = checks(bus, role="runner", has_runner=True)
    assert set(found) == {"git server"}
    assert found["git server"].level is Level.WARN
    assert found["git server"].fix.endswith(f"--service serve --remote {ELSEWHERE}")
    assert checks(bus, role="runner")["git server"].level is Level.OK


def test_a_public_repository_on_another_server_fails_githubs_runner(
    bus: BusFixture, elsewhere: GitHubServer
) -> None:
    elsewhere.private = False
    found = checks(bus, role="runner", has_runner=True)
    assert set(found) == {"git server", "repository visibility"}
    assert found["repository visibility"].level is Level.FAIL
    assert set(checks(bus, role="runner")) == {"git server"}, "a daemon alone"


def test_actions_on_another_server_is_one_warning(
    bus: BusFixture, elsewhere: GitHubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAKEYA_TRANSPORT", "actions")
    found = checks(bus)
    assert [name for name, check in found.items() if check.level is Level.WARN] == ["transport"]
    assert "github.com and ghe.com alone" in found["transport"].finding
    assert {call.method for call in elsewhere.calls} == {"GET"}, "no write is tried"


@pytest.mark.parametrize(
    ("text", "warns"),
    [
        (b"on: push\nconcurrency:\n  group: a\n  queue: max\n", True),
        (b"on: push\njobs:\n  run:\n    concurrency: a\n", True),
        (b"on: push\n# concurrency: none\njobs: {}\n", False),
    ],
    ids=["of the file", "of a job", "a comment"],
)
def test_a_concurrency_group_that_evicts_is_a_warning(
    bus: BusFixture, server: GitHubServer, text: bytes, warns: bool
) -> None:
    on_main(bus, text)
    found = checks(bus)
    assert ("concurrency" in found) is warns
    assert not warns or "update the file" in found["concurrency"].fix
    assert found["workflow"].level is Level.OK


def test_public_repository_warns_the_client_and_refuses_the_runner(
    bus: BusFixture, server: GitHubServer
) -> None:
    server.private = False
    assert checks(bus)["repository visibility"].level is Level.WARN

    def of_a_runner(**flags: bool) -> Check:
        return checks(bus, role="runner", **flags)["repository visibility"]

    assert of_a_runner(has_runner=True).level is Level.FAIL
    assert of_a_runner(has_runner=True, allow_public=True).level is Level.OK
    assert (found := of_a_runner()).level is Level.OK
    assert found.finding.startswith("public: everybody reads"), "of a daemon alone"


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
    on_main(bus, FILE)

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
