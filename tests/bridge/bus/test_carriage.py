"""A request may bring the workflow file where the workload has none, and nothing else beside its manifest."""

from __future__ import annotations

import pytest

from bridge.bus.carriage import WORKFLOW_PATH, Carriage
from bridge.bus.git import Git
from bridge.bus.requests import bound_manifest, read_request, submit, take_back
from bridge.errors import LeaseLost, ManifestError, RevisionError
from bridge.protocol.manifest import REQUEST_PATH
from tests.worlds import World

FILE = b"name: mac-bridge\n"


def send(world: World, transport: str = "actions", **carriage: object):
    manifest = world.manifest(transport=transport)
    return submit(world.git, world.remote, manifest, None, carriage=Carriage(**carriage))


def test_it_brings_the_file_beside_what_the_folders_hold(world: World) -> None:
    kept = {".github/workflows/ci.yaml": b"ci\n", ".github/CODEOWNERS": b"*\n"}
    world.point("refs/heads/main", world.commit("main", kept))
    world.house.git("pull", "--quiet", "origin", "main")
    submitted = send(world, workflow=FILE)
    bare = Git(world.house.remote)
    request = read_request(bare, submitted.commit)
    assert request.brings_workflow
    assert bound_manifest(request, submitted.nonce).transport == "actions"
    pair = (f"{submitted.commit}^", submitted.commit)
    changed = world.house.git("diff", "--name-only", *pair, cwd=world.house.remote)
    assert set(changed.splitlines()) == {WORKFLOW_PATH, REQUEST_PATH}
    assert bare.read_blob(submitted.commit, WORKFLOW_PATH, 1024) == FILE


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (WORKFLOW_PATH, "of its own"),
        (".github", "a folder belongs"),
        (".github/workflows", "a folder belongs"),
    ],
    ids=["a workflow file", "a file named .github", "a file named workflows"],
)
def test_what_the_workload_has_is_never_replaced(world: World, path: str, said: str) -> None:
    workload = world.commit("main", {path: b"own\n"})
    world.point("refs/heads/main", workload)
    world.house.git("fetch", "--quiet", "origin", "main")
    manifest = world.manifest(transport="actions", workload_sha=workload)
    with pytest.raises(RevisionError, match=said):
        submit(world.git, world.remote, manifest, None, carriage=Carriage(workflow=FILE))


def test_no_other_file_and_no_change_of_the_file_is_taken(world: World) -> None:
    own = world.commit("main", {WORKFLOW_PATH: b"own\n"})
    asked = {REQUEST_PATH: b"{}"}
    for commit in (
        world.commit(own, {**asked, WORKFLOW_PATH: FILE}),
        world.commit(own, {**asked, WORKFLOW_PATH: None}),
        world.commit("main", {**asked, ".github/workflows/other.yaml": FILE}),
    ):
        with pytest.raises(ManifestError, match="changes only"):
            read_request(Git(world.house.remote), commit)


def test_a_daemons_request_brings_no_workflow(world: World) -> None:
    submitted = send(world, "embedded", workflow=FILE)
    request = read_request(Git(world.house.remote), submitted.commit)
    with pytest.raises(ManifestError, match="brings no"):
        bound_manifest(request, submitted.nonce)


def test_what_a_dispatch_starts_says_that_its_push_starts_nothing(world: World) -> None:
    subject = {}
    for starts in (True, False):
        submitted = send(world, starts_run=starts)
        subject[starts] = world.house.git(
            "log", "-1", "--format=%B", submitted.commit, cwd=world.house.remote
        )
    assert "[skip ci]" in subject[False]
    assert "[skip ci]" not in subject[True]


def test_a_request_is_taken_back_only_while_nobody_touched_it(world: World) -> None:
    submitted = send(world)
    take_back(world.git, world.remote, submitted)
    assert not [ref for ref in world.house.remote_refs() if submitted.nonce in ref]
    submitted = send(world)
    world.house.git("push", "--quiet", "--force", str(world.house.remote), f"main:{submitted.ref}")
    with pytest.raises(LeaseLost):
        take_back(world.git, world.remote, submitted)
    assert submitted.ref in world.house.remote_refs()
