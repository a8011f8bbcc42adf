"""Without a token the same commit is pushed again: with real pushes; the inbox stays, others lose nothing."""

from __future__ import annotations

import pytest

from bridge.bus.carriage import Carriage
from bridge.bus.requests import submit
from bridge.client.resend import _PAUSES_S, Resender, resend
from bridge.client.runs import Request
from bridge.errors import BusError
from bridge.protocol import refs
from bridge.runner import wishes
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


def test_a_request_that_no_push_starts_is_left_alone(world: World) -> None:
    """A dispatch started its run, and its commit says so."""
    silent = Carriage(starts_run=False)
    submitted = submit(world.git, world.remote, world.manifest(transport="actions"), None, carriage=silent)
    record_pushes(world)
    assert not resend(world.git, world.remote, submitted.ref, submitted.commit)
    assert pushes(world) == []


def test_a_branch_that_somebody_replaced_is_left_alone(world: World) -> None:
    submitted = world.submit(transport="actions")
    world.point(submitted.ref, world.commit("main", {"a": b"b"}))
    assert not resend(world.git, world.remote, submitted.ref, submitted.commit)


def test_the_branch_is_back_before_a_mac_takes_it_for_deleted(world: World) -> None:
    """All tries but the last, and the time that each takes, fit in what a Mac waits for the branch."""
    assert sum(_PAUSES_S[:-1]) <= wishes.AWAY_S * 2 / 3
    submitted = world.submit(transport="actions")
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == len(_PAUSES_S) - 1:
            hidden.rename(world.house.remote)

    hidden = world.house.remote.with_name("away.git")
    once = world.root / "once"
    world.hook("post-receive", f"mkdir {once} && mv {world.house.remote} {hidden}")
    assert resend(world.git, world.remote, submitted.ref, submitted.commit, sleep=sleep)
    assert sum(slept) < wishes.AWAY_S
    assert submitted.ref in world.house.remote_refs()


def test_an_interrupt_in_the_middle_leaves_no_branch_away(world: World) -> None:
    """A Mac would take it for a wish to stop."""
    submitted = world.submit(transport="actions")
    world.hook(
        "update",
        '[ "$3" = 0000000000000000000000000000000000000000 ] || { [ -e seen ] || '
        "{ touch seen; kill -9 $PPID; }; }",
    )

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resend(world.git, world.remote, submitted.ref, submitted.commit, sleep=interrupted)
    assert submitted.ref in world.house.remote_refs()


def test_it_happens_after_silence_twice_as_long_each_time_and_only_a_few_times(world: World) -> None:
    submitted = world.submit(transport="actions")
    record_pushes(world)
    now = [0.0]
    request = Request(submitted.nonce, submitted.ref, submitted.commit)
    resender = Resender(world.git, world.remote, request, quiet_s=10.0, clock=lambda: now[0])

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


def resender_at(world: World, now: list[float], *, age_s: float = 0.0) -> Resender:
    submitted = world.submit(transport="actions")
    return Resender(
        world.git,
        world.remote,
        Request(submitted.nonce, submitted.ref, submitted.commit),
        quiet_s=900.0,
        age_s=age_s,
        clock=lambda: now[0],
    )


def when(resender: Resender, now: list[float], until: float) -> list[float]:
    """The seconds at which something was done, of those that a wait looks at."""
    done = []
    while now[0] <= until:
        if resender.look(is_taken=False):
            done.append(now[0])
        now[0] += 20.0
    return done


def test_the_age_of_a_request_counts_and_who_comes_late_waits_a_quarter_of_it(world: World) -> None:
    now = [50_000.0]
    assert when(resender_at(world, now, age_s=600.0), now, 50_500) == [50_300]
    now = [50_000.0]
    assert when(resender_at(world, now, age_s=3600.0), now, 51_000) == [50_900]


def test_a_failure_is_told_and_does_not_end_the_wait(world: World) -> None:
    submitted = world.submit(transport="actions")
    request = Request(submitted.nonce, submitted.ref, submitted.commit)
    world.hook("update", "echo closed for today; exit 1")
    resender = Resender(world.git, world.remote, request, quiet_s=0.0)
    [said] = resender.look(is_taken=False)
    assert "could not be pushed again" in said
    assert "closed for today" in said
