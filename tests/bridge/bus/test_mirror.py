"""The runner's mirror: pending requests oldest first, and it heals by itself."""

from __future__ import annotations

import shutil
import threading

import pytest

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


@pytest.mark.slow
def test_a_branch_is_not_taken_for_deleted_while_another_thread_makes_the_mirror_again(world: World):
    submitted = world.submit()
    world.mirror.refresh()
    found: list[str | None] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            found.append(world.mirror.standing(submitted.nonce, submitted.ref).branch)

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(8):
        world.mirror.remake()
        assert world.mirror.git.exists(submitted.commit)
    ended.set()
    looking.join(30)
    assert len(found) > 1, "the looks ended with an error"
    assert set(found) == {submitted.commit}


def test_what_works_again_is_not_made_again(world: World):
    world.submit()
    world.mirror.refresh()
    head = world.mirror.git.directory / "HEAD"
    head.unlink()
    assert world.mirror.mend(lambda: world.mirror.git.run("rev-parse", "--git-dir"))
    assert head.exists()
    assert not world.mirror.mend(lambda: world.mirror.git.run("rev-parse", "--git-dir"))
