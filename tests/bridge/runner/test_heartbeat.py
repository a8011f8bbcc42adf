"""A heartbeat shows where a job is, notices a lost claim, and ends when it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from bridge.bus.claims import Claim, Identity, claim, read_status
from bridge.bus.handles import resolve_handle
from bridge.evidence.redact import Secrets
from bridge.protocol.result import Phase, Progress, RunStatus
from bridge.runner.heartbeat import Heartbeat
from tests.worlds import World

OTHER = Identity("othermac", "fedcba9876543210", "00000000000000bb")


def beating(world: World, interval_s: float, **secrets: str) -> tuple[Claim, Heartbeat]:
    world.submit()
    held = world.claim(world.mirror.refresh()[0])
    return held, Heartbeat(held, interval_s=interval_s, secrets=Secrets(secrets))


def shown(world: World, nonce: str) -> RunStatus:
    """What the claim says; a beat may replace it while it is being read."""
    for _ in range(50):
        found = resolve_handle(world.git, world.remote, nonce).claim
        assert found is not None
        with world.git.scratch() as scratch:
            scratch.fetch(world.remote, [found.ref])
            status = read_status(scratch, found.commit)
        if status is not None:
            return status
    raise AssertionError("the claim moves faster than it can be read")


def eventually(reached: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_a_new_phase_is_shown_at_once_with_progress_and_the_logs_tail(world: World):
    held, heart = beating(world, 60.0, TOKEN="hunter2hunter2")
    heart.start()
    heart.line("loading with hunter2hunter2")
    heart.line("progress 3/8 verifying code-001")
    heart.enter(Phase.RUNNING)
    eventually(lambda: shown(world, held.status.nonce).phase is Phase.RUNNING)
    heart.stop()
    status = shown(world, held.status.nonce)
    assert status.progress == Progress(done=3, total=8, step="verifying code-001")
    assert status.log_tail == ("loading with [redacted:TOKEN]", "progress 3/8 verifying code-001")


def test_a_claim_that_somebody_else_took_is_noticed(world: World):
    held, heart = beating(world, 0.05)
    heart.start()
    world.house.git("update-ref", "-d", held.ref, cwd=world.house.remote)
    taken = claim(world.mirror.git, world.remote, world.mirror.refresh()[0], OTHER)
    eventually(lambda: heart.lost)
    heart.stop()
    assert taken is not None
    assert shown(world, held.status.nonce).runner == OTHER.name


def test_a_stop_is_never_slept_through(world: World):
    """A stop that comes just as the thread takes note of a new phase ends it all the same."""
    _, heart = beating(world, 0.05)

    class StopComesNow(threading.Event):
        def clear(self) -> None:
            heart._ending.set()
            self.set()
            super().clear()

    heart._wake = StopComesNow()
    heart.start()
    heart._thread.join(5.0)
    assert not heart._thread.is_alive()
