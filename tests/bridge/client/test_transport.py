"""Who takes a request is read from the remote, the workload and the API, and said with its reason."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from bridge.bus.requests import WORKFLOW_PATH
from bridge.client.remotes import Remote
from bridge.client.submit import Route, choose_route
from bridge.errors import RevisionError
from tests.fixtures.bus import BusFixture
from tests.servers.github import TOKEN, GitHubServer, github_server

FILE = {WORKFLOW_PATH: b"name: mac-bridge\n"}
OTHER = {WORKFLOW_PATH: b"name: another\n"}


@pytest.fixture
def server(bus: BusFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[GitHubServer]:
    bus.put_on_github(monkeypatch)
    with github_server() as started:
        yield started


def route(bus: BusFixture, workload: str, environ: dict[str, str], asked: str = "auto") -> Route:
    bus.repo.git("fetch", "--quiet", str(bus.repo.remote), workload)
    address = os.environ.get("KAKEYA_REMOTE", bus.remote)
    return choose_route(asked, bus.git, remote(address), workload, environ=environ)


def remote(address: str) -> Remote:
    return Remote(address, address, "hello")


def with_token(server: GitHubServer) -> dict[str, str]:
    """The API of github.com, which the remote is on."""
    return {name: value for name, value in server.environ.items() if name != "KAKEYA_GITHUB_REPOSITORY"}


def tokenless(server: GitHubServer) -> dict[str, str]:
    return {name: value for name, value in with_token(server).items() if not name.endswith("TOKEN")}


def on_main(bus: BusFixture, files: dict[str, bytes]) -> str:
    commit = bus.commit("main", files)
    bus.point("refs/heads/main", commit)
    return commit


def open_branches(bus: BusFixture) -> None:
    bus.repo.git("config", "uploadpack.allowAnySHA1InWant", "true", cwd=bus.repo.remote)


def test_a_folder_is_a_daemons(bus: BusFixture) -> None:
    chosen = route(bus, on_main(bus, FILE), {})
    assert (chosen.transport, chosen.start) == ("embedded", "daemon")
    assert "the remote is a folder" in chosen.why


ELSEWHERE = {
    "http": ("http://127.0.0.1:3000/team/x", "127.0.0.1:3000", {}),
    "ssh": ("ssh://git@git.example.org:2222/team/x", "git.example.org:2222", {}),
    "scp-like": ("git@git.example.org:team/x.git", "git.example.org", {}),
    "its API is named": (
        "https://git.example.org/team/x",
        "git.example.org",
        {"KAKEYA_GITHUB_API": "https://git.example.org/api/v3", "KAKEYA_GITHUB_TOKEN": TOKEN},
    ),
    "a mirror of it": (
        "/srv/x.git",
        "git.example.org",
        {"KAKEYA_GITHUB_API": "https://git.example.org/api/v1", "KAKEYA_GITHUB_REPOSITORY": "team/x"},
    ),
    "inside a workflow of it": (
        "http://gitea.lan:3000/team/x",
        "gitea.lan:3000",
        {
            "GITHUB_ACTIONS": "true",
            "GITHUB_SERVER_URL": "http://gitea.lan:3000",
            "GITHUB_API_URL": "http://gitea.lan:3000/api/v1",
        },
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_server_without_artifacts_is_a_daemons_unasked(bus: BusFixture, name: str) -> None:
    address, host, environ = ELSEWHERE[name]
    chosen = choose_route("auto", bus.git, remote(address), bus.repo.head(), environ=environ)
    assert chosen.transport == "embedded"
    assert chosen.why.endswith(f"the remote is on {host}")
    assert not chosen.warnings


def test_asked_for_elsewhere_it_is_a_workflows_with_a_warning(bus: BusFixture) -> None:
    chosen = route(bus, on_main(bus, FILE), {}, "actions")
    assert (chosen.transport, chosen.start, chosen.options.workflow) == ("actions", "push", None)
    [said] = chosen.warnings
    assert "github.com and ghe.com alone" in said
    assert route(bus, bus.repo.head(), {}, "embedded").warnings == ()


def test_a_repository_without_the_workflow_is_a_daemons(bus: BusFixture, server: GitHubServer) -> None:
    head = bus.repo.head()
    assert route(bus, head, tokenless(server)).transport == "embedded"
    with pytest.raises(RevisionError, match="neither the workload") as error:
        route(bus, head, tokenless(server), "actions")
    assert "docs/actions.md" in (error.value.remedy or "")


def test_a_workload_without_the_file_brings_the_default_branchs(
    bus: BusFixture, server: GitHubServer
) -> None:
    old = bus.repo.head()
    on_main(bus, FILE)
    chosen = route(bus, old, tokenless(server))
    assert (chosen.transport, chosen.start) == ("actions", "push")
    assert chosen.options.workflow == FILE[WORKFLOW_PATH]
    assert server.calls == [], "without a token the API is not asked"


def test_workflow_unlike_the_default_is_refused_or_dispatched(bus: BusFixture, server: GitHubServer) -> None:
    open_branches(bus)
    on_main(bus, FILE)
    other = bus.commit("main", OTHER)
    bus.point("refs/heads/feature", other)
    with pytest.raises(RevisionError, match="another") as error:
        route(bus, other, tokenless(server))
    assert "KAKEYA_GITHUB_TOKEN" in (error.value.remedy or "")
    chosen = route(bus, other, with_token(server))
    assert (chosen.transport, chosen.start, chosen.options.starts_run) == ("actions", "dispatch", False)


def test_a_file_only_in_the_workload_is_a_warning(bus: BusFixture, server: GitHubServer) -> None:
    open_branches(bus)
    own = bus.commit("main", FILE)
    bus.point("refs/heads/feature", own)
    chosen = route(bus, own, tokenless(server))
    assert chosen.transport == "actions"
    assert "its runs are unreviewed" in chosen.warnings[0]


def test_a_remote_without_branches_has_no_workflow(bus: BusFixture, server: GitHubServer) -> None:
    head = bus.repo.head()
    for ref in ("refs/heads/main", "refs/heads/feature"):
        bus.repo.git("update-ref", "-d", ref, cwd=bus.repo.remote)
    address = os.environ["KAKEYA_REMOTE"]
    chosen = choose_route("auto", bus.git, remote(address), head, environ=tokenless(server))
    assert chosen.transport == "embedded"
