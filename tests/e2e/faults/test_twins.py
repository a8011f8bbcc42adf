"""Two runners of one name on one remote."""

from __future__ import annotations

import shutil

import pytest

from tests.e2e.faults.scene import Scene

pytestmark = pytest.mark.e2e

REQUESTS = 16


@pytest.mark.parametrize(
    "copied",
    [
        pytest.param(False, id="another state", marks=pytest.mark.exhaustive),
        pytest.param(True, id="a copy of the state"),
    ],
)
def test_two_runners_of_one_name_answer_each_request_once(scene: Scene, copied: bool):
    """A copied state folder (a restored backup, a cloned machine) has the same id and the same key."""
    first = scene.machine("mac1", label="first")
    first.start()
    scene.answered(scene.ask())
    second = scene.machine("mac1", label="second")
    if copied:
        first.drain()
        assert first.ended(20) == 0
        state = scene.repo.root / "state-second-copied"
        shutil.copytree(first.states[0], state)
        second.states.append(state)
        first.start()
    second.start()
    scene.says(second, "serving ")
    asked = [scene.ask(0.3) for _ in range(REQUESTS)]
    for nonce in asked:
        scene.answered(nonce, 60)
    results = scene.close()
    assert [results[nonce].result.attempt for nonce in asked] == [1] * REQUESTS
    assert all("published as" in machine.text() for machine in scene.machines), "one of them did nothing"


def test_copy_that_starts_during_the_originals_job_lets_it_finish(scene: Scene):
    first = scene.machine("mac1", label="first")
    first.start()
    scene.answered(scene.ask())
    first.drain()
    assert first.ended(20) == 0
    state = scene.repo.root / "state-second-copied"
    shutil.copytree(first.states[0], state)
    first.start()
    nonce = scene.ask(4.0)
    scene.started(nonce)
    scene.machine("mac1", label="second", states=[state]).start()
    scene.answered(nonce)
    result = scene.close()[nonce].result
    assert (result.attempt, result.verdict.status) == (1, "passed")
