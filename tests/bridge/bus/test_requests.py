"""A request is one commit on the workload; every other shape is refused; nothing is left in the checkout."""

from __future__ import annotations

from dataclasses import replace

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
from bridge.protocol.manifest import MAX_BYTES, REQUEST_PATH, SIGNATURE_PATH, Against, parse
from tests.fixtures.bus import BusFixture, snapshot
from tests.objects import FOLDER, GITLINK, LINK, PLAIN, PROGRAM, Objects

FILE = b"name: mac-bridge\n"


def send(bus: BusFixture, transport: str = "actions", **options: object) -> Submitted:
    manifest = bus.manifest(transport=transport)
    return submit(bus.git, bus.remote, manifest, None, options=SubmitOptions(**options))  # type: ignore[arg-type]


def changed(bus: BusFixture, commit: str) -> set[str]:
    """Paths in which a commit differs from its parent, by git itself."""
    return set(bus.repo.git("diff", "--name-only", f"{commit}^", commit, cwd=bus.repo.remote).splitlines())


def test_request_adds_its_manifest_and_nothing_else(bus: BusFixture):
    before = snapshot(bus.repo.clone)
    submitted = bus.submit()
    request = read_request(GitRepo(bus.repo.remote), submitted.commit)
    assert request.parents == (bus.repo.head(),)
    assert parse(request.data).nonce == submitted.nonce
    assert request.signature is None
    assert changed(bus, submitted.commit) == {REQUEST_PATH}
    assert bus.repo.remote_refs() >= {submitted.ref, refs.INBOX + submitted.nonce}
    assert snapshot(bus.repo.clone) == before


def test_earlier_request_in_the_workload_is_replaced(bus: BusFixture):
    old: dict[str, bytes | None] = {REQUEST_PATH: b"old", SIGNATURE_PATH: b"old", ".mac-bridge/notes": b"n"}
    bus.point("refs/heads/main", bus.commit("main", old))
    bus.repo.git("pull", "--quiet", "--ff-only")
    submitted = bus.submit()
    listed = bus.repo.git("ls-tree", "-r", "--name-only", submitted.commit, cwd=bus.repo.remote)
    assert set(listed.splitlines()) == {".mac-bridge/notes", REQUEST_PATH, "README.md"}


def of_mode(bus: BusFixture, submitted: Submitted, mode: str, *, parents: int = 1) -> str:
    """A request commit whose manifest has another mode, or that has more parents."""
    objects, main = Objects(bus.repo.remote), bus.repo.git("rev-parse", "main")
    readme = bus.repo.git("rev-parse", "main:README.md")
    sha = main if mode == GITLINK else objects.blob(b"/etc/passwd" if mode == LINK else b"{}")
    inner = objects.tree([(mode, "request.json", sha)])
    tree = objects.tree([(PLAIN, "README.md", readme), (FOLDER, ".mac-bridge", inner)])
    return objects.commit(tree, [main, submitted.commit, main][:parents])


def test_commits_of_another_shape_are_refused(bus: BusFixture):
    submitted = bus.submit()
    workload, data = submitted.commit + "^", {REQUEST_PATH: b"{}"}
    own = bus.commit("main", {WORKFLOW_PATH: b"own\n"})
    for commit in (
        bus.commit(workload, {**data, "README.md": b"changed"}),
        bus.commit(workload, {SIGNATURE_PATH: b"x"}),
        bus.commit(submitted.commit, {REQUEST_PATH: None}),
        bus.commit(workload, {REQUEST_PATH: b" " * (MAX_BYTES + 1)}),
        bus.commit(own, {**data, WORKFLOW_PATH: FILE}),
        bus.commit(own, {**data, WORKFLOW_PATH: None}),
        bus.commit("main", {**data, ".github/workflows/other.yaml": FILE}),
        bus.repo.head(),
        of_mode(bus, submitted, PLAIN, parents=3),
        *(of_mode(bus, submitted, mode) for mode in (LINK, PROGRAM, GITLINK)),
    ):
        with pytest.raises(ManifestError):
            read_request(GitRepo(bus.repo.remote), commit)


def test_paired_request_brings_the_other_commit_as_its_second_parent(bus: BusFixture):
    bare, other = GitRepo(bus.repo.remote), bus.commit("main", {"README.md": b"changed"})
    bus.repo.git("fetch", "--quiet", str(bus.repo.remote), other)
    submitted = bus.submit(against=Against(workload_sha=other))
    request = read_request(bare, submitted.commit)
    assert request.parents == (bus.repo.head(), other)
    manifest = bound_manifest(request, submitted.nonce)
    assert manifest.against == Against(workload_sha=other)
    assert changed(bus, submitted.commit) == {REQUEST_PATH}
    # Neither may name what the other does not have.
    named = replace(request, data=manifest.model_copy(update={"against": None}).to_bytes())
    with pytest.raises(ManifestError, match="the commit's parent"):
        bound_manifest(named, submitted.nonce)
    with pytest.raises(ManifestError, match="the commit's parent"):
        bound_manifest(replace(request, parents=request.parents[:1]), submitted.nonce)


def test_server_that_takes_only_branches_gets_the_branch(bus: BusFixture):
    bus.allow_only_branches()
    submitted = bus.submit()
    assert not submitted.in_inbox
    assert bus.repo.remote_refs() == {"refs/heads/main", submitted.ref}


def test_server_that_says_no_is_quoted_and_nothing_is_left(bus: BusFixture):
    bus.hook("pre-receive", "echo closed for today; exit 1")
    before = bus.repo.remote_refs()
    with pytest.raises(PushRejected, match="closed for today"):
        bus.submit()
    assert bus.repo.remote_refs() == before


def test_request_brings_the_workflow_next_to_what_is_there(bus: BusFixture) -> None:
    kept: dict[str, bytes | None] = {".github/workflows/ci.yaml": b"ci\n", ".github/CODEOWNERS": b"*\n"}
    bus.point("refs/heads/main", bus.commit("main", kept))
    bus.repo.git("pull", "--quiet", "origin", "main")
    submitted, bare = send(bus, workflow=FILE), GitRepo(bus.repo.remote)
    request = read_request(bare, submitted.commit)
    assert request.brings_workflow
    assert bound_manifest(request, submitted.nonce).transport == "actions"
    assert changed(bus, submitted.commit) == {WORKFLOW_PATH, REQUEST_PATH}
    assert bare.read_file(submitted.commit, WORKFLOW_PATH, 1024) == FILE
    with pytest.raises(ManifestError, match="brings no"):
        bound_manifest(
            read_request(bare, (daemons := send(bus, "embedded", workflow=FILE)).commit), daemons.nonce
        )


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (WORKFLOW_PATH, "of its own"),
        (".github", "a folder belongs"),
        (".github/workflows", "a folder belongs"),
    ],
)
def test_file_of_the_workload_is_never_replaced(bus: BusFixture, path: str, said: str) -> None:
    workload = bus.commit("main", {path: b"own\n"})
    bus.point("refs/heads/main", workload)
    bus.repo.git("fetch", "--quiet", "origin", "main")
    manifest = bus.manifest(transport="actions", workload_sha=workload)
    with pytest.raises(RevisionError, match=said):
        submit(bus.git, bus.remote, manifest, None, options=SubmitOptions(workflow=FILE))


@pytest.mark.parametrize("starts", [True, False])
def test_push_of_a_dispatch_says_that_it_starts_no_run(bus: BusFixture, starts: bool) -> None:
    submitted = send(bus, starts_run=starts)
    message = bus.repo.git("log", "-1", "--format=%B", submitted.commit, cwd=bus.repo.remote)
    assert ("[skip ci]" in message) is not starts


def test_request_is_withdrawn_only_while_it_is_untouched(bus: BusFixture) -> None:
    submitted = send(bus)
    take_back(bus.git, bus.remote, submitted)
    assert not [ref for ref in bus.repo.remote_refs() if submitted.nonce in ref]
    submitted = send(bus)
    bus.point(submitted.ref, bus.repo.git("rev-parse", "main"))
    with pytest.raises(LeaseLost):
        take_back(bus.git, bus.remote, submitted)
    assert submitted.ref in bus.repo.remote_refs()
