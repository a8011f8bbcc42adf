"""Without a token the same commit is pushed again: with real pushes; the inbox stays, others lose nothing."""

from __future__ import annotations

import pytest

from bridge.bus import refs
from bridge.client.resend import Resender, resend
from bridge.client.runs import Request
from bridge.errors import BusError
from tests.worlds import World


def pushes(world: World) -> list[str]:
    """What the server was told, in order: ref, old and new."""
    log = world.root / "pushes"
    return log.read_text().splitlines() if log.exists() else []


def record_pushes(world: World) -> None:
    world.hook("update", f'echo "$1 $2 $3" >> {world.root}/pushes')


def test_the_branch_is_deleted_and_pushed_again_and_the_inbox_stays(world: World) -> None:
    submitted = world.submit(transport="actions")
    record_pushes(world)
    assert resend(world.git, world.remote, submitted.ref, submitted.commit)
    none = "0" * 40
    assert pushes(world) == [
        f"{submitted.ref} {submitted.commit} {none}",
        f"{submitted.ref} {none} {submitted.commit}",
    ]
    assert {submitted.ref, refs.inbox_ref(submitted.nonce)} <= world.house.remote_refs()


def test_a_branch_that_has_moved_is_left_alone(world: World) -> None:
    submitted = world.submit(transport="actions")
    world.answer(submitted)
    before = world.git.ls_remote(world.remote)
    assert not resend(world.git, world.remote, submitted.ref, submitted.commit)
    assert world.git.ls_remote(world.remote) == before


def test_a_refused_second_push_says_how_to_ask_anew(world: World) -> None:
    submitted = world.submit(transport="actions")
    world.hook("update", f'case "$2" in {"0" * 40}) echo "no new branches today"; exit 1;; esac')
    with pytest.raises(BusError, match="no new branches") as error:
        resend(world.git, world.remote, submitted.ref, submitted.commit)
    assert "kakeya_mac again" in (error.value.remedy or "")


def test_it_happens_after_silence_twice_as_long_each_time_and_only_a_few_times(world: World) -> None:
    submitted = world.submit(transport="actions")
    record_pushes(world)
    now = [0.0]
    request = Request(submitted.nonce, submitted.ref, submitted.commit)
    resender = Resender(world.git, world.remote, request, after_s=10.0, clock=lambda: now[0])

    def at(seconds: float, *, is_taken: bool = False) -> int:
        now[0] = seconds
        return len(resender.look(is_taken=is_taken))

    assert at(9) == 0
    assert at(11, is_taken=True) == 0
    assert at(11) == 1
    assert at(30) == 0
    assert at(32) == 1
    assert at(60) == 0
    assert at(73) == 1
    assert at(10_000) == 0
    assert len(pushes(world)) == 2 * Resender.MOST


def test_a_failure_is_told_and_does_not_end_the_wait(world: World) -> None:
    submitted = world.submit(transport="actions")
    request = Request(submitted.nonce, submitted.ref, submitted.commit)
    world.hook("update", "echo closed for today; exit 1")
    resender = Resender(world.git, world.remote, request, after_s=0.0)
    [said] = resender.look(is_taken=False)
    assert "could not be pushed again" in said
    assert "closed for today" in said
