"""Of several claimers exactly one wins; a holder notices a loss; silence is judged by one's own clock."""

from __future__ import annotations

import threading

import pytest

from bridge.bus.claims import Beat, Claim, Identity, LeaseWatch, claim, read_status, take_over
from bridge.bus.handles import state_of
from bridge.bus.publish import Superseded
from bridge.errors import LeaseLost, PushRejected, RemoteUnreachable
from bridge.protocol import refs
from bridge.protocol.result import Phase, Progress
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


def decline_own_claims(world: World, times: int, *, but_take_them: bool = False) -> None:
    """Have the server decline the bridge's own claim refs so often, and branches never."""
    count = world.root / "declined"
    count.write_text("")
    take = 'git update-ref "$1" "$3"; ' if but_take_them else ""
    world.hook(
        "update",
        f'case "$1" in {refs.CLAIMS}*) if [ "$(wc -c < {count})" -lt {times} ]; then printf x >> {count}; '
        f'{take}echo "not now"; exit 1; fi;; esac',
    )


def claims_of(world: World) -> dict[str, str]:
    found = world.git.ls_remote(world.remote)
    return {ref: held for ref, held in found.items() if ref.startswith((refs.CLAIMS, refs.BRANCH_CLAIMS))}


def test_a_claim_that_the_server_declines_once_goes_where_all_others_go(world: World):
    world.submit()
    [pending] = world.mirror.refresh()
    decline_own_claims(world, 1)
    held = world.claim(pending)
    assert held.ref == refs.claim_ref(pending.nonce)
    assert claim(world.git, world.remote, pending, OTHER) is None
    assert claims_of(world) == {held.ref: held.commit}


def test_a_claim_that_the_server_takes_while_it_says_no_is_ours(world: World):
    world.submit()
    [pending] = world.mirror.refresh()
    decline_own_claims(world, 1, but_take_them=True)
    held = world.claim(pending)
    assert held.attempt == 1
    assert claims_of(world) == {refs.claim_ref(pending.nonce): held.commit}
    held.beat(Beat(Phase.RUNNING, 1.0))


def test_a_heartbeat_that_the_server_takes_while_it_says_no_is_ours(world: World):
    world.submit()
    held = world.claim(world.mirror.refresh()[0])
    decline_own_claims(world, 1, but_take_them=True)
    with pytest.raises(PushRejected):
        held.beat(Beat(Phase.RUNNING, 1.0))
    held.beat(Beat(Phase.RUNNING, 2.0))
    assert claims_of(world) == {held.ref: held.commit}


@pytest.mark.parametrize("where", [refs.CLAIMS, refs.BRANCH_CLAIMS])
def test_a_declined_claim_gives_way_to_one_that_stands_in_either_place(world: World, where: str):
    world.submit()
    [pending] = world.mirror.refresh()
    theirs = world.claim(pending, OTHER)
    world.house.git("update-ref", "-d", theirs.ref, cwd=world.house.remote)
    world.point(where + pending.nonce, theirs.commit)
    decline_own_claims(world, 9)
    assert claim(world.git, world.remote, pending, RUNNER) is None
    assert claims_of(world) == {where + pending.nonce: theirs.commit}


def test_a_claim_on_a_branch_gives_way_to_one_that_came_meanwhile(world: World):
    world.submit()
    [pending] = world.mirror.refresh()
    theirs = world.claim(pending, OTHER)
    own = refs.claim_ref(pending.nonce)
    world.house.git("update-ref", "-d", own, cwd=world.house.remote)
    decline_own_claims(world, 9)

    def come(_: float) -> None:
        assert refs.BRANCH_CLAIMS + pending.nonce in claims_of(world)
        world.point(own, theirs.commit)  # it had looked before ours stood

    assert claim(world.git, world.remote, pending, RUNNER, sleep=come) is None
    assert claims_of(world) == {own: theirs.commit}


@pytest.mark.parametrize("what", ["beats", "publishes"])
def test_of_two_holders_in_two_places_the_one_on_a_branch_stops(world: World, what: str):
    submitted = world.submit()
    [pending] = world.mirror.refresh()
    decline_own_claims(world, 2)
    ours = claim(world.git, world.remote, pending, RUNNER, sleep=lambda _: None)
    assert ours is not None
    assert ours.ref == refs.BRANCH_CLAIMS + pending.nonce
    theirs = world.claim(pending, OTHER)  # it had looked before ours stood
    assert not theirs.is_alone(claims_of(world))
    if what == "publishes":
        with pytest.raises(Superseded):
            world.answer(submitted, held=ours)
    else:
        with pytest.raises(LeaseLost):
            ours.beat(Beat(Phase.RUNNING, 1.0))
    assert theirs.is_alone(claims_of(world))
    theirs.beat(Beat(Phase.RUNNING, 1.0))
    assert claims_of(world) == {theirs.ref: theirs.commit}
    world.answer(submitted, held=theirs)
    assert claims_of(world) == {}


def test_where_only_branches_are_taken_a_claim_on_one_is_renewed_and_answered(world: World):
    world.take_branches_only()
    submitted = world.submit()
    [pending] = world.mirror.refresh()
    held = world.claim(pending)
    assert held.ref == refs.BRANCH_CLAIMS + pending.nonce
    assert claim(world.git, world.remote, pending, OTHER) is None
    held.beat(Beat(Phase.RUNNING, 1.0))
    world.answer(submitted, held=held)
    assert claims_of(world) == {}
