"""Following a request: every change once, in order, never for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.bus.claims import Heartbeat
from bridge.client.watch import Update, watch
from bridge.errors import RemoteUnreachable, UnknownHandle, WaitTimeout
from bridge.protocol import refs
from bridge.protocol.result import Phase
from tests.fixtures.bus import BusFixture, make_bus


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BusFixture:
    return make_bus(tmp_path, monkeypatch)


class Time:
    """A clock that only sleeping moves, and that does the next step of a plan at each sleep."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.now = 0.0
        self.steps = list(steps)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.steps:
            self.steps.pop(0)()


def follow(bus: BusFixture, nonce: str, time: Time, *, deadline: float = 500, **options: Any) -> list[Update]:
    remote = options.pop("remote", bus.remote)
    watched = watch(bus.git, remote, nonce, deadline=deadline, clock=time.clock, sleep=time.sleep, **options)
    return list(watched)


def test_phases_come_in_order_and_end_with_the_result(bus: BusFixture):
    submitted = bus.submit()
    held = []
    time = Time(
        lambda: held.append(bus.claim(submitted)),
        lambda: held[0].renew(Heartbeat(Phase.RUNNING, 2.0, log_tail=("\x1b[31mred",))),
        *[lambda: None] * 6,  # a claim is not fetched at every look
        lambda: bus.answer(submitted, held=held[0]),
    )
    updates = follow(bus, submitted.nonce, time, expected=bus.expected(submitted))
    assert [u.phase for u in updates] == [Phase.QUEUED, Phase.CLAIMED, Phase.RUNNING, Phase.DONE]
    assert updates[-1].result is not None
    assert updates[-1].result.above == 1


def test_the_deadline_ends_the_wait_and_says_that_the_job_goes_on(bus: BusFixture):
    submitted = bus.submit()
    time = Time()
    with pytest.raises(WaitTimeout, match="goes on"):
        follow(bus, submitted.nonce, time, deadline=5)
    assert time.now <= 6


def test_a_request_that_vanishes_is_reported(bus: BusFixture):
    submitted = bus.submit()
    for ref in bus.repo.remote_refs() - {"refs/heads/main"}:
        bus.repo.git("update-ref", "-d", ref, cwd=bus.repo.remote)
    with pytest.raises(UnknownHandle, match="it was deleted, or never pushed"):
        follow(bus, submitted.nonce, Time())


def test_what_became_of_the_branch_is_said(bus: BusFixture):
    deleted, moved = bus.submit(), bus.submit()

    def delete(*names: str) -> None:
        for ref in names:
            bus.repo.git("update-ref", "-d", ref, cwd=bus.repo.remote)

    time = Time(lambda: delete(deleted.ref, refs.INBOX + deleted.nonce))
    with pytest.raises(UnknownHandle, match="its branch was deleted before a result"):
        follow(bus, deleted.nonce, time)
    delete(refs.INBOX + moved.nonce)
    bus.point(moved.ref, bus.repo.head())
    with pytest.raises(UnknownHandle, match=f"its branch {moved.ref} holds {bus.repo.head()[:12]} now"):
        follow(bus, moved.nonce, Time(), expected=bus.expected(moved))


def test_a_passing_fault_is_waited_out_and_a_lasting_one_is_not(bus: BusFixture):
    submitted = bus.submit()
    away = bus.repo.root / "away.git"
    bus.repo.remote.rename(away)
    time = Time(lambda: away.rename(bus.repo.remote), lambda: bus.answer(submitted))
    updates = follow(bus, submitted.nonce, time)
    assert updates[0].notice is not None
    assert updates[-1].phase is Phase.DONE
    with pytest.raises(RemoteUnreachable):
        follow(bus, submitted.nonce, time, remote="/no/such.git")
