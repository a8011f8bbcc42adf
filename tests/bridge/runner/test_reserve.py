"""A supervisor waits for the next job; it holds nothing meanwhile, does not grow old, and is never two."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from bridge.runner import child, reserve
from bridge.runner.child import MachineBusy, Order, Standby, Supervised
from bridge.runner.reserve import Reserve
from bridge.runner.station import Station
from tests.bridge.runner.bench import Bench
from tests.houses import House, wait_for


class Started(Standby):
    """A supervisor that is remembered."""

    all: list[Started]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.all.append(self)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    Started.all = []
    monkeypatch.setattr(reserve, "Standby", Started)
    return Started.all


@pytest.fixture
def station(house: House) -> Station:
    made = Bench(house).station()
    made.jobs.mkdir()
    return made


def works(supervised: Supervised, folder: Path) -> bool:
    """Whether a job runs there."""
    said: list[str] = []
    order = Order(
        (sys.executable, "-I", "-c", "print('done')"), {"PATH": os.environ["PATH"]}, folder, folder, {}, 30
    )
    with (folder / "log").open("wb", 0) as log:
        ended = supervised.run(order, log, on_line=said.append, stop=lambda: False)
    return ended.exit_code == 0 and said == ["done"]


def test_the_waiting_one_is_taken_and_leaves_the_lock_to_others_until_then(
    station: Station, started: list[Started]
) -> None:
    kept = Reserve(station)
    kept.fill()
    kept.fill()
    assert len(started) == 1
    with Supervised(Standby(station.lock)):  # another runner of this machine
        assert started[0].alive
    with kept.take() as taken:
        assert len(started) == 1
        with pytest.raises(MachineBusy):
            Supervised(Standby(station.lock))
        assert works(taken, station.jobs)
    assert not started[0].alive
    with kept.take() as taken:
        assert len(started) == 2, "a supervisor serves one job"
        assert works(taken, station.jobs)


def test_where_another_job_holds_the_machine_none_is_left_behind(
    station: Station, started: list[Started]
) -> None:
    kept = Reserve(station)
    kept.fill()
    with Supervised(Standby(station.lock)):
        for _ in range(2):
            with pytest.raises(MachineBusy):
                kept.take()
    assert len(started) == 2
    assert not any(one.alive for one in started)


def test_one_that_waited_too_long_is_replaced(
    station: Station, started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a supervisor hides is what was there when it started."""
    kept = Reserve(station)
    kept.fill()
    monkeypatch.setattr(reserve, "OLDEST_S", -1.0)
    kept.fill()
    assert [one.alive for one in started] == [False, True]
    with kept.take() as taken:
        assert [one.alive for one in started] == [False, False, True]
        assert works(taken, station.jobs)


def test_one_that_died_is_replaced(station: Station, started: list[Started]) -> None:
    kept = Reserve(station)
    kept.fill()
    os.kill(started[0]._process.pid, signal.SIGKILL)
    wait_for(lambda: not started[0].alive, 10, "the end of the waiting one")
    with kept.take() as taken:
        assert len(started) == 2
        assert works(taken, station.jobs)


def test_emptying_ends_the_waiting_one_and_closes_what_it_held(
    station: Station, started: list[Started]
) -> None:
    before = len(os.listdir("/dev/fd"))
    kept = Reserve(station)
    for _ in range(2):
        kept.fill()
        kept.empty()
        kept.empty()
    assert len(started) == 2
    assert not any(one.alive for one in started)
    assert len(os.listdir("/dev/fd")) == before


def test_one_that_cannot_start_is_an_error_and_the_next_try_is_a_new_one(
    station: Station, started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Reserve(station)
    with monkeypatch.context() as broken:
        broken.setattr(child, "SUPERVISOR", ("-c", "raise SystemExit(1)"))
        with pytest.raises(child.MachineError, match="did not start"):
            kept.take()
    with kept.take() as taken:
        assert works(taken, station.jobs)
