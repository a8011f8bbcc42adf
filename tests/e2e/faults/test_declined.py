"""A server that now and then declines a claim among the bridge's own refs, for no reason anybody sees."""

from __future__ import annotations

import pytest

from bridge.protocol import refs
from tests.e2e.faults.scene import Scene

pytestmark = pytest.mark.e2e

REQUESTS = 16


@pytest.mark.parametrize(
    "of_256",
    [pytest.param(80, id="a third", marks=pytest.mark.exhaustive), pytest.param(160, id="most")],
)
def test_no_request_runs_twice_where_claims_are_declined_by_chance(scene: Scene, of_256: int):
    hook = scene.repo.remote / "hooks" / "update"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(
        f'#!/bin/sh\ncase "$2$1" in 0000000000000000000000000000000000000000{refs.CLAIMS}*)\n'
        f'if [ "$(od -An -N1 -tu1 /dev/urandom)" -lt {of_256} ]; then echo not now; exit 1; fi;; esac\n'
    )
    hook.chmod(0o755)
    for name in ("mac1", "mac2", "mac3"):
        scene.machine(name).start()
    asked = [scene.ask(0.3) for _ in range(REQUESTS)]
    for nonce in asked:
        scene.answered(nonce, 90)
    results = scene.close()
    assert [results[nonce].result.attempt for nonce in asked] == [1] * REQUESTS
