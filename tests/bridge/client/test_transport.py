"""Who takes a request is read from the remote, the workload and the API, and said with its reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bridge.bus.requests import WORKFLOW_PATH
from bridge.client.remotes import Remote
from bridge.client.submit import Route, choose_route
from bridge.errors import RevisionError
from tests.fixtures.bus import BusFixture
from tests.servers.github import GitHubServer, github_server

FILE = {WORKFLOW_PATH: b"name: mac-bridge\n"}
OTHER = {WORKFLOW_PATH: b"name: another\n"}


@pytest.fixture
def server() -> Iterator[GitHubServer]:
    with github_server() as started:
        yield started


def route(bus: BusFixture, workload: str, environ: dict[str, str], asked: str = "auto") -> Route:
    bus.repo.git("fetch", "--quiet", str(bus.repo.remote), workload)
    return choose_route(asked, bus.git, remote(bus.remote), workload, environ=environ)


def remote(address: str) -> Remote:
    return Remote(address, address, "hello")


def tokenless(server: GitHubServer) -> dict[str, str]:
    return {name: value for name, value in server.environ.items() if not name.endswith("TOKEN")}


def on_main(bus: BusFixture, files: dict[str, bytes]) -> str:
    commit = bus.commit("main", files)
    bus.point("refs/heads/main", commit)
    return commit


def open_branches(bus: BusFixture) -> None:
    bus.repo.git("config", "uploadpack.allowAnySHA1InWant", "true", cwd=bus.repo.remote)


def test_a_remote_of_no_github_server_is_a_daemons(bus: BusFixture) -> None:
    chosen = route(bus, on_main(bus, FILE), {})
    assert (chosen.transport, chosen.start) == ("embedded", "daemon")
    assert "no GitHub server" in chosen.why


def test_asked_for_it_is_a_workflows_wherever_the_remote_is(bus: BusFixture) -> None:
    chosen = route(bus, on_main(bus, FILE), {}, "actions")
    assert (chosen.transport, chosen.start, chosen.options.workflow) == ("actions", "push", None)
    assert route(bus, on_main(bus, FILE), {}, "embedded").transport == "embedded"


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
    chosen = route(bus, other, server.environ)
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
    empty = bus.root / "empty.git"
    bus.repo.git("init", "--quiet", "--bare", str(empty))
    chosen = choose_route("auto", bus.git, remote(str(empty)), head, environ=tokenless(server))
    assert chosen.transport == "embedded"
