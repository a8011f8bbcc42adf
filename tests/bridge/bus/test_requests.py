"""A request is one commit on the workload; every other shape is refused; nothing is left in the checkout."""

from __future__ import annotations

import pytest

from bridge.bus import trees
from bridge.bus.git import Git
from bridge.bus.objects import Entry
from bridge.bus.requests import FOLDER, Submitted, read_request
from bridge.errors import ManifestError, PushRejected, RemoteUnreachable
from bridge.protocol import refs
from bridge.protocol.manifest import REQUEST_PATH, SIGNATURE_PATH, parse
from tests.worlds import World


def test_a_request_adds_its_manifest_and_nothing_else(world: World):
    submitted = world.submit()
    bare = Git(world.house.remote)
    request = read_request(bare, submitted.commit)
    assert request.parent == world.house.git("rev-parse", "HEAD")
    assert parse(request.data).nonce == submitted.nonce
    assert request.signature is None
    assert world.house.remote_refs() >= {submitted.ref, refs.inbox_ref(submitted.nonce)}
    assert not world.git.exists(submitted.commit), "the object stays out of the user's repository"


def raw_commit(world: World, submitted: Submitted, mode: str, *, parents: int = 1) -> str:
    """A request commit as git's own commands would not write it: the manifest's mode, the parents."""
    git, main = Git(world.house.remote), world.house.git("rev-parse", "main")
    blob = main if mode == "160000" else git.write_blob(b"/etc/passwd" if mode == "120000" else b"{}")
    kind = "commit" if mode == "160000" else "blob"
    folder = git.write_tree([Entry(mode, kind, blob, "request.json")])
    tree = git.write_raw_tree(trees.with_folder(git.read_tree(f"{main}^{{tree}}"), FOLDER, folder))
    return git.commit_tree(tree, [main, submitted.commit][:parents], "by hand\n")


def test_commits_of_another_shape_are_refused(world: World):
    submitted = world.submit()
    bare = Git(world.house.remote)
    data = {REQUEST_PATH: b"{}"}
    cases = {
        "another file": world.commit(submitted.commit + "^", {**data, "README.md": b"changed"}),
        "no manifest": world.commit(submitted.commit + "^", {SIGNATURE_PATH: b"x"}),
        "manifest deleted": world.commit(submitted.commit, {REQUEST_PATH: None}),
        "workload itself": world.house.git("rev-parse", "HEAD"),
        "two parents": raw_commit(world, submitted, "100644", parents=2),
        "a link": raw_commit(world, submitted, "120000"),
        "a program": raw_commit(world, submitted, "100755"),
        "a submodule": raw_commit(world, submitted, "160000"),
    }
    for commit in cases.values():
        with pytest.raises(ManifestError, match=r"request|workload|carries|changes|manifest"):
            read_request(bare, commit)


def test_a_server_that_takes_only_branches_gets_the_branch(world: World):
    world.take_branches_only()
    submitted = world.submit()
    assert not submitted.in_inbox
    assert submitted.ref in world.house.remote_refs()
    assert [p.nonce for p in world.mirror.refresh()] == [submitted.nonce]


def test_a_server_that_says_no_is_quoted_and_nothing_is_left(world: World):
    world.hook("pre-receive", "echo closed for today; exit 1")
    before = world.house.remote_refs()
    with pytest.raises(PushRejected, match="closed for today"):
        world.submit()
    assert world.house.remote_refs() == before


@pytest.mark.parametrize("remote", ["/no/such.git", "http://127.0.0.1:9/x.git", "ssh://127.0.0.1:9/x.git"])
def test_a_remote_that_does_not_answer_is_one_clear_error(world: World, remote: str):
    with pytest.raises(RemoteUnreachable) as error:
        world.git.ls_remote(remote, timeout_s=10)
    assert "Traceback" not in error.value.message


def test_a_password_in_the_address_is_never_in_a_message(world: World):
    with pytest.raises(RemoteUnreachable) as error:
        world.git.ls_remote("http://user:hunter22@127.0.0.1:9/x.git", timeout_s=10)
    assert "hunter22" not in error.value.message + (error.value.remedy or "")
