"""Of several claimers exactly one wins; a holder notices a loss; silence is judged by one's own clock."""

from __future__ import annotations

import threading

import pytest

from bridge.bus.claims import Beat, Claim, Identity, LeaseWatch, claim, read_status, take_over
from bridge.bus.handles import state_of
from bridge.errors import LeaseLost, RemoteUnreachable
from bridge.result import Phase, Progress
from tests.worlds import RUNNER, World

OTHER = Identity("othermac", "fedcba9876543210", "00000000000000bb")


def test_of_many_claimers_exactly_one_wins(world: World):
    world.submit()
    [pending] = world.mirror.refresh()
    won: list[Claim] = []

    def try_it(number: int) -> None:
        held = claim(
            world.git, world.remote, pending, Identity(f"mac{number}", f"{number:016x}", f"{number:016x}")
        )
        if held is not None:
            won.append(held)

    threads = [threading.Thread(target=try_it, args=(n,), daemon=True) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(won) == 1
    found = world.git.ls_remote(world.remote)
    assert state_of(found, pending.nonce).claim is not None


def test_the_same_runner_cannot_claim_twice(world: World):
    world.submit()
    [pending] = world.mirror.refresh()
    assert claim(world.git, world.remote, pending, RUNNER) is not None
    assert claim(world.git, world.remote, pending, RUNNER) is None


def test_a_heartbeat_is_read_back_and_a_stolen_claim_is_noticed(world: World):
    submitted = world.submit()
    [pending] = world.mirror.refresh()
    held = world.claim(pending)
    held.beat(Beat(Phase.RUNNING, 3.0, log_tail=("one", "two")))
    world.mirror.refresh()
    seen = world.mirror.claims()[submitted.nonce]
    status = read_status(world.mirror.git, seen.commit)
    assert status is not None
    assert (status.phase, status.log_tail, status.runner) == (Phase.RUNNING, ("one", "two"), "testmac")
    world.point(seen.ref, world.commit(seen.commit, {"x": b"stolen"}))
    with pytest.raises(LeaseLost):
        held.beat(Beat(Phase.RUNNING, 4.0))


def test_a_silent_claim_is_taken_over_once_its_lease_has_passed(world: World):
    submitted = world.submit()
    [pending] = world.mirror.refresh()
    first = world.claim(pending)
    world.mirror.refresh()
    seen = world.mirror.claims()[submitted.nonce]
    status = read_status(world.mirror.git, seen.commit)
    now = [1000.0]
    watch = LeaseWatch(lambda: now[0])
    assert watch.observe(submitted.nonce, seen, status) is None
    now[0] += 119
    assert watch.observe(submitted.nonce, seen, status) is None
    now[0] += 2
    silent = watch.observe(submitted.nonce, seen, status)
    assert silent is not None
    second = take_over(world.mirror.git, world.remote, pending, OTHER, silent=silent)
    assert second is not None
    assert second.attempt == 2
    with pytest.raises(LeaseLost):
        first.beat(Beat(Phase.RUNNING, 1.0))
    assert take_over(world.mirror.git, world.remote, pending, RUNNER, silent=silent) is None


def test_a_released_claim_can_be_claimed_again(world: World):
    world.submit()
    [pending] = world.mirror.refresh()
    world.claim(pending).release()
    assert claim(world.git, world.remote, pending, OTHER) is not None


def test_an_answered_request_is_not_open_to_a_late_claimer(world: World):
    submitted = world.submit()
    [pending] = world.mirror.refresh()
    assert state_of(world.git.ls_remote(world.remote), pending.nonce).is_open(pending.commit)
    world.answer(submitted, held=world.claim(pending))
    assert not state_of(world.git.ls_remote(world.remote), pending.nonce).is_open(pending.commit)


def test_a_claim_that_the_server_has_locked_for_a_moment_is_not_lost(world: World):
    world.submit()
    held = world.claim(world.mirror.refresh()[0])
    lock = world.house.remote / f"{held.ref}.lock"
    lock.touch()  # as a push that is under way has it, or one that was cut short
    with pytest.raises(RemoteUnreachable, match="locked"):
        held.beat(Beat(Phase.RUNNING, 1.0))
    lock.unlink()
    held.beat(Beat(Phase.RUNNING, 2.0))
    assert world.house.git("rev-parse", held.ref, cwd=world.house.remote) == held.commit


def test_a_held_claim_says_how_long_it_has_run_and_why_it_waits(world: World):
    world.submit()
    held = world.claim(world.mirror.refresh()[0])
    held.beat(Beat(Phase.RUNNING, 100.0, Progress(done=1, total=2, step="a"), ("a line",)))
    for _ in range(2):
        held.hold("runner: the server is full")
    world.mirror.refresh()
    status = read_status(world.mirror.git, held.commit)
    assert status is not None
    assert (status.phase, status.progress) == (Phase.PUBLISHING, None)
    assert 100.0 <= status.elapsed_s < 160.0
    assert status.log_tail == ("a line", "runner: the server is full")
