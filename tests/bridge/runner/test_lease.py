"""A heartbeat shows where a job is, notices a lost claim, and ends when it is told to."""

from __future__ import annotations

from bridge.bus.claims import Claim, Heartbeat, RunnerIdentity, read_status
from bridge.bus.requests import resolve_handle
from bridge.errors import BusError
from bridge.evidence.redact import Secrets
from bridge.protocol.result import Phase, Progress, RunStatus
from bridge.runner.lease import HeartbeatThread
from tests.fixtures.bus import BusFixture
from tests.fixtures.repo import wait_for

OTHER = RunnerIdentity("othermac", "fedcba9876543210", "00000000000000bb")


def beating(bus: BusFixture, interval_s: float, **secrets: str) -> tuple[Claim, HeartbeatThread]:
    submitted = bus.submit()
    bus.bring(submitted)
    held = bus.claim(submitted)
    return held, HeartbeatThread(held.renew, interval_s=interval_s, secrets=Secrets(secrets))


def shown(bus: BusFixture, nonce: str) -> RunStatus | None:
    """What the claim says; None: a heartbeat replaced it while it was being read."""
    found = resolve_handle(bus.git, bus.remote, nonce).claim
    assert found is not None
    bus.cache.bring({found.ref: found.commit}, [found.ref])
    return read_status(bus.cache, found.commit)


def test_heartbeat_shows_phase_progress_and_log(bus: BusFixture) -> None:
    held, heartbeat = beating(bus, 0.5, TOKEN="hunter2hunter2")
    heartbeat.start()
    heartbeat.line("loading with hunter2hunter2")
    heartbeat.line("progress 2/8 verifying code-000")
    heartbeat.line("progress 3/8 verifying code-001")
    heartbeat.phase = Phase.RUNNING
    nonce = held.status.nonce
    wait_for(lambda: (seen := shown(bus, nonce)) is not None and seen.phase is Phase.RUNNING)
    heartbeat.stop()
    status = shown(bus, nonce)
    assert status is not None
    assert status.progress == Progress(done=3, total=8, step="verifying code-001")
    assert status.log_tail == ("loading with [redacted:TOKEN]", "progress 3/8 verifying code-001")


def test_claim_that_another_runner_took_is_noticed(bus: BusFixture) -> None:
    submitted = bus.submit()
    bus.bring(submitted)
    held = bus.claim(submitted)
    heartbeat = HeartbeatThread(held.renew, interval_s=0.05, secrets=Secrets({}))
    heartbeat.start()
    bus.repo.git("update-ref", "-d", held.ref, cwd=bus.repo.remote)
    bus.claim(submitted, OTHER)
    wait_for(lambda: heartbeat.lost, 10)
    heartbeat.stop()
    status = shown(bus, held.status.nonce)
    assert status is not None
    assert status.runner == OTHER.name


def test_failing_heartbeats_and_questions_end_nothing() -> None:
    """A bug, or a remote that is away, costs one heartbeat."""
    beats: list[Heartbeat] = []
    failures: list[Exception] = [BusError("broken"), ZeroDivisionError(), OSError("full")]
    questions: list[Exception] = [BusError("away"), ZeroDivisionError()]

    def renew(beat: Heartbeat) -> None:
        if failures:
            raise failures.pop(0)
        beats.append(beat)

    def poll() -> str | None:
        if questions:
            raise questions.pop(0)
        return "enough"

    heartbeat = HeartbeatThread(
        renew,
        interval_s=0.01,
        secrets=Secrets({}),
        poll=poll,
        poll_s=0.01,
    )
    heartbeat.start()
    wait_for(lambda: heartbeat.cancelled == "enough" and len(beats) > 1, 10)
    heartbeat.stop()
    assert not heartbeat.lost
