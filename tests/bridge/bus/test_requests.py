"""A request is one commit on the workload; every other shape is refused; nothing is left in the checkout."""

from __future__ import annotations

import pytest

from bridge.bus.requests import (
    WORKFLOW_PATH,
    SubmitOptions,
    Submitted,
    bound_manifest,
    read_request,
    submit,
    take_back,
)
from bridge.errors import LeaseLost, ManifestError, PushRejected, RevisionError
from bridge.git.repo import GitRepo
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_BYTES, REQUEST_PATH, SIGNATURE_PATH, parse
from tests.objects import FOLDER, GITLINK, LINK, PLAIN, PROGRAM, Objects
from tests.worlds import World, snapshot

FILE = b"name: mac-bridge\n"


def send(world: World, transport: str = "actions", **options: object) -> Submitted:
    manifest = world.manifest(transport=transport)
    return submit(world.git, world.remote, manifest, None, options=SubmitOptions(**options))  # type: ignore[arg-type]


def changed(world: World, commit: str) -> set[str]:
    """Paths in which a commit differs from its parent, by git itself."""
    return set(
        world.house.git("diff", "--name-only", f"{commit}^", commit, cwd=world.house.remote).splitlines()
    )


def test_request_adds_its_manifest_and_nothing_else(world: World):
    before = snapshot(world.house.clone)
    submitted = world.submit()
    request = read_request(GitRepo(world.house.remote), submitted.commit)
    assert request.parent == world.house.head()
    assert parse(request.data).nonce == submitted.nonce
    assert request.signature is None
    assert changed(world, submitted.commit) == {REQUEST_PATH}
    assert world.house.remote_refs() >= {submitted.ref, refs.INBOX + submitted.nonce}
    assert snapshot(world.house.clone) == before


def test_earlier_request_in_the_workload_is_replaced(world: World):
    old: dict[str, bytes | None] = {REQUEST_PATH: b"old", SIGNATURE_PATH: b"old", ".mac-bridge/notes": b"n"}
    world.point("refs/heads/main", world.commit("main", old))
    world.house.git("pull", "--quiet", "--ff-only")
    submitted = world.submit()
    listed = world.house.git("ls-tree", "-r", "--name-only", submitted.commit, cwd=world.house.remote)
    assert set(listed.splitlines()) == {".mac-bridge/notes", REQUEST_PATH, "README.md"}


def of_mode(world: World, submitted: Submitted, mode: str, *, parents: int = 1) -> str:
    """A request commit whose manifest has another mode, or that has more parents."""
    objects, main = Objects(world.house.remote), world.house.git("rev-parse", "main")
    readme = world.house.git("rev-parse", "main:README.md")
    sha = main if mode == GITLINK else objects.blob(b"/etc/passwd" if mode == LINK else b"{}")
    inner = objects.tree([(mode, "request.json", sha)])
    tree = objects.tree([(PLAIN, "README.md", readme), (FOLDER, ".mac-bridge", inner)])
    return objects.commit(tree, [main, submitted.commit][:parents])


def test_commits_of_another_shape_are_refused(world: World):
    submitted = world.submit()
    workload, data = submitted.commit + "^", {REQUEST_PATH: b"{}"}
    own = world.commit("main", {WORKFLOW_PATH: b"own\n"})
    for commit in (
        world.commit(workload, {**data, "README.md": b"changed"}),
        world.commit(workload, {SIGNATURE_PATH: b"x"}),
        world.commit(submitted.commit, {REQUEST_PATH: None}),
        world.commit(workload, {REQUEST_PATH: b" " * (MAX_BYTES + 1)}),
        world.commit(own, {**data, WORKFLOW_PATH: FILE}),
        world.commit(own, {**data, WORKFLOW_PATH: None}),
        world.commit("main", {**data, ".github/workflows/other.yaml": FILE}),
        world.house.head(),
        of_mode(world, submitted, PLAIN, parents=2),
        *(of_mode(world, submitted, mode) for mode in (LINK, PROGRAM, GITLINK)),
    ):
        with pytest.raises(ManifestError):
            read_request(GitRepo(world.house.remote), commit)


def test_server_that_takes_only_branches_gets_the_branch(world: World):
    world.take_branches_only()
    submitted = world.submit()
    assert not submitted.in_inbox
    assert world.house.remote_refs() == {"refs/heads/main", submitted.ref}


def test_server_that_says_no_is_quoted_and_nothing_is_left(world: World):
    world.hook("pre-receive", "echo closed for today; exit 1")
    before = world.house.remote_refs()
    with pytest.raises(PushRejected, match="closed for today"):
        world.submit()
    assert world.house.remote_refs() == before


def test_request_brings_the_workflow_next_to_what_is_there(world: World) -> None:
    kept: dict[str, bytes | None] = {".github/workflows/ci.yaml": b"ci\n", ".github/CODEOWNERS": b"*\n"}
    world.point("refs/heads/main", world.commit("main", kept))
    world.house.git("pull", "--quiet", "origin", "main")
    submitted, bare = send(world, workflow=FILE), GitRepo(world.house.remote)
    request = read_request(bare, submitted.commit)
    assert request.brings_workflow
    assert bound_manifest(request, submitted.nonce).transport == "actions"
    assert changed(world, submitted.commit) == {WORKFLOW_PATH, REQUEST_PATH}
    assert bare.read_file(submitted.commit, WORKFLOW_PATH, 1024) == FILE
    with pytest.raises(ManifestError, match="brings no"):
        bound_manifest(
            read_request(bare, (daemons := send(world, "embedded", workflow=FILE)).commit), daemons.nonce
        )


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (WORKFLOW_PATH, "of its own"),
        (".github", "a folder belongs"),
        (".github/workflows", "a folder belongs"),
    ],
)
def test_file_of_the_workload_is_never_replaced(world: World, path: str, said: str) -> None:
    workload = world.commit("main", {path: b"own\n"})
    world.point("refs/heads/main", workload)
    world.house.git("fetch", "--quiet", "origin", "main")
    manifest = world.manifest(transport="actions", workload_sha=workload)
    with pytest.raises(RevisionError, match=said):
        submit(world.git, world.remote, manifest, None, options=SubmitOptions(workflow=FILE))


@pytest.mark.parametrize("starts", [True, False])
def test_push_of_a_dispatch_says_that_it_starts_no_run(world: World, starts: bool) -> None:
    submitted = send(world, starts_run=starts)
    message = world.house.git("log", "-1", "--format=%B", submitted.commit, cwd=world.house.remote)
    assert ("[skip ci]" in message) is not starts


def test_request_is_taken_back_only_while_it_is_untouched(world: World) -> None:
    submitted = send(world)
    take_back(world.git, world.remote, submitted)
    assert not [ref for ref in world.house.remote_refs() if submitted.nonce in ref]
    submitted = send(world)
    world.point(submitted.ref, world.house.git("rev-parse", "main"))
    with pytest.raises(LeaseLost):
        take_back(world.git, world.remote, submitted)
    assert submitted.ref in world.house.remote_refs()
