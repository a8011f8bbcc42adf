"""Who says that a request runs: a trusted runner, or an unknown one."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from bridge import signing
from bridge.client.history import queue
from bridge.client.watch import watch
from bridge.render.outcome import request_table, row_json, status_line
from bridge.render.terminal import console
from bridge.signing import trust
from bridge.signing.trust import TrustLevel
from tests.fixtures.bus import BusFixture

SAID = {
    "a trusted runner": (TrustLevel.TRUSTED, "signed by studio"),
    "another runner": (TrustLevel.UNTRUSTED_KEY, "its key is not trusted here"),
    "a runner whose key was revoked": (TrustLevel.REVOKED, "its key was revoked here"),
    "an unsigned claim": (TrustLevel.UNSIGNED, "unsigned"),
}


def claimed_by(bus: BusFixture, who: str, trusted: Path) -> str:
    """A request that is claimed; its nonce."""
    key, other = (signing.ensure_key(bus.root / name, "runner") for name in ("key", "other"))
    trust.pin(trusted, "studio", str(signing.public_key(key)))
    if who == "a runner whose key was revoked":
        trust.runner_keys(trusted).revoke("studio")
    signer = {"an unsigned claim": None, "another runner": other}.get(who, key)
    submitted = bus.submit()
    bus.claim(submitted, sign=lambda data: signer and signing.sign(signer, signing.CLAIM_NAMESPACE, data))
    return submitted.nonce


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("who", SAID)
def test_claim_signer_is_named_where_keys_are_trusted(bus: BusFixture, who: str):
    trusted = bus.root / "trusted_runners"
    nonce = claimed_by(bus, who, trusted)
    level, words = SAID[who]
    seen = next(watch(bus.git, bus.remote, nonce, deadline=60, trusted=trusted))
    assert seen.claim is not None
    assert seen.claim.trust is level
    line = status_line(seen)
    assert line.endswith(f", {words}")
    [row] = queue(bus.cache, now=datetime.now(UTC), trusted=trusted)
    assert row.claim == seen.claim
    assert row_json(row, 0.0, {})["claim"] == {"standing": level.value, "signer": seen.claim.signer}
    out = console()
    with out.capture() as captured:
        out.print(*request_table([row], 0.0, {}))
    assert words.split()[0] in captured.get()


def test_a_client_that_trusts_no_key_is_not_told_of_signatures(bus: BusFixture):
    nonce = claimed_by(bus, "an unsigned claim", bus.root / "trusted_runners")
    no_keys = bus.root / "no_keys"
    seen = next(watch(bus.git, bus.remote, nonce, deadline=60, trusted=no_keys))
    assert seen.status is not None
    assert seen.claim is None
    [row] = queue(bus.cache, now=datetime.now(UTC), trusted=no_keys)
    assert row.claim is None
    assert row_json(row, 0.0, {})["claim"] is None
