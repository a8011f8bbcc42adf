"""A heartbeat shows where a job is, notices a lost claim, and ends when it is told to."""

from __future__ import annotations

import threading

from bridge.bus.claims import Claim, Heartbeat, RunnerIdentity, read_status
from bridge.bus.requests import resolve_handle
from bridge.errors import BusError
from bridge.evidence.redact import Secrets
from bridge.protocol.result import Phase, Progress, RunStatus
from bridge.runner.lease import HeartbeatThread
from tests.houses import wait_for
from tests.worlds import World

OTHER = RunnerIdentity("othermac", "fedcba9876543210", "00000000000000bb")


def beating(world: World, interval_s: float, **secrets: str) -> tuple[Claim, HeartbeatThread]:
    submitted = world.submit()
    world.bring(submitted)
    held = world.claim(submitted)
    return held, HeartbeatThread(held, interval_s=interval_s, secrets=Secrets(secrets))


def shown(world: World, nonce: str) -> RunStatus | None:
    """What the claim says; None: a heartbeat replaced it while it was being read."""
    found = resolve_handle(world.git, world.remote, nonce).claim
    assert found is not None
    world.cache.bring({found.ref: found.commit}, [found.ref])
    return read_status(world.cache, found.commit)


def test_new_phase_is_shown_at_once_with_progress_and_log(world: World) -> None:
    held, heartbeat = beating(world, 60.0, TOKEN="hunter2hunter2")
    heartbeat.start()
    heartbeat.line("loading with hunter2hunter2")
    heartbeat.line("progress 2/8 verifying code-000")
    heartbeat.line("progress 3/8 verifying code-001")
    heartbeat.enter(Phase.RUNNING)
    nonce = held.status.nonce
    wait_for(lambda: (seen := shown(world, nonce)) is not None and seen.phase is Phase.RUNNING)
    heartbeat.stop()
    status = shown(world, nonce)
    assert status is not None
    assert status.progress == Progress(done=3, total=8, step="verifying code-001")
    assert status.log_tail == ("loading with [redacted:TOKEN]", "progress 3/8 verifying code-001")


def test_phase_waits_for_the_next_heartbeat_where_pushes_are_counted(world: World) -> None:
    submitted = world.submit()
    world.bring(submitted)
    held = world.claim(submitted)
    heartbeat = HeartbeatThread(held, interval_s=0.5, secrets=Secrets({}), tells_phases=False)
    before = shown(world, submitted.nonce)
    heartbeat.start()
    heartbeat.enter(Phase.RUNNING)
    heartbeat.enter(Phase.GATING)
    wait_for(lambda: shown(world, submitted.nonce) != before)
    heartbeat.stop()
    status = shown(world, submitted.nonce)
    assert status is not None
    assert status.phase is Phase.GATING


def test_claim_that_another_runner_took_is_noticed(world: World) -> None:
    submitted = world.submit()
    world.bring(submitted)
    held = world.claim(submitted)
    heartbeat = HeartbeatThread(held, interval_s=0.05, secrets=Secrets({}))
    heartbeat.start()
    world.house.git("update-ref", "-d", held.ref, cwd=world.house.remote)
    world.claim(submitted, OTHER)
    wait_for(lambda: heartbeat.lost, 10)
    heartbeat.stop()
    status = shown(world, held.status.nonce)
    assert status is not None
    assert status.runner == OTHER.name


def test_stop_is_never_slept_through(world: World) -> None:
    """A stop that comes just as the thread takes note of a new phase ends it all the same."""
    _, heartbeat = beating(world, 0.05)

    class StopComesNow(threading.Event):
        def clear(self) -> None:
            heartbeat._ending.set()
            self.set()
            super().clear()

    heartbeat._wake = StopComesNow()
    heartbeat.start()
    heartbeat._thread.join(5.0)
    assert not heartbeat._thread.is_alive()


def test_failing_heartbeats_and_questions_end_nothing() -> None:
    """A repository that is broken is repaired; a bug, or a remote that is away, costs one heartbeat."""
    beats: list[Heartbeat] = []
    failures: list[Exception] = [BusError("broken"), ZeroDivisionError(), OSError("full")]
    questions: list[Exception] = [BusError("away"), ZeroDivisionError()]
    repaired: list[bool] = []

    class Holder:
        attempt = 1

        def renew(self, beat: Heartbeat) -> None:
            if failures:
                raise failures.pop(0)
            beats.append(beat)

    def poll() -> str | None:
        if questions:
            raise questions.pop(0)
        return "enough"

    heartbeat = HeartbeatThread(
        Holder(),
        interval_s=0.01,
        secrets=Secrets({}),
        poll=poll,
        poll_s=0.01,
        repair=lambda: repaired.append(True),
    )
    heartbeat.start()
    wait_for(lambda: heartbeat.cancelled == "enough" and len(beats) > 1, 10)
    heartbeat.stop()
    assert repaired == [True]
    assert not heartbeat.lost
