"""Whatever is pushed, the room it takes on a runner and on a client is bounded, and comes back."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from bridge.bus import room as rooms
from bridge.bus.git import Update
from bridge.bus.intake import Intake
from bridge.bus.mirror import Mirror
from bridge.bus.objects import Entry
from bridge.client import watch as watching
from bridge.errors import BusError
from tests.worlds import World

NONCE = "20260301t120000zbbbbbbbbbbbb"
CLAIM = f"refs/mac-bridge/claims/{NONCE}"

# Far more than other programs write to the disk meanwhile, for free room is what is watched.
LIMIT = 24 << 20


def push(world: World, data: bytes, ref: str = CLAIM) -> None:
    blob = world.git.write_blob(data)
    commit = world.git.commit_tree(world.git.write_tree([Entry("100644", "blob", blob, "x")]), [], "much\n")
    world.git.push(world.remote, [Update(ref, commit, "")])


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def come_and_go(world: World, megabytes: int) -> None:
    push(world, os.urandom(megabytes << 20))
    world.mirror.refresh()
    assert size_of(world.mirror.git.directory) > megabytes << 20
    world.house.git("update-ref", "-d", CLAIM, cwd=world.house.remote)
    world.mirror.refresh()  # lets go of the ref


@pytest.mark.slow
def test_what_was_pushed_and_deleted_before_a_runner_began_anew_takes_no_room(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    submitted = world.submit()
    come_and_go(world, 6)
    monkeypatch.setattr(rooms, "TIDY_BYTES", 4 << 20)
    again = Mirror(world.mirror.git.directory, world.remote)
    assert [pending.nonce for pending in again.refresh()] == [submitted.nonce]
    assert size_of(again.git.directory) < 1 << 20


@pytest.mark.exhaustive
def test_what_is_pushed_and_deleted_again_and_again_takes_bounded_room(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rooms, "TIDY_BYTES", 4 << 20)
    world.mirror.refresh()
    for _ in range(3):
        come_and_go(world, LIMIT >> 20)
        assert size_of(world.mirror.git.directory) < 2.5 * LIMIT


@pytest.mark.slow
def test_what_unpacks_to_a_thousand_times_its_size_is_kept_small(world: World):
    push(world, bytes(64 << 20))
    world.mirror.refresh()
    assert size_of(world.mirror.git.directory) < 4 << 20


def leave_half_written(mirror: Mirror) -> list[Path]:
    objects = mirror.git.directory / "objects"
    litter = [objects / "tmp_obj_a1B2c3", objects / "ab" / "tmp_obj_a1B2c3", objects / "pack/tmp_pack_a1B2c3"]
    for path in litter:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half of an object")
    return litter


def test_a_fetch_that_is_ended_leaves_nothing_half_written(world: World):
    small = Mirror(world.mirror.git.directory, world.remote, limit_bytes=-1)
    with pytest.raises(BusError, match="sends more than -1 bytes"):
        small.refresh()
    litter = leave_half_written(small)
    with pytest.raises(BusError, match="sends more than -1 bytes"):
        small.refresh()
    assert not any(path.exists() for path in litter)


def test_what_a_killed_process_left_half_written_is_removed(world: World):
    world.mirror.refresh()
    litter = leave_half_written(world.mirror)
    Mirror(world.mirror.git.directory, world.remote).refresh()
    assert not any(path.exists() for path in litter)


@pytest.mark.slow
def test_a_client_that_follows_a_request_stops_where_too_much_stands_beside_it(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watching, "Intake", functools.partial(Intake, limit_bytes=LIMIT))
    submitted = world.submit()
    push(world, os.urandom(64 << 20), f"refs/mac-bridge/claims/{submitted.nonce}")
    with pytest.raises(BusError, match=f"sends more than {LIMIT} bytes"):
        list(watching.watch(world.git, world.remote, submitted.nonce, deadline=100, clock=lambda: 0.0))
