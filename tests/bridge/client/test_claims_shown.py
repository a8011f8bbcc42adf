"""Who says that a request runs: a trusted runner, or nobody in particular."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.claims import claim
from bridge.bus.standing import Standing
from bridge.client import trust
from bridge.client.history import queue
from bridge.client.watch import watch
from bridge.render.outcome import claim_text, status_line
from bridge.render.queue import queue_table, row_json
from bridge.render.tables import console
from tests.worlds import RUNNER, World

SAID = {
    "a trusted runner": (Standing.TRUSTED, "signed by studio"),
    "another runner": (Standing.UNTRUSTED_KEY, "no trusted runner says so"),
    "a runner whose key was revoked": (Standing.REVOKED, "a revoked key"),
    "somebody unsigned": (Standing.UNSIGNED, "unsigned"),
}


def claimed_by(world: World, who: str, trusted: Path) -> str:
    """A request that is claimed; its nonce."""
    key, other = (signing.ensure_key(world.root / name, "runner") for name in ("key", "other"))
    trust.add(trusted, "studio", str(signing.public_key(key)))
    if who == "a runner whose key was revoked":
        trust.ring(trusted).revoke("studio")
    signer = {"somebody unsigned": None, "another runner": other}.get(who, key)
    submitted = world.submit()
    held = claim(
        world.git,
        world.remote,
        world.mirror.refresh()[0],
        RUNNER,
        sign=lambda data: signer and signing.sign(signer, signing.CLAIM_NAMESPACE, data),
    )
    assert held is not None
    return submitted.nonce


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("who", SAID)
def test_where_keys_are_trusted_it_is_said_who_says_that_a_request_runs(world: World, who: str):
    trusted = world.root / "trusted_runners"
    nonce = claimed_by(world, who, trusted)
    standing, words = SAID[who]
    seen = next(watch(world.git, world.remote, nonce, deadline=60, trusted=trusted))
    assert seen.claim is not None
    assert seen.claim.standing is standing
    line = status_line(seen.status, seen.phase, None, claim=seen.claim)
    assert line.endswith(claim_text(seen.claim))
    assert words in line
    [row] = queue(None, world.remote, origin=world.git, now=datetime.now(UTC), trusted=trusted)
    assert row.claim == seen.claim
    assert row_json(row, 0.0)["claim"] == {"standing": standing.value, "signer": seen.claim.signer}
    out = console()
    with out.capture() as captured:
        out.print(queue_table([row], 0.0, 200))
    assert words.split()[0] in captured.get()


def test_a_client_that_trusts_no_key_is_not_told_of_signatures(world: World):
    nonce = claimed_by(world, "somebody unsigned", world.root / "trusted_runners")
    nobody = world.root / "nobody"
    seen = next(watch(world.git, world.remote, nonce, deadline=60, trusted=nobody))
    assert seen.status is not None
    assert seen.claim is None
    [row] = queue(None, world.remote, origin=world.git, now=datetime.now(UTC), trusted=nobody)
    assert row.claim is None
    assert row_json(row, 0.0)["claim"] is None
