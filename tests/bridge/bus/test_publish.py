"""Exactly one result, in one place, whatever happens to the branch or the network."""

from __future__ import annotations

import time

import pytest

from bridge.bus.publish import publish
from bridge.bus.results import Standing
from bridge.errors import LeaseLost, PushRejected, ResultError
from bridge.protocol import refs
from tests.bridge.bus.reading import read
from tests.worlds import FILES, World


def test_a_result_is_one_commit_that_clears_inbox_and_claim(world: World):
    submitted = world.submit()
    [pending] = world.mirror.refresh()
    published = world.answer(submitted, held=world.claim(pending))
    assert published.ref == submitted.ref
    believed = read(world, submitted, known=False)
    assert dict(believed.files) == FILES
    assert believed.signature is Standing.UNSIGNED
    assert "anyone with push rights" in believed.sentence
    assert not [ref for ref in world.house.remote_refs() if ref.startswith("refs/mac-bridge/")]
    assert world.mirror.refresh() == []


def test_a_second_result_is_refused(world: World):
    submitted = world.submit()
    first = world.answer(submitted)
    other = {"report.json": b"other"}
    second = world.result(world.asked(submitted), other)
    with pytest.raises(LeaseLost):
        world.answer(submitted, result=second, files=other)
    assert read(world, submitted).commit == first.commit


@pytest.mark.slow
@pytest.mark.sampled(2, 2)
@pytest.mark.parametrize("where", ["on its branch", "on a ref of its own"])
def test_the_same_result_brought_again_is_the_one_that_stands(world: World, where: str):
    """A runner that died between the push and taking note of it pushes its spool again."""
    submitted = world.submit()
    if where == "on a ref of its own":
        world.point(submitted.ref, world.commit(submitted.commit, {"README.md": b"mine now"}))
    result = world.result(world.asked(submitted))
    first = world.answer(submitted, result=result)
    world.point(refs.inbox_ref(submitted.nonce), submitted.commit)  # as if deleting it had failed
    time.sleep(1.1)  # git dates commits by the second
    assert world.answer(submitted, result=result) == first
    assert refs.inbox_ref(submitted.nonce) not in world.house.remote_refs()
    with pytest.raises(LeaseLost):
        world.answer(submitted, result=result, signature=b"another")


@pytest.mark.parametrize("commits", [1, 4])
def test_a_result_under_somebodys_own_commits_is_still_the_result(world: World, commits: int):
    submitted = world.submit()
    result = world.result(world.asked(submitted))
    tip = world.answer(submitted, result=result).commit
    for number in range(commits):
        tip = world.commit(tip, {"README.md": f"number {number}\n".encode()})
    world.point(submitted.ref, tip)
    with pytest.raises(LeaseLost, match="already has a result"):
        world.answer(submitted, result=result)
    assert refs.result_ref(submitted.nonce) not in world.house.remote_refs()


def test_a_result_goes_to_no_branch_but_the_requests_own(world: World):
    submitted = world.submit()
    world.mirror.refresh()
    with pytest.raises(ResultError, match="not a branch of the request"):
        publish(
            world.mirror.git,
            world.remote,
            request_commit=world.house.git("rev-parse", "main"),
            nonce=submitted.nonce,
            result_ref="refs/heads/main",
            files=FILES,
            result=world.result(world.asked(submitted)),
            signature=None,
            claim=None,
        )


@pytest.mark.slow
def test_a_push_that_fails_changes_nothing_and_can_be_brought_again(world: World):
    submitted = world.submit()
    [pending] = world.mirror.refresh()
    held = world.claim(pending)
    before = world.house.git("show-ref", cwd=world.house.remote)
    world.hook("pre-receive", "echo no; exit 1")
    with pytest.raises(PushRejected, match="no"):
        world.answer(submitted, held=held)
    assert world.house.git("show-ref", cwd=world.house.remote) == before
    (world.house.remote / "hooks" / "pre-receive").unlink()
    assert world.answer(submitted, held=held).ref == submitted.ref
    assert read(world, submitted).signature is Standing.UNSIGNED


def test_a_network_that_fails_for_a_while_is_waited_out(world: World):
    submitted = world.submit()
    world.mirror.refresh()
    away = world.house.remote.with_name("away.git")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            away.rename(world.house.remote)

    world.house.remote.rename(away)
    published = publish(
        world.mirror.git,
        world.remote,
        request_commit=submitted.commit,
        nonce=submitted.nonce,
        result_ref=submitted.ref,
        files=FILES,
        result=world.result(world.asked(submitted)),
        signature=None,
        claim=None,
        sleep=pause,
    )
    assert pauses == [0.5, 1.0]
    assert read(world, submitted).commit == published.commit


@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_a_branch_that_moved_or_vanished_leaves_the_result_a_ref_of_its_own(world: World, how: str):
    submitted = world.submit()
    if how == "moved":
        world.point(submitted.ref, world.commit(submitted.commit, {"README.md": b"mine now"}))
    else:
        world.house.git("update-ref", "-d", submitted.ref, cwd=world.house.remote)
    published = world.answer(submitted)
    assert published.ref == refs.result_ref(submitted.nonce)
    assert read(world, submitted).commit == published.commit
