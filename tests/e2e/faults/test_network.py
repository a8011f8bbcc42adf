"""The network between a runner and its remote fails for a while."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.e2e.faults import jobs
from tests.e2e.faults.cable import Cable, served
from tests.e2e.faults.scene import Scene
from tests.fixtures.repo import RepoFixture, wait_for

pytestmark = pytest.mark.e2e

LEASE_S = 4.0


@pytest.fixture
def port(repo: RepoFixture) -> Iterator[int]:
    with served(repo) as port:
        yield port


@pytest.fixture
def scene(repo: RepoFixture, port: int) -> Iterator[Scene]:
    with Scene(repo, f"git://127.0.0.1:{port}/{repo.remote.name}") as built:
        yield built


def fail(cable: Cable, how: str) -> None:
    if how == "cut":
        cable.cut()
    else:
        cable.silence()


@pytest.mark.parametrize("how", [pytest.param("cut", marks=pytest.mark.exhaustive), "silent"])
def test_unpushed_result_is_published_when_the_network_is_back(
    repo: RepoFixture, port: int, scene: Scene, how: str
):
    cable = Cable(port, repo.root, "mac1")
    runner = scene.machine(env=cable.env)
    runner.start()
    nonce = scene.ask(1.5)
    scene.started(nonce)
    fail(cable, how)
    wait_for(lambda: jobs.read_ledger(repo).ended[nonce], 20, "the end of the job")
    time.sleep(4)
    assert not scene.is_answered(nonce)
    cable.mend()
    scene.answered(nonce, 60)
    later = scene.ask()
    scene.answered(later, 60)
    results = scene.close()
    cable.close()
    assert (results[nonce].result.attempt, results[nonce].result.verdict.status) == (1, "passed")
    assert jobs.read_ledger(repo).started[nonce] == 1


@pytest.mark.parametrize("how", [pytest.param("cut", marks=pytest.mark.exhaustive), "silent"])
def test_runner_cut_off_past_its_lease_publishes_nothing(
    repo: RepoFixture, port: int, scene: Scene, how: str
):
    first, second = Cable(port, repo.root, "mac1"), Cable(port, repo.root, "mac2")
    lonely = scene.machine("mac1", lease_s=LEASE_S, env=first.env)
    lonely.start()
    nonce = scene.ask(7.0)
    scene.started(nonce)
    other = scene.machine("mac2", lease_s=LEASE_S, env=second.env)
    other.start()
    scene.says(other, "serving ")
    time.sleep(1)
    fail(first, how)
    scene.started(nonce, times=2)
    scene.answered(nonce, 60)
    first.mend()
    later = scene.ask()
    scene.answered(later, 60)
    wait_for(lambda: any(word in lonely.text() for word in ("lost", "not published")), 60, "mac1's insight")
    results = scene.close()
    for cable in (first, second):
        cable.close()
    assert (results[nonce].result.attempt, results[nonce].result.runner.name) == (2, "mac2")
    assert jobs.read_ledger(repo).started[nonce] == 2
