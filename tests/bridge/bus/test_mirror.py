"""The runner's mirror: pending requests oldest first, and it heals by itself."""

from __future__ import annotations

import shutil

from tests.worlds import World


def test_pending_requests_come_oldest_first_and_leave_with_their_result(world: World):
    assert world.mirror.refresh() == []
    later = world.submit(nonce="20260301t120001zaaaaaaaaaaaa")
    earlier = world.submit(nonce="20260301t120000zbbbbbbbbbbbb")
    assert [p.nonce for p in world.mirror.refresh()] == [earlier.nonce, later.nonce]
    world.answer(earlier)
    assert [p.nonce for p in world.mirror.refresh()] == [later.nonce]


def test_a_broken_mirror_is_made_again(world: World):
    submitted = world.submit()
    world.mirror.refresh()
    shutil.rmtree(world.mirror.git.directory / "objects")
    assert [p.nonce for p in world.mirror.refresh()] == [submitted.nonce]
    (world.mirror.git.directory / "HEAD").write_text("rubbish")
    assert [p.nonce for p in world.mirror.refresh()] == [submitted.nonce]


def test_a_request_whose_branch_was_deleted_is_still_pending(world: World):
    submitted = world.submit()
    world.house.git("update-ref", "-d", submitted.ref, cwd=world.house.remote)
    assert [p.nonce for p in world.mirror.refresh()] == [submitted.nonce]
