"""The lists show everything that waits, runs and ran, wherever it is, and judge none of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from bridge.bus.claims import Heartbeat
from bridge.bus.requests import Submitted
from bridge.client.fetch import look_up
from bridge.client.history import Row, history, queue
from bridge.client.remotes import Remote
from bridge.errors import UnknownHandle
from bridge.protocol import refs
from bridge.protocol.result import RESULT_ROOT, Phase, Progress, Status
from tests.bridge.bus.archives import NOW, answered, bridge_refs, many_answered, pruned
from tests.fixtures.bus import BusFixture

FAILED = {"verdict": {"status": "failed", "reason": "exit_code"}}


def remote_of(bus: BusFixture) -> Remote:
    return Remote(bus.remote, bus.remote, refs.audience_of(bus.remote))


def rows(bus: BusFixture, now: datetime | None = None) -> list[Row]:
    return queue(bus.cache, now=now or datetime.now(UTC))


def past(bus: BusFixture, limit: int = 20, **wanted: object) -> tuple[list[Row], bool]:
    return history(bus.cache, limit=limit, **wanted)  # type: ignore[arg-type]


def test_the_queue_shows_what_waits_and_runs_and_nothing_else(bus: BusFixture):
    running = bus.submit()
    bus.claim(running).renew(Heartbeat(Phase.RUNNING, 12.0, Progress(done=1, total=4, step="s\x1b[31mtep")))
    first, second = (
        bus.submit(nonce=refs.new_nonce(datetime.now(UTC) + timedelta(seconds=s), b"abcdef")) for s in (2, 4)
    )
    bus.answer(bus.submit())
    bus.point(refs.CANCELS + second.nonce, second.commit)
    found = rows(bus)
    assert [row.nonce for row in found] == [running.nonce, first.nonce, second.nonce]
    assert [row.phase for row in found] == [Phase.RUNNING, Phase.QUEUED, Phase.QUEUED]
    assert [row.ahead for row in found] == [None, 0, 1]
    assert [row.cancelling for row in found] == [False, False, True]
    assert (found[0].runner, found[0].elapsed_s, found[0].attempt) == ("testmac", 12.0, 1)
    assert found[0].progress == Progress(done=1, total=4, step="step")
    assert abs(found[0].beat_age_s or 0.0) < 60
    assert rows(bus) != []  # again, from the cache


@pytest.mark.parametrize("name", ["aaa", "zzz"])
def test_another_branch_of_its_nonce_hides_no_finished_request(bus: BusFixture, name: str):
    submitted = bus.submit()
    bus.answer(submitted)
    bus.point(f"{refs.BRANCHES}{name}-{submitted.nonce}", submitted.commit)
    [row] = past(bus)[0]
    assert (row.nonce, row.preset, row.status) == (submitted.nonce, bus.manifest().preset, Status.PASSED)


def test_answered_request_with_leftover_refs_is_not_in_the_queue(bus: BusFixture):
    done = bus.submit()
    held = bus.claim(done)
    bus.answer(done)
    bus.point(refs.CLAIMS + done.nonce, held.commit)
    bus.point(refs.INBOX + done.nonce, done.commit)
    assert rows(bus) == []


def test_a_claim_that_is_not_renewed_is_silent_once_its_lease_is_over(bus: BusFixture):
    held = bus.claim(bus.submit(), lease_s=30.0)
    held.renew(Heartbeat(Phase.RUNNING, 12.0))
    now = datetime.now(UTC)
    [row] = rows(bus, now + timedelta(seconds=20))
    assert row.silent_s is None
    [row] = rows(bus, now + timedelta(seconds=40))
    assert (row.phase, row.silent_s) == (Phase.RUNNING, row.beat_age_s)
    assert row.silent_s == pytest.approx(40.0, abs=2)


@pytest.fixture
def mixed(bus: BusFixture) -> tuple[BusFixture, list[Submitted]]:
    """Four finished requests, a day apart, the newest first; the older two in the archive."""
    finished = {"finished_at": "2026-03-01T12:00:30Z"}
    done = [
        answered(bus, timedelta(days=days), **finished, **(FAILED if days % 2 else {}))
        for days in (10, 11, 30, 31)
    ]
    assert len(pruned(bus).archived) == 2
    bus.submit(nonce=refs.new_nonce(NOW, b"abcdef"))
    return bus, done


@pytest.mark.slow
def test_history_is_on_branches_and_in_the_archive_alike(mixed: tuple[BusFixture, list[Submitted]]):
    bus, done = mixed
    found, is_complete = past(bus)
    assert [row.nonce for row in found] == [one.nonce for one in done]
    assert [row.archived for row in found] == [False, False, True, True]
    assert [row.status for row in found] == [Status.PASSED, Status.FAILED] * 2
    assert {(row.preset, row.runner, row.elapsed_s) for row in found} == {("probe", "testmac", 30.0)}
    assert is_complete


@pytest.mark.slow
def test_a_request_that_is_archived_and_not_yet_deleted_comes_once(mixed: tuple[BusFixture, list[Submitted]]):
    bus, done = mixed
    tip = bus.answer(bus.submit(nonce=done[3].nonce)).commit
    assert tip
    assert [row.nonce for row in past(bus)[0]] == [one.nonce for one in done]


@pytest.mark.slow
def test_unreadable_result_is_shown_without_a_status(bus: BusFixture):
    submitted = bus.submit()
    path = f"{RESULT_ROOT}/{submitted.nonce}/result.json"
    bus.point(submitted.ref, bus.commit(submitted.commit, {path: b"rubbish"}))
    bus.repo.git("update-ref", "-d", refs.INBOX + submitted.nonce, cwd=bus.repo.remote)
    [row] = past(bus)[0]
    assert (row.status, row.runner, row.preset) == (None, None, "probe")


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("server", ["plain", "with filters"])
def test_every_handle_of_a_pruned_bus_is_found(bus: BusFixture, server: str):
    if server != "plain":
        bus.repo.git("config", "uploadpack.allowFilter", "true", cwd=bus.repo.remote)
    nonces = many_answered(bus, 5)
    pruned(bus)
    assert bridge_refs(bus) == set()
    assert [row.nonce for row in past(bus)[0]] == sorted(nonces, reverse=True)
    for handle in (nonces[0], f"probe-{nonces[1]}", f"mac-bridge/probe-{nonces[2]}", nonces[3][:18]):
        state, answer = look_up(bus.git, remote_of(bus), handle, bus.root / "state")
        assert state.gone
        assert answer is not None
        assert state.nonce in nonces
    for handle in ("20260301", "probe-20260301", "2026", "", "20270101", "tests-" + nonces[0][:18]):
        with pytest.raises(UnknownHandle):
            look_up(bus.git, remote_of(bus), handle, bus.root / "state")


def test_a_result_is_found_although_its_branch_was_moved(bus: BusFixture):
    submitted = bus.submit(nonce=refs.new_nonce(NOW - timedelta(days=31), b"abcdef"))
    bus.point(submitted.ref, bus.commit(submitted.commit, {"README.md": b"mine now"}))
    bus.answer(submitted)
    assert [left.nonce for left in pruned(bus).left] == [submitted.nonce]
    state, answer = look_up(bus.git, remote_of(bus), submitted.nonce, bus.root / "state")
    assert state.branch is not None
    assert answer is not None
    assert answer.ref == refs.RESULTS + submitted.nonce
