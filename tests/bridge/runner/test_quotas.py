"""A runner keeps the policy's quotas and gives each requester its turn, over a real remote."""

from __future__ import annotations

import pytest

from bridge import signing
from bridge.protocol.manifest import Manifest
from bridge.protocol.result import Reason, Status
from tests.bridge.runner.bench import Bench
from tests.houses import House


@pytest.fixture
def bench(house: House) -> Bench:
    made = Bench(house)
    made.install({"echo": "print('hello from', arg)"})
    return made


def ask_in_turn(bench: Bench, count: int) -> list[Manifest]:
    """Unsigned requests, oldest first."""
    return sorted((bench.ask() for _ in range(count)), key=lambda manifest: manifest.nonce)


def ask_signed(bench: Bench, name: str) -> Manifest:
    key = signing.ensure_key(bench.house.root / "keys" / name, name)
    allowed = signing.allowed_line(signing.public_key(key), name, signing.REQUEST_NAMESPACE)
    (bench.config / "allowed_signers").write_text(allowed)
    manifest = bench.manifest()
    signature = signing.sign(key, signing.REQUEST_NAMESPACE, manifest.to_bytes())
    return bench.ask(signature=signature, **dict(manifest))


def serve(bench: Bench, count: int) -> list[str]:
    """Answer that many requests with one runner; their nonces in the order they were claimed."""
    runner = bench.runner()
    for _ in range(count):
        assert runner.serve(once=True, idle_timeout_s=20) == 1, bench.said
    return [line.partition(":")[0] for line in bench.said if ": claimed" in line]


@pytest.mark.slow
def test_the_newest_beyond_the_quota_are_refused_and_the_others_run(bench: Bench) -> None:
    bench.policy("max_queued_per_requester = 2\n")
    asked = ask_in_turn(bench, 4)
    serve(bench, 4)
    verdicts = [bench.answer(manifest.nonce).result.verdict for manifest in asked]
    assert [verdict.reason for verdict in verdicts] == [Reason.OK, Reason.OK, Reason.QUOTA, Reason.QUOTA]
    assert verdicts[-1].status is Status.REFUSED
    assert "unsigned requests together have at most 2 waiting" in verdicts[-1].message
    assert "max_queued_per_requester" in verdicts[-1].message


@pytest.mark.slow
def test_a_signer_waits_for_one_turn_of_the_others_however_many_they_queue(bench: Bench) -> None:
    crowd = ask_in_turn(bench, 3)
    hers = ask_signed(bench, "ann")
    order = serve(bench, 3)
    assert hers.nonce in order[:2]  # requests of one second have no order
    assert [nonce for nonce in order if nonce != hers.nonce] == [crowd[0].nonce, crowd[1].nonce]
