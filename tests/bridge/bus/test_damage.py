"""A repository of ours that breaks is not the remote's fault, and a remote that breaks is not ours."""

from __future__ import annotations

import contextlib
import os

import pytest

from bridge.bus.aside import aside
from bridge.bus.failures import push_error, unreachable
from bridge.bus.git import Git, Update
from bridge.bus.mirror import Mirror
from bridge.bus.objects import Entry
from bridge.errors import BusError, LeaseLost, PushRejected, RemoteUnreachable
from tests.bridge.bus.damage import DAMAGE
from tests.worlds import World

HTTP = "https://me:secret@example.org/r.git"
SSH = "ssh://git@example.org/r.git"
FILE = "/srv/r.git"
SHA = b"0a09e0d3e804e6952554c3648b0db0dda2a4090a"
CORRUPT = (
    b"error: unable to unpack " + SHA + b" header\n"
    b"fatal: loose object " + SHA + b" (stored in ./objects/0a/09e0) is corrupt\n"
)
UNREAD = b"error: Could not read " + SHA + b"\nfatal: Failed to traverse parents of commit " + SHA + b"\n"
CONFIG = b"fatal: bad config line 5 in file ./config\n"
ACCESS = b"fatal: Could not read from remote repository.\n\nPlease make sure you have the correct access\n"
HUNG_UP = (
    b"send-pack: unexpected disconnect while reading sideband packet\n"
    b"fatal: the remote end hung up unexpectedly\n"
)
NO_PACK = b"error: remote unpack failed: eof before pack header was fully read\n"
UNPACKER = b"!\tHEAD:refs/heads/x\t[remote rejected] (unpacker error)\n"

OURS = {
    "no repository": (SSH, b"fatal: not a git repository (or any of the parent directories): .git\n"),
    "no folder": (SSH, b"fatal: cannot change to '/state/mirror.git': No such file or directory\n"),
    "configuration": (FILE, CONFIG),
    "objects over HTTP": (HTTP, UNREAD + b"fatal: the remote end hung up unexpectedly\n" + HUNG_UP),
    "broken object over HTTP": (HTTP, CORRUPT + HUNG_UP),
    "broken object after a fetch": (SSH, CORRUPT + b"error: remote did not send all necessary objects\n"),
    "full disk": (
        SSH,
        b"fatal: write error: No space left on device\nfatal: fetch-pack: invalid index-pack output\n",
    ),
    "no permission": (HTTP, b"error: Unable to create './refs/x.lock': Permission denied\n"),
}
THEIRS = {
    "configuration over SSH": (SSH, CONFIG + ACCESS),
    "configuration in a folder": (FILE, CONFIG + ACCESS),
    "broken object over SSH": (SSH, CORRUPT + HUNG_UP),
    "broken object in a fetch": (FILE, CORRUPT + b"fatal: the remote end hung up unexpectedly\n"),
    "no such object": (
        SSH,
        b"fatal: bad object refs/heads/main\nfatal: remote error: not our ref\n",
    ),
    "too little sent": (
        HTTP,
        b"error: Could not read " + SHA + b"\nerror: remote did not send all necessary objects\n",
    ),
    "its own words": (HTTP, b"remote: fatal: not a git repository\n" + HUNG_UP),
    "nobody listens": (HTTP, b"fatal: unable to access 'https://example.org/r.git/': Failed to connect\n"),
    "no password": (
        HTTP,
        b"error: unable to read askpass response\nfatal: could not read Username\n",
    ),
    "refused key": (SSH, b"git@example.org: Permission denied (publickey).\n" + ACCESS),
}


@pytest.mark.parametrize("case", OURS)
def test_what_broke_here_is_said_to_be_here(case: str):
    remote, stderr = OURS[case]
    for error in (unreachable(remote, stderr), push_error(remote, b"", stderr)):
        assert type(error) is BusError
        assert error.message.startswith("git failed on this machine, before ")
        assert "hung up" not in error.message
        assert "secret" not in error.message


@pytest.mark.parametrize("case", THEIRS)
def test_what_broke_there_is_not(case: str):
    remote, stderr = THEIRS[case]
    assert isinstance(unreachable(remote, stderr), RemoteUnreachable)


def test_a_pack_that_could_not_be_made_is_no_refusal_of_the_server():
    assert type(push_error(SSH, UNPACKER, UNREAD + NO_PACK)) is BusError
    assert isinstance(push_error(SSH, UNPACKER, NO_PACK), PushRejected)
    theirs = b"remote: fatal: write error: No space left on device\n"
    refused = b"error: remote unpack failed: unpack-objects abnormal exit\n"
    assert isinstance(push_error(SSH, UNPACKER, theirs + refused), PushRejected)
    missing = b"!\tHEAD:refs/heads/x\t[remote rejected] (missing necessary objects)\n"
    assert isinstance(push_error(FILE, missing, b"fatal: bad object refs/heads/main\n"), PushRejected)


def test_a_long_complaint_is_cut():
    assert len(unreachable(HTTP, CORRUPT * 500 + UNREAD).message) <= 600


@pytest.mark.sampled(3, 2)
@pytest.mark.parametrize("how", DAMAGE)
def test_a_push_from_a_broken_mirror_is_not_the_remotes_fault(world: World, how: str):
    submitted = world.submit()
    world.mirror.refresh()
    with world.mirror.git.scratch() as scratch:
        blob = scratch.write_blob(b"new")
        tree = scratch.run("mktree", input=f"100644 blob {blob}\tnew\n".encode()).decode().strip()
        commit = scratch.commit_tree(tree, [submitted.commit], "new\n")
        DAMAGE[how](world.mirror.git.directory)
        with pytest.raises(BusError) as caught:
            scratch.push(world.remote, [Update("refs/heads/new", commit, ""), Update("refs/n", commit, "")])
    assert type(caught.value) is BusError, caught.value
    assert "refs/heads/new" not in world.house.remote_refs()


@pytest.mark.sampled(3, 2)
@pytest.mark.parametrize("how", DAMAGE)
def test_a_push_to_a_broken_remote_is_its_fault(world: World, how: str):
    head = world.git.resolve("HEAD")
    tree = world.git.run("rev-parse", "HEAD^{tree}").decode().strip()
    commit = world.git.commit_tree(tree, [head], "new\n")
    DAMAGE[how](world.house.remote)
    with pytest.raises((RemoteUnreachable, PushRejected, LeaseLost)):
        world.git.push(world.remote, [Update("refs/heads/new", commit, ""), Update("refs/n", commit, "")])


# Far more than other programs write to the disk or free meanwhile, for free room is what is watched.
LIMIT = 24 << 20


@pytest.mark.slow
def test_a_fetch_larger_than_the_limit_ends_with_a_clear_error_and_may_be_tried_again(world: World):
    submitted = world.submit()
    head = world.git.resolve("HEAD")
    noise = world.house.root / "noise"
    with open("/dev/urandom", "rb") as source:
        noise.write_bytes(source.read(160 << 20))
    quick = ("-c", "core.compression=0")
    blob = world.house.git(*quick, "hash-object", "-w", str(noise), cwd=world.house.remote)
    tree = world.house.git("mktree", cwd=world.house.remote, input=f"100644 blob {blob}\tnoise\n")
    who = ("-c", "user.name=Mallory", "-c", "user.email=mallory@example.org")
    large = world.house.git(*who, "commit-tree", tree, "-p", head, cwd=world.house.remote, input="much\n")
    inbox = "refs/mac-bridge/inbox/20260301t120000zbbbbbbbbbbbb"
    world.point(inbox, large)
    mirror = Mirror(world.root / "small.git", world.remote, limit_bytes=LIMIT, scan_interval_s=0.0)
    with pytest.raises(BusError, match=f"sends more than {LIMIT} bytes") as caught:
        mirror.refresh()
    assert not isinstance(caught.value, RemoteUnreachable)
    world.house.git("update-ref", "-d", inbox, cwd=world.house.remote)
    assert [pending.nonce for pending in mirror.refresh()] == [submitted.nonce]


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("place", ["repository", "scratch", "aside"])
@pytest.mark.parametrize("count", [1, 200], ids=["few objects", "many objects"])
def test_a_fetch_with_a_limit_counts_all_that_comes(world: World, place: str, count: int):
    """Git unpacks few objects as they come, and however fast they do, they are no less."""
    blobs = [world.git.write_blob(os.urandom((3 << 20) // count)) for _ in range(count)]
    tree = world.git.write_tree([Entry("100644", "blob", blob, f"{n:03}") for n, blob in enumerate(blobs)])
    commit = world.git.commit_tree(tree, [], "much\n")
    world.git.push(world.remote, [Update("refs/heads/large", commit, "")])
    own = Git(world.root / "own.git")
    Git(world.root).run("init", "--quiet", "--bare", str(own.directory))
    places = {"repository": contextlib.nullcontext(own), "scratch": own.scratch(), "aside": aside(own)}
    with places[place] as here:
        with pytest.raises(BusError, match="the remote sends more than 1048576 bytes"):
            here.fetch(world.remote, ["refs/heads/large:refs/heads/own"], limit_bytes=1 << 20)
        here.fetch(world.remote, ["refs/heads/large:refs/heads/own"], limit_bytes=8 << 20)


@pytest.mark.parametrize(
    "said",
    [
        b"error: pack-objects died of signal 9\n" + NO_PACK,
        b"error: pack-objects died of signal 9\nerror: remote unpack failed: unpack-objects abnormal exit\n",
    ],
    ids=["before the pack", "amid the pack"],
)
def test_a_push_whose_pack_was_broken_off_is_no_refusal_of_the_server(said: bytes):
    """A claim that was taken for refused would be made again as a branch, beside somebody else's."""
    error = push_error(FILE, UNPACKER, said + b"error: failed to push some refs to '/srv/r.git'\n")
    assert isinstance(error, RemoteUnreachable)
    assert "broke off in the middle" in error.message
