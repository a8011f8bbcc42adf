"""Who takes a request is read from the remote, the workload and the API, and said with its reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bridge.bus.requests import WORKFLOW_PATH
from bridge.client.remotes import Remote
from bridge.client.submit import Route, choose_route
from bridge.errors import RevisionError
from tests.servers.github import GitHubServer, github_server
from tests.worlds import World

FILE = {WORKFLOW_PATH: b"name: mac-bridge\n"}
OTHER = {WORKFLOW_PATH: b"name: another\n"}


@pytest.fixture
def server() -> Iterator[GitHubServer]:
    with github_server() as started:
        yield started


def route(world: World, workload: str, environ: dict[str, str], asked: str = "auto") -> Route:
    world.house.git("fetch", "--quiet", str(world.house.remote), workload)
    return choose_route(asked, world.git, remote(world.remote), workload, environ=environ)


def remote(address: str) -> Remote:
    return Remote(address, address, "hello")


def tokenless(server: GitHubServer) -> dict[str, str]:
    return {name: value for name, value in server.environ.items() if not name.endswith("TOKEN")}


def on_main(world: World, files: dict[str, bytes]) -> str:
    commit = world.commit("main", files)
    world.point("refs/heads/main", commit)
    return commit


def open_branches(world: World) -> None:
    world.house.git("config", "uploadpack.allowAnySHA1InWant", "true", cwd=world.house.remote)


def test_a_remote_of_no_github_server_is_a_daemons(world: World) -> None:
    chosen = route(world, on_main(world, FILE), {})
    assert (chosen.transport, chosen.start) == ("embedded", "daemon")
    assert "no GitHub server" in chosen.why


def test_asked_for_it_is_a_workflows_wherever_the_remote_is(world: World) -> None:
    chosen = route(world, on_main(world, FILE), {}, "actions")
    assert (chosen.transport, chosen.start, chosen.options.workflow) == ("actions", "push", None)
    assert route(world, on_main(world, FILE), {}, "embedded").transport == "embedded"


def test_a_repository_without_the_workflow_is_a_daemons(world: World, server: GitHubServer) -> None:
    head = world.house.head()
    assert route(world, head, tokenless(server)).transport == "embedded"
    with pytest.raises(RevisionError, match="neither the workload") as error:
        route(world, head, tokenless(server), "actions")
    assert "docs/actions.md" in (error.value.remedy or "")


def test_a_workload_without_the_file_brings_the_default_branchs(world: World, server: GitHubServer) -> None:
    old = world.house.head()
    on_main(world, FILE)
    chosen = route(world, old, tokenless(server))
    assert (chosen.transport, chosen.start) == ("actions", "push")
    assert chosen.options.workflow == FILE[WORKFLOW_PATH]
    assert server.calls == [], "without a token nobody is asked"


def test_another_file_than_the_default_branchs_is_refused_or_dispatched(
    world: World, server: GitHubServer
) -> None:
    open_branches(world)
    on_main(world, FILE)
    other = world.commit("main", OTHER)
    world.point("refs/heads/feature", other)
    with pytest.raises(RevisionError, match="another") as error:
        route(world, other, tokenless(server))
    assert "KAKEYA_GITHUB_TOKEN" in (error.value.remedy or "")
    chosen = route(world, other, server.environ)
    assert (chosen.transport, chosen.start, chosen.options.starts_run) == ("actions", "dispatch", False)


def test_a_file_only_in_the_workload_is_a_warning(world: World, server: GitHubServer) -> None:
    open_branches(world)
    own = world.commit("main", FILE)
    world.point("refs/heads/feature", own)
    chosen = route(world, own, tokenless(server))
    assert chosen.transport == "actions"
    assert "its runs are unreviewed" in chosen.warnings[0]


def test_a_remote_without_branches_has_no_workflow(world: World, server: GitHubServer) -> None:
    head = world.house.head()
    empty = world.root / "empty.git"
    world.house.git("init", "--quiet", "--bare", str(empty))
    chosen = choose_route("auto", world.git, remote(str(empty)), head, environ=tokenless(server))
    assert chosen.transport == "embedded"
