"""An idle engine keeps nothing of what it did: no arrays of requests that ended, no streams at its end."""

from __future__ import annotations

import queue
import subprocess
import sys
import time

import pytest

from engine.registry import NATIVE, Places, Registry
from engine.server.scheduler import Scheduler, SchedulerLimits
from engine.server.sequence import DecodeFinished, DecodeRequest, Event
from engine.server.serve import model_finder, preload

SCALARS = 2**16  # bytes; a session of this prompt takes some hundred times as much

# Loading makes a stream that the thread has to destroy; a process that does not, is aborted at its end.
LIFE = """
from tests.engine.server.test_idle import started
started().stop()
"""


def started(**limits: float) -> Scheduler:
    """A running scheduler with the shipped pair in memory."""
    registry = Registry.load(None)
    scheduler = Scheduler(model_finder(Places.of_machine(), download=False), SchedulerLimits(**limits))  # type: ignore[arg-type]
    scheduler.start()
    preload(scheduler, registry)
    return scheduler


def idle_bytes(scheduler: Scheduler) -> int:
    """Arrays in use once every session is closed, and the figures were told since."""
    deadline = time.monotonic() + 20
    told = scheduler.stats
    while scheduler.stats is told or scheduler.stats.active or scheduler.stats.cached:
        assert time.monotonic() < deadline, scheduler.stats
        time.sleep(0.05)
    return scheduler.stats.memory_bytes


@pytest.mark.slow
def test_an_idle_thread_holds_no_arrays_of_its_last_request():
    scheduler = started(session_s=0.0)
    registry = Registry.load(None)
    try:
        sizes = []
        for length in (900, 300, 900):
            events: queue.SimpleQueue[Event] = queue.SimpleQueue()
            lease = scheduler.lease(registry.entry("demo"))
            lease.granted.result(60)
            scheduler.submit(lease, DecodeRequest([5] * length, 0, 4, NATIVE), events.put)
            while not isinstance(events.get(timeout=60), DecodeFinished):
                continue
            sizes.append(idle_bytes(scheduler))
        assert max(sizes) - min(sizes) < SCALARS
    finally:
        scheduler.stop()


@pytest.mark.slow
def test_a_process_exits_cleanly_after_its_scheduler_stopped():
    done = subprocess.run([sys.executable, "-c", LIFE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
