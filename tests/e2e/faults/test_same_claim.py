"""A claim pushed twice as the identical object, which git reports as a success both times."""

from __future__ import annotations

import subprocess
import time
from datetime import UTC, datetime

import pytest

from bridge.protocol import refs
from bridge.protocol.manifest import format_time
from bridge.protocol.result import STATUS_NAME, Phase, RunStatus
from tests.e2e.faults import jobs
from tests.e2e.faults.scene import Scene

pytestmark = pytest.mark.e2e

GHOST_LEASE_S = 4.0


def ghost_claim(scene: Scene, nonce: str, commit: str) -> str:
    """A claim commit of a runner that does not exist, in the client's clone."""
    git, folder = scene.repo.git, scene.repo.clone
    status = RunStatus(
        nonce=nonce,
        request_commit=commit,
        runner="ghost",
        runner_id="f" * 16,
        pid=1,
        unique="0" * 32,
        attempt=1,
        beat=0,
        lease_s=GHOST_LEASE_S,
        session="e" * 16,
        updated_at=format_time(datetime.now(UTC)),
        phase=Phase.CLAIMED,
        elapsed_s=0.0,
    )
    blob = git("hash-object", "-w", "--stdin", cwd=folder, input=status.to_bytes().decode())
    tree = git("mktree", cwd=folder, input=f"100644 blob {blob}\t{STATUS_NAME}\n")
    who = ("-c", "user.name=ghost", "-c", "user.email=ghost@example.org")
    return git(*who, "commit-tree", "-m", "claim", tree, cwd=folder)


def push_claim(scene: Scene, nonce: str, claim: str, expected: str = "") -> int:
    """What `git push` of a claim ends with."""
    ref = refs.CLAIMS + nonce
    argv = ["git", "push", "--quiet", f"--force-with-lease={ref}:{expected}", str(scene.repo.remote)]
    return subprocess.run(
        [*argv, f"{claim}:{ref}"], cwd=scene.repo.clone, env=scene.repo.env, capture_output=True
    ).returncode


def test_the_identical_claim_counts_once_and_runs_after_its_lease_only(scene: Scene):
    nonce = scene.ask()
    claim = ghost_claim(scene, nonce, scene.requester.accepted[nonce].submitted.commit)
    assert push_claim(scene, nonce, claim) == 0
    assert push_claim(scene, nonce, claim) == 0, "git refuses what it used to report as done"
    runner = scene.machine()
    runner.start()
    scene.says(runner, "serving ")
    silent_since = time.monotonic()
    while time.monotonic() - silent_since < GHOST_LEASE_S - 1:
        assert push_claim(scene, nonce, claim) == 0
        assert not jobs.read_ledger(scene.repo).started[nonce], "ran in spite of a live claim"
        time.sleep(0.3)
    scene.answered(nonce)
    result = scene.close()[nonce].result
    assert (result.attempt, result.verdict.status, result.runner.name) == (2, "passed", "mac1")


def test_a_claim_of_a_running_job_pushed_again_changes_nothing(scene: Scene):
    runner = scene.machine()
    runner.start()
    nonce = scene.ask(3.0)
    scene.started(nonce)
    ref = refs.CLAIMS + nonce
    again = 0
    while not scene.is_answered(nonce):
        held = scene.repo.git("for-each-ref", "--format=%(objectname)", ref, cwd=scene.repo.remote)
        if held:
            scene.repo.git("fetch", "--quiet", str(scene.repo.remote), held)
            again += push_claim(scene, nonce, held, expected=held) == 0
        time.sleep(0.1)
    assert again > 3
    assert scene.close()[nonce].result.attempt == 1


def test_replayed_older_claim_of_the_holder_ends_in_one_result(scene: Scene):
    runner = scene.machine(lease_s=3.0)
    runner.start()
    nonce = scene.ask(3.0)
    scene.started(nonce)
    ref = refs.CLAIMS + nonce
    old = scene.repo.git("rev-parse", ref, cwd=scene.repo.remote)
    time.sleep(1.5)
    assert scene.repo.git("rev-parse", ref, cwd=scene.repo.remote) != old, "no heartbeat came"
    scene.repo.git("update-ref", ref, old, cwd=scene.repo.remote)
    scene.answered(nonce, 60)
    assert scene.close()[nonce].result.attempt in (1, 2)
