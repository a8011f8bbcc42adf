"""An idle runner retires what is old, a helping at a time; a busy one does not, and no failure stops it."""

from __future__ import annotations

import itertools
from datetime import datetime, timedelta

import pytest

from bridge.bus.catalogue import publish_card, read_cards
from bridge.bus.git import Git
from bridge.protocol import refs
from bridge.runner import upkeep
from bridge.runner.child import Standby, Supervised
from bridge.runner.serve import Runner
from bridge.runner.upkeep import FIRST_S, INTERVAL_S, NEXT_S, Upkeep
from tests.bridge.bus.archives import NOW, answered, bridge_refs, many_answered, nonce_of_age
from tests.bridge.cards import card
from tests.bridge.runner.bench import Bench
from tests.worlds import World


class Clock:
    """Monotonic seconds and the time of day, both moved by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return NOW + timedelta(seconds=self.seconds)


class Work:
    """The upkeep of one runner, what it said, and its clock."""

    def __init__(self, world: World) -> None:
        self.clock = Clock()
        self.said: list[str] = []
        self._upkeep = Upkeep(
            Bench(world.house).station(),
            Git(world.house.clone),
            say=self.said.append,
            clock=self.clock,
            now=self.clock.now,
        )

    def after(self, seconds: float) -> None:
        self.clock.seconds += seconds
        self._upkeep.work()


def cards(world: World) -> list[str]:
    return [seen.name for seen in read_cards(world.git, world.remote).seen]


def test_it_begins_some_minutes_after_the_start_and_then_rests_for_hours(world: World) -> None:
    first = answered(world)
    work = Work(world)
    work.after(FIRST_S / 2 - 1)
    assert bridge_refs(world) == {first.ref}
    work.after(FIRST_S / 2 + 1)
    assert bridge_refs(world) == set()
    assert work.said == ["1 finished request(s) moved into the archive"]
    second = answered(world)
    work.after(0.75 * INTERVAL_S - 1)
    assert bridge_refs(world) == {second.ref}
    work.after(0.5 * INTERVAL_S + 1)
    assert bridge_refs(world) == set()
    work.after(1.25 * INTERVAL_S)
    assert len(work.said) == 2, "nothing to do is nothing to say"


def test_much_work_comes_in_helpings_and_cards_are_forgotten_after_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that comes meanwhile waits for one helping at most."""
    monkeypatch.setattr(upkeep, "HELPING", 3)
    many_answered(world, 7)
    publish_card(world.git, world.remote, card("long-gone", age_s=30 * 86_400, now=NOW), None, now=NOW)
    publish_card(world.git, world.remote, card("away", age_s=86_400, now=NOW, id="a" * 16), None, now=NOW)
    work = Work(world)
    pauses = (FIRST_S, NEXT_S, NEXT_S)
    for pause, left in zip(pauses, (4, 1, 0), strict=True):
        assert cards(world) == ["away", "long-gone"]
        work.after(pause - 1 if pause == NEXT_S else 0)
        work.after(1 if pause == NEXT_S else pause)
        assert len([ref for ref in bridge_refs(world) if "probe" in ref]) == left
    assert cards(world) == ["away"]
    assert [line.split()[0] for line in work.said] == ["3", "3", "1"]


def test_what_is_unfinished_or_young_stays(world: World) -> None:
    waiting = world.submit(nonce=nonce_of_age())
    young = answered(world, timedelta(days=1))
    work = Work(world)
    work.after(FIRST_S)
    assert bridge_refs(world) == {waiting.ref, refs.inbox_ref(waiting.nonce), young.ref}
    assert work.said == []


def test_a_remote_that_is_away_is_said_and_tried_again_hours_later(world: World) -> None:
    answered(world)
    work = Work(world)
    away = world.house.remote.with_name("away.git")
    world.house.remote.rename(away)
    work.after(FIRST_S)
    assert len(work.said) == 1
    assert work.said[0].startswith("old results are not retired: ")
    away.rename(world.house.remote)
    work.after(0.75 * INTERVAL_S - 1)
    assert len(bridge_refs(world)) == 1
    work.after(0.5 * INTERVAL_S + 1)
    assert bridge_refs(world) == set()


def test_a_server_that_deletes_nothing_is_not_asked_again_and_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "HELPING", 1)
    many_answered(world, 2)
    world.house.git("config", "receive.denyDeletes", "true", cwd=world.house.remote)
    work = Work(world)
    work.after(FIRST_S)
    assert len(work.said) == 1
    assert work.said[0].startswith("the server does not delete what was archived: ")
    work.after(NEXT_S)
    assert len(work.said) == 1
    assert len(bridge_refs(world)) == 2


def serve(world: World, *, seconds: float) -> list[str]:
    """What a runner says whose clock moves on at every glance, for so long."""
    moments = itertools.count(0.0, 60.0)
    bench = Bench(world.house)
    bench.install({"echo": "print(arg)"})
    runner = Runner(
        bench.station(),
        say=bench.said.append,
        idle_s=0.01,
        clock=lambda: next(moments),
        now=lambda: NOW,
    )
    runner.serve(once=True, idle_timeout_s=seconds)
    return bench.said


def test_an_idle_runner_does_it_and_leaves_the_rest_alone(world: World) -> None:
    young = answered(world, timedelta(days=1))
    answered(world)
    said = serve(world, seconds=2 * FIRST_S)
    assert "1 finished request(s) moved into the archive" in said, said
    assert bridge_refs(world) == {young.ref, f"{refs.RUNNERS}mac"}


def test_a_runner_does_it_also_while_requests_wait_for_somebody_else(world: World) -> None:
    old = answered(world)
    waiting = world.submit(transport="actions")
    said = serve(world, seconds=2 * FIRST_S)
    assert "1 finished request(s) moved into the archive" in said, said
    assert old.ref not in bridge_refs(world)
    assert waiting.ref in bridge_refs(world)


@pytest.mark.slow
def test_a_runner_whose_machine_is_at_another_job_does_not(world: World) -> None:
    """That job may be measuring."""
    old = answered(world)
    world.submit(preset="echo", created_at=NOW, nonce=nonce_of_age(timedelta(minutes=1)))
    with Supervised(Standby(Bench(world.house).station().lock)):
        said = serve(world, seconds=2 * FIRST_S)
    assert any("another job runs" in line for line in said), said
    assert not [line for line in said if "archive" in line]
    assert old.ref in bridge_refs(world)
