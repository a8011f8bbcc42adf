"""Of several claimers exactly one wins; a holder notices a loss; silence is judged by one's own clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.claims import (
    DEFAULT_LEASE_S,
    MAX_ATTEMPT,
    MAX_LEASE_S,
    Claim,
    Heartbeat,
    RunnerIdentity,
    claim,
    has_expired,
    read_claim,
    read_status,
)
from bridge.bus.publish import Superseded
from bridge.bus.requests import RefValue, Submitted, state_of
from bridge.errors import LeaseLost, PushRejected, RemoteUnreachable
from bridge.protocol import refs
from bridge.protocol.result import STATUS_NAME, STATUS_SIGNATURE_NAME, Phase, Progress, RunStatus
from bridge.signing.trust import TrustLevel
from tests.fixtures.bus import RUNNER, BusFixture
from tests.fixtures.repo import allowed_line
from tests.objects import Objects

OTHER = RunnerIdentity("othermac", "fedcba9876543210", "00000000000000bb")
RUNNING = Heartbeat(Phase.RUNNING, 1.0)
NOWHERE = Path("/nonexistent/known_runners")


def try_claim(
    bus: BusFixture,
    submitted: Submitted,
    identity: RunnerIdentity = RUNNER,
    *,
    on_branch: bool = False,
    **options: object,
) -> Claim | None:
    bus.bring(submitted)
    return claim(
        bus.cache,
        bus.remote,
        nonce=submitted.nonce,
        place=RefValue(submitted.ref, submitted.commit) if on_branch else bus.place(submitted),
        identity=identity,
        **options,  # type: ignore[arg-type]
    )


def claims_of(bus: BusFixture) -> dict[str, str]:
    return bus.git.list_refs(bus.remote, refs.CLAIMS, refs.BRANCH_CLAIMS)


def status_of(bus: BusFixture, held: Claim) -> RunStatus:
    assert not bus.cache.bring({held.ref: held.commit}, [held.ref], depth=1)
    status = read_status(bus.cache, held.commit)
    assert status is not None
    return status


def decline_own_claims(bus: BusFixture, times: int, *, but_take_them: bool = False) -> None:
    """Have the server decline the bridge's own claim refs so often, and branches never."""
    count = bus.root / "declined"
    count.write_text("")
    take = 'git update-ref "$1" "$3"; ' if but_take_them else ""
    bus.hook(
        "update",
        f'case "$1" in {refs.CLAIMS}*) if [ "$(wc -c < {count})" -lt {times} ]; then printf x >> {count}; '
        f'{take}echo "not now"; exit 1; fi;; esac',
    )


def test_of_many_claimers_exactly_one_wins(bus: BusFixture):
    submitted = bus.submit()
    won: list[Claim] = []

    def try_it(number: int) -> None:
        held = try_claim(bus, submitted, RunnerIdentity(f"mac{number}", f"{number:016x}", f"{number:016x}"))
        if held is not None:
            won.append(held)

    threads = [threading.Thread(target=try_it, args=(n,), daemon=True) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    [held] = won
    assert claims_of(bus) == {held.ref: held.commit}
    assert try_claim(bus, submitted) is None, "nor a second time"


def test_heartbeat_is_read_back_and_a_stolen_claim_is_noticed(bus: BusFixture):
    held = bus.claim(bus.submit())
    held.renew(Heartbeat(Phase.RUNNING, 3.0, log_tail=("one", "two\x1b[2J")))
    status = status_of(bus, held)
    assert (status.phase, status.log_tail, status.runner) == (Phase.RUNNING, ("one", "two"), "testmac")
    assert (status.beat, status.attempt) == (1, 1)
    bus.point(held.ref, bus.commit(held.commit, {"x": b"stolen"}))
    with pytest.raises(LeaseLost, match="no longer ours"):
        held.renew(RUNNING)


def test_expired_claim_is_replaced_once(bus: BusFixture):
    submitted = bus.submit()
    first = bus.claim(submitted)
    expired_claim = RefValue(first.ref, first.commit)
    second = try_claim(bus, submitted, OTHER, replaces=expired_claim, attempt=2)
    assert second is not None
    assert status_of(bus, second).attempt == 2
    with pytest.raises(LeaseLost):
        first.renew(RUNNING)
    assert try_claim(bus, submitted, replaces=expired_claim, attempt=2) is None


@pytest.mark.parametrize(("asked", "end"), [(10.0, 10.0), (None, DEFAULT_LEASE_S), (1e9, MAX_LEASE_S)])
def test_lease_is_as_long_as_asked_up_to_the_longest(asked: float | None, end: float):
    assert not has_expired(asked, end - 0.1)
    assert has_expired(asked, end)


def test_request_that_changed_since_it_was_seen_is_not_claimed(bus: BusFixture):
    submitted = bus.submit()
    held = try_claim(bus, submitted)
    assert held is not None
    assert held.commit in claims_of(bus).values()
    bus.answer(submitted, held=held)
    assert not state_of(bus.git.list_refs(bus.remote), submitted.nonce).is_open(submitted.commit)
    assert try_claim(bus, submitted, OTHER) is None
    assert claims_of(bus) == {}


def test_released_claim_can_be_claimed_again(bus: BusFixture):
    submitted = bus.submit()
    first = bus.claim(submitted)
    first.release()
    second = bus.claim(submitted, OTHER)
    first.release()  # another runner's stays
    assert claims_of(bus) == {second.ref: second.commit}


@pytest.mark.slow
def test_claim_that_the_server_has_locked_is_not_lost(bus: BusFixture):
    held = bus.claim(bus.submit())
    lock = bus.repo.remote / f"{held.ref}.lock"
    lock.touch()  # as a push that is under way has it, or one that was cut short
    with pytest.raises(RemoteUnreachable, match="locked"):
        held.renew(RUNNING)
    lock.unlink()
    held.renew(RUNNING)
    assert claims_of(bus) == {held.ref: held.commit}


@pytest.mark.slow
def test_heartbeat_whose_answer_was_lost_does_not_lose_the_lease(
    bus: BusFixture, monkeypatch: pytest.MonkeyPatch
):
    held = bus.claim(bus.submit())
    bus.hook("post-receive", "sleep 3")  # the client's deadline cuts the answer off
    with monkeypatch.context() as patience:
        patience.setattr("bridge.git.repo.SWAP_TIMEOUT_S", 1.0)
        held.renew(RUNNING)
    (bus.repo.remote / "hooks" / "post-receive").unlink()
    held.renew(RUNNING)
    assert claims_of(bus) == {held.ref: held.commit}


def test_claim_held_for_publishing_says_how_long_and_why(bus: BusFixture):
    held = bus.claim(bus.submit())
    held.renew(Heartbeat(Phase.RUNNING, 100.0, Progress(done=1, total=2, step="a"), ("a line",)))
    for _ in range(2):
        held.hold_for_publishing("runner: the server is full")
    status = status_of(bus, held)
    assert (status.phase, status.progress, status.lease_s) == (Phase.PUBLISHING, None, MAX_LEASE_S)
    assert status.elapsed_s >= 100.0
    assert status.log_tail == ("a line", "runner: the server is full")


def test_number_of_attempts_is_bounded(bus: BusFixture):
    assert bus.claim(bus.submit(), attempt=1_000_001).attempt == MAX_ATTEMPT


# Servers that decline --------------------------------------------------------------------------------------


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("takes", [False, True], ids=["declined", "accepted all the same"])
def test_claim_that_the_server_declines_is_one_claim_in_one_place(bus: BusFixture, takes: bool):
    submitted = bus.submit()
    decline_own_claims(bus, 1 if takes else 9, but_take_them=takes)
    if not takes:
        with pytest.raises(PushRejected, match="not now"):
            try_claim(bus, submitted)
    held = try_claim(bus, submitted, on_branch=not takes)
    assert held is not None
    assert held.ref == (refs.CLAIMS + submitted.nonce if takes else refs.BRANCH_CLAIMS + submitted.nonce)
    assert held.attempt == 1
    assert claims_of(bus) == {held.ref: held.commit}
    held.renew(RUNNING)


def test_heartbeat_that_the_server_takes_while_it_says_no_is_ours(bus: BusFixture):
    held = bus.claim(bus.submit())
    decline_own_claims(bus, 1, but_take_them=True)
    held.renew(RUNNING)
    assert claims_of(bus) == {held.ref: held.commit}


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("where", [refs.CLAIMS, refs.BRANCH_CLAIMS])
@pytest.mark.parametrize("on_branch", [False, True])
def test_declined_claim_gives_way_to_one_in_either_place(bus: BusFixture, where: str, on_branch: bool):
    submitted = bus.submit()
    theirs = bus.claim(submitted, OTHER)
    bus.repo.git("update-ref", "-d", theirs.ref, cwd=bus.repo.remote)
    bus.point(where + submitted.nonce, theirs.commit)
    decline_own_claims(bus, 9)
    assert try_claim(bus, submitted, on_branch=on_branch) is None
    assert claims_of(bus) == {where + submitted.nonce: theirs.commit}


@pytest.mark.slow
def test_claim_on_a_branch_is_renewed_and_answered(bus: BusFixture):
    bus.allow_only_branches()
    submitted = bus.submit()
    held = bus.claim(submitted)
    assert held.ref == refs.BRANCH_CLAIMS + submitted.nonce
    assert try_claim(bus, submitted, OTHER, on_branch=True) is None
    held.renew(RUNNING)
    bus.answer(submitted, held=held)
    assert claims_of(bus) == {}


def test_result_of_a_lost_claim_is_superseded(bus: BusFixture):
    submitted = bus.submit()
    held = bus.claim(submitted)
    theirs = try_claim(bus, submitted, OTHER, replaces=RefValue(held.ref, held.commit))
    assert theirs is not None
    with pytest.raises(Superseded):
        bus.answer(submitted, held=held)
    bus.answer(submitted, held=theirs)


# Signatures ------------------------------------------------------------------------------------------------


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return signing.ensure_key(tmp_path / "key", "runner")


def signer(key: Path) -> Callable[[bytes], bytes]:
    return lambda data: signing.sign(key, signing.CLAIM_NAMESPACE, data)


def known(folder: Path, key: Path, name: str = "testmac") -> Path:
    path = folder / "known_runners"
    path.write_text(allowed_line(signing.public_key(key), name, signing.CLAIM_NAMESPACE))
    return path


def level(
    bus: BusFixture, held: Claim, trusted: Path, commit: str | None = None
) -> tuple[TrustLevel, str | None]:
    found = {held.ref: commit or held.commit}
    assert not bus.cache.bring(found, list(found), depth=1)
    record = read_claim(bus.cache, found[held.ref], held.status.nonce, trusted)
    assert record is not None
    return record[1].trust, record[1].signer


def test_claim_and_every_heartbeat_are_signed(bus: BusFixture, key: Path, tmp_path: Path):
    held = bus.claim(bus.submit(), sign=signer(key))
    trusted, fingerprint = known(tmp_path, key), signing.fingerprint(signing.public_key(key).read_text())
    assert level(bus, held, NOWHERE) == (TrustLevel.UNTRUSTED_KEY, fingerprint)
    for renew in (lambda: None, lambda: held.renew(RUNNING), held.hold_for_publishing):
        renew()
        assert level(bus, held, trusted) == (TrustLevel.TRUSTED, "testmac")
    other = bus.manifest().nonce
    assert read_claim(bus.cache, held.commit, other, trusted) is None, "put on another request it is none"


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("what", ["unsigned", "altered", "another namespace", "rubbish"])
def test_claim_whose_signature_fails_counts_as_unsigned(
    bus: BusFixture, key: Path, tmp_path: Path, what: str
):
    held = bus.claim(bus.submit(), sign=signer(key))
    data = held.status.to_bytes()
    signature = {
        "unsigned": None,
        "altered": signing.sign(key, signing.CLAIM_NAMESPACE, data + b" "),
        "another namespace": signing.sign(key, signing.RESULT_NAMESPACE, data),
        "rubbish": b"-----BEGIN SSH SIGNATURE-----\nAAAA\n-----END SSH SIGNATURE-----\n",
    }[what]
    files = {STATUS_NAME: data, STATUS_SIGNATURE_NAME: signature}
    forged = Objects(bus.repo.remote).commit_files(None, files)
    bus.point(held.ref, forged)
    assert level(bus, held, known(tmp_path, key), forged) == (TrustLevel.UNSIGNED, None)
