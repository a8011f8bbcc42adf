"""A claim and each of its heartbeats are signed; what a signature is worth depends on who reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.claimed import Claimed, read_claim
from bridge.bus.claims import Beat, Claim, claim
from bridge.bus.drafts import MOST_ATTEMPTS, draft
from bridge.bus.handles import Held
from bridge.bus.leases import DEFAULT_LEASE_S, LeaseWatch
from bridge.bus.standing import Standing, Trust
from bridge.errors import LeaseLost
from bridge.protocol import refs
from bridge.protocol.result import STATUS_NAME, STATUS_SIGNATURE_NAME, Phase
from tests.worlds import RUNNER, World

NOWHERE = Trust.by(Path("/nonexistent/known_runners"))


def signer(key: Path) -> Callable[[bytes], bytes]:
    return lambda data: signing.sign(key, signing.CLAIM_NAMESPACE, data)


def known(folder: Path, key: Path, name: str = "testmac") -> Trust:
    path = folder / "known_runners"
    path.write_text(signing.allowed_line(signing.public_key(key), name, signing.CLAIM_NAMESPACE))
    return Trust.by(path)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return signing.ensure_key(tmp_path / "key", "runner")


def signed_claim(world: World, key: Path) -> Claim:
    world.submit()
    [pending] = world.mirror.refresh()
    held = claim(world.git, world.remote, pending, RUNNER, sign=signer(key))
    assert held is not None
    return held


def read(world: World, held: Claim, trusted: Trust, commit: str | None = None) -> Claimed | None:
    world.mirror.refresh()
    return read_claim(world.mirror.git, commit or held.commit, held.status.nonce, trusted)


def test_a_claim_and_every_heartbeat_are_signed_by_the_runner(world: World, key: Path, tmp_path: Path):
    held = signed_claim(world, key)
    trusted = known(tmp_path, key)
    for phase in (Phase.WORKSPACE, Phase.RUNNING):
        found = read(world, held, trusted)
        assert found is not None
        assert (found.signature.standing, found.signature.signer) == (Standing.TRUSTED, "testmac")
        held.beat(Beat(phase, 1.0))
    held.hold("a push that takes its time")
    found = read(world, held, trusted)
    assert found is not None
    assert found.signature.standing is Standing.TRUSTED
    assert found.status.beat == 3


def test_a_claim_of_a_key_that_nobody_listed_is_of_an_unknown_runner(world: World, key: Path):
    found = read(world, signed_claim(world, key), NOWHERE)
    assert found is not None
    public = signing.public_key(key).read_text()
    assert (found.signature.standing, found.signature.signer) == (
        Standing.UNTRUSTED_KEY,
        signing.fingerprint(public),
    )


@pytest.mark.parametrize("what", ["unsigned", "altered", "another namespace", "rubbish"])
def test_a_claim_whose_signature_does_not_hold_is_worth_as_much_as_an_unsigned_one(
    world: World, key: Path, tmp_path: Path, what: str
):
    held = signed_claim(world, key)
    data = held.status.to_bytes()
    signature = {
        "unsigned": None,
        "altered": signing.sign(key, signing.CLAIM_NAMESPACE, data + b" "),
        "another namespace": signing.sign(key, signing.RESULT_NAMESPACE, data),
        "rubbish": b"-----BEGIN SSH SIGNATURE-----\nAAAA\n-----END SSH SIGNATURE-----\n",
    }[what]
    forged = world.commit(held.commit, {STATUS_NAME: data, STATUS_SIGNATURE_NAME: signature})
    world.point(held.ref, forged)
    found = read(world, held, known(tmp_path, key), forged)
    assert found is not None
    assert (found.signature.standing, found.signature.signer) == (Standing.UNSIGNED, None)


def test_a_signed_claim_put_on_another_request_is_none(world: World, key: Path, tmp_path: Path):
    held = signed_claim(world, key)
    world.mirror.refresh()
    other = world.manifest().nonce
    assert read_claim(world.mirror.git, held.commit, other, known(tmp_path, key)) is None


@pytest.mark.parametrize("counts", [False, True], ids=["a squatter", "a runner"])
def test_a_holder_gives_way_only_to_a_claim_that_counts(world: World, key: Path, counts: bool):
    world.submit()
    [pending] = world.mirror.refresh()
    held = claim(
        world.git,
        world.remote,
        pending,
        RUNNER,
        sign=signer(key),
        counts=lambda _git, _commit, _nonce: counts,
    )
    assert held is not None
    world.point(held.ref, world.commit(held.commit, {STATUS_NAME: b"{}", STATUS_SIGNATURE_NAME: None}))
    if counts:
        with pytest.raises(LeaseLost):
            held.beat(Beat(Phase.RUNNING, 1.0))
    else:
        held.beat(Beat(Phase.RUNNING, 1.0))
        assert world.house.git("rev-parse", held.ref, cwd=world.house.remote) == held.commit


def test_a_claim_that_somebody_deleted_is_put_back_while_its_request_waits(world: World, key: Path):
    world.submit()
    [pending] = world.mirror.refresh()
    held = claim(world.git, world.remote, pending, RUNNER, sign=signer(key), counts=lambda *_: False)
    assert held is not None
    world.house.git("update-ref", "-d", held.ref, cwd=world.house.remote)
    held.beat(Beat(Phase.RUNNING, 1.0))
    assert world.house.git("rev-parse", held.ref, cwd=world.house.remote) == held.commit
    for ref in (held.ref, refs.inbox_ref(pending.nonce)):  # as an answer does
        world.house.git("update-ref", "-d", ref, cwd=world.house.remote)
    with pytest.raises(LeaseLost):
        held.beat(Beat(Phase.RUNNING, 2.0))


def test_an_old_heartbeat_that_is_put_back_does_not_renew_a_lease(world: World, key: Path):
    held = signed_claim(world, key)
    beats = []
    for second in range(4):
        beats.append(held.status)
        held.beat(Beat(Phase.RUNNING, float(second)))
    now = [0.0]
    watch = LeaseWatch(lambda: now[0])
    for number, status in enumerate((*beats, held.status)):
        now[0] += 1.0
        assert watch.observe(held.status.nonce, Held(held.ref, f"{number:040x}"), status, signed=True) is None
    for number, status in enumerate([*beats, held.status] * 24):
        now[0] += 1.0
        again = Held(held.ref, f"{number + 100:040x}")
        silent = watch.observe(held.status.nonce, again, status, signed=True)
        assert (silent is not None) == (number + 1 >= DEFAULT_LEASE_S)
    assert silent is not None
    assert (silent.commit, silent.attempt) == (again.commit, 1)
    watch.forget([])
    assert watch.attempts(held.status.nonce) == 0


def test_a_claim_that_was_signed_beforehand_is_the_one_that_is_pushed(
    world: World, key: Path, tmp_path: Path
):
    world.submit()
    [pending] = world.mirror.refresh()
    signed: list[bytes] = []

    def sign(data: bytes) -> bytes:
        signed.append(data)
        return signer(key)(data)

    drafted = draft(pending, RUNNER, lease_s=60.0, attempt=1, sign=sign, beside=True)
    held = claim(world.git, world.remote, pending, RUNNER, sign=sign, drafted=drafted)
    assert held is not None
    assert held.status == drafted.status
    assert signed == [drafted.status.to_bytes()], "once"
    assert drafted.is_made()
    found = read(world, held, known(tmp_path, key))
    assert found is not None
    assert found.signature.standing is Standing.TRUSTED


def test_no_number_of_attempts_that_somebody_makes_up_is_too_large(world: World):
    world.submit()
    [pending] = world.mirror.refresh()
    made = draft(pending, RUNNER, lease_s=60.0, attempt=1_000_001, sign=lambda _: None)
    assert made.status.attempt == MOST_ATTEMPTS
    assert made.signature() is None
