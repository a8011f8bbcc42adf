"""Who says that a request runs: a trusted runner, or nobody in particular."""

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
from tests.worlds import World

SAID = {
    "a trusted runner": (TrustLevel.TRUSTED, "signed by studio"),
    "another runner": (TrustLevel.UNTRUSTED_KEY, "its key is not trusted here"),
    "a runner whose key was revoked": (TrustLevel.REVOKED, "its key was revoked here"),
    "somebody unsigned": (TrustLevel.UNSIGNED, "unsigned"),
}


def claimed_by(world: World, who: str, trusted: Path) -> str:
    """A request that is claimed; its nonce."""
    key, other = (signing.ensure_key(world.root / name, "runner") for name in ("key", "other"))
    trust.pin(trusted, "studio", str(signing.public_key(key)))
    if who == "a runner whose key was revoked":
        trust.runner_keys(trusted).revoke("studio")
    signer = {"somebody unsigned": None, "another runner": other}.get(who, key)
    submitted = world.submit()
    world.claim(submitted, sign=lambda data: signer and signing.sign(signer, signing.CLAIM_NAMESPACE, data))
    return submitted.nonce


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("who", SAID)
def test_where_keys_are_trusted_it_is_said_who_says_that_a_request_runs(world: World, who: str):
    trusted = world.root / "trusted_runners"
    nonce = claimed_by(world, who, trusted)
    level, words = SAID[who]
    seen = next(watch(world.git, world.remote, nonce, deadline=60, trusted=trusted))
    assert seen.claim is not None
    assert seen.claim.trust is level
    line = status_line(seen)
    assert line.endswith(f", {words}")
    [row] = queue(world.cache, now=datetime.now(UTC), trusted=trusted)
    assert row.claim == seen.claim
    assert row_json(row, 0.0)["claim"] == {"standing": level.value, "signer": seen.claim.signer}
    out = console()
    with out.capture() as captured:
        out.print(request_table([row], 0.0))
    assert words.split()[0] in captured.get()


def test_a_client_that_trusts_no_key_is_not_told_of_signatures(world: World):
    nonce = claimed_by(world, "somebody unsigned", world.root / "trusted_runners")
    nobody = world.root / "nobody"
    seen = next(watch(world.git, world.remote, nonce, deadline=60, trusted=nobody))
    assert seen.status is not None
    assert seen.claim is None
    [row] = queue(world.cache, now=datetime.now(UTC), trusted=nobody)
    assert row.claim is None
    assert row_json(row, 0.0)["claim"] is None
