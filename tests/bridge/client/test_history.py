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
from tests.worlds import World

FAILED = {"verdict": {"status": "failed", "reason": "exit_code"}}


def bus(world: World) -> Remote:
    return Remote(world.remote, world.remote, refs.audience_of(world.remote))


def rows(world: World, now: datetime | None = None) -> list[Row]:
    return queue(world.cache, now=now or datetime.now(UTC))


def past(world: World, limit: int = 20, **wanted: object) -> tuple[list[Row], bool]:
    return history(world.cache, limit=limit, **wanted)  # type: ignore[arg-type]


def test_the_queue_shows_what_waits_and_runs_and_nothing_else(world: World):
    running = world.submit()
    world.claim(running).renew(Heartbeat(Phase.RUNNING, 12.0, Progress(done=1, total=4, step="s\x1b[31mtep")))
    first, second = (
        world.submit(nonce=refs.new_nonce(datetime.now(UTC) + timedelta(seconds=s), b"abcdef"))
        for s in (2, 4)
    )
    world.answer(world.submit())
    world.point(refs.CANCELS + second.nonce, second.commit)
    found = rows(world)
    assert [row.nonce for row in found] == [running.nonce, first.nonce, second.nonce]
    assert [row.phase for row in found] == [Phase.RUNNING, Phase.QUEUED, Phase.QUEUED]
    assert [row.ahead for row in found] == [None, 0, 1]
    assert [row.cancelling for row in found] == [False, False, True]
    assert (found[0].runner, found[0].elapsed_s, found[0].attempt) == ("testmac", 12.0, 1)
    assert found[0].progress == Progress(done=1, total=4, step="step")
    assert abs(found[0].beat_age_s or 0.0) < 60
    assert rows(world) != []  # again, from the cache


@pytest.mark.parametrize("name", ["aaa", "zzz"])
def test_another_branch_of_its_nonce_hides_no_finished_request(world: World, name: str):
    submitted = world.submit()
    world.answer(submitted)
    world.point(f"{refs.BRANCHES}{name}-{submitted.nonce}", submitted.commit)
    [row] = past(world)[0]
    assert (row.nonce, row.preset, row.status) == (submitted.nonce, world.manifest().preset, Status.PASSED)


def test_a_result_whose_claim_or_inbox_entry_was_left_behind_is_not_in_the_queue(world: World):
    done = world.submit()
    held = world.claim(done)
    world.answer(done)
    world.point(refs.CLAIMS + done.nonce, held.commit)
    world.point(refs.INBOX + done.nonce, done.commit)
    assert rows(world) == []


def test_a_claim_that_is_not_renewed_is_silent_once_its_lease_is_over(world: World):
    held = world.claim(world.submit(), lease_s=30.0)
    held.renew(Heartbeat(Phase.RUNNING, 12.0))
    now = datetime.now(UTC)
    [row] = rows(world, now + timedelta(seconds=20))
    assert row.silent_s is None
    [row] = rows(world, now + timedelta(seconds=40))
    assert (row.phase, row.silent_s) == (Phase.RUNNING, row.beat_age_s)
    assert row.silent_s == pytest.approx(40.0, abs=2)


@pytest.fixture
def mixed(world: World) -> tuple[World, list[Submitted]]:
    """Four finished requests, a day apart, the newest first; the older two in the archive."""
    finished = {"finished_at": "2026-03-01T12:00:30Z"}
    done = [
        answered(world, timedelta(days=days), **finished, **(FAILED if days % 2 else {}))
        for days in (10, 11, 30, 31)
    ]
    assert len(pruned(world).archived) == 2
    world.submit(nonce=refs.new_nonce(NOW, b"abcdef"))
    return world, done


def test_history_is_on_branches_and_in_the_archive_alike(mixed: tuple[World, list[Submitted]]):
    world, done = mixed
    found, is_complete = past(world)
    assert [row.nonce for row in found] == [one.nonce for one in done]
    assert [row.archived for row in found] == [False, False, True, True]
    assert [row.status for row in found] == [Status.PASSED, Status.FAILED] * 2
    assert {(row.preset, row.runner, row.elapsed_s) for row in found} == {("probe", "testmac", 30.0)}
    assert is_complete


@pytest.mark.slow
def test_a_request_that_is_archived_and_not_yet_deleted_comes_once(mixed: tuple[World, list[Submitted]]):
    world, done = mixed
    tip = world.answer(world.submit(nonce=done[3].nonce)).commit
    assert tip
    assert [row.nonce for row in past(world)[0]] == [one.nonce for one in done]


@pytest.mark.slow
def test_a_result_that_nobody_can_read_is_shown_without_a_status(world: World):
    submitted = world.submit()
    path = f"{RESULT_ROOT}/{submitted.nonce}/result.json"
    world.point(submitted.ref, world.commit(submitted.commit, {path: b"rubbish"}))
    world.house.git("update-ref", "-d", refs.INBOX + submitted.nonce, cwd=world.house.remote)
    [row] = past(world)[0]
    assert (row.status, row.runner, row.preset) == (None, None, "probe")


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("server", ["plain", "with filters"])
def test_every_handle_of_a_pruned_bus_is_found(world: World, server: str):
    if server != "plain":
        world.house.git("config", "uploadpack.allowFilter", "true", cwd=world.house.remote)
    nonces = many_answered(world, 5)
    pruned(world)
    assert bridge_refs(world) == set()
    assert [row.nonce for row in past(world)[0]] == sorted(nonces, reverse=True)
    for handle in (nonces[0], f"probe-{nonces[1]}", f"mac-bridge/probe-{nonces[2]}", nonces[3][:18]):
        state, answer = look_up(world.git, bus(world), handle, world.root / "state")
        assert state.gone
        assert answer is not None
        assert state.nonce in nonces
    for handle in ("20260301", "probe-20260301", "2026", "", "20270101", "tests-" + nonces[0][:18]):
        with pytest.raises(UnknownHandle):
            look_up(world.git, bus(world), handle, world.root / "state")


def test_a_result_is_found_although_its_branch_was_moved(world: World):
    submitted = world.submit(nonce=refs.new_nonce(NOW - timedelta(days=31), b"abcdef"))
    world.point(submitted.ref, world.commit(submitted.commit, {"README.md": b"mine now"}))
    world.answer(submitted)
    assert [left.nonce for left in pruned(world).left] == [submitted.nonce]
    state, answer = look_up(world.git, bus(world), submitted.nonce, world.root / "state")
    assert state.branch is not None
    assert answer is not None
    assert answer.ref == refs.RESULTS + submitted.nonce
