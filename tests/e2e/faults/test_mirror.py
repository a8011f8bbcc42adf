"""A runner's mirror of the remote is damaged while it runs."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.faults.scene import Scene
from tests.houses import wait_for

pytestmark = pytest.mark.e2e

GARBAGE = b"\0damaged\xff" * 50


def packs(mirror: Path) -> None:
    """Overwrite a part of every pack, index and loose object."""
    for path in [*mirror.glob("objects/pack/*"), *mirror.glob("objects/??/*")]:
        path.chmod(0o644)
        with path.open("r+b") as handle:
            handle.seek(max(0, path.stat().st_size // 3))
            handle.write(GARBAGE)


def no_objects(mirror: Path) -> None:
    """Remove every object; the refs stay."""
    for path in [*mirror.glob("objects/pack/*"), *mirror.glob("objects/??/*")]:
        path.unlink()


def head(mirror: Path) -> None:
    (mirror / "HEAD").write_bytes(GARBAGE)


def config(mirror: Path) -> None:
    (mirror / "config").write_bytes(GARBAGE)


def settings(mirror: Path) -> None:
    """A setting that git would obey."""
    with (mirror / "config").open("a") as handle:
        handle.write("[core]\n\tsshCommand = /bin/false\n")


def refs(mirror: Path) -> None:
    for path in [mirror / "packed-refs", *(mirror / "refs").rglob("*")]:
        if path.is_file():
            path.write_bytes(GARBAGE)


def shallow(mirror: Path) -> None:
    (mirror / "shallow").write_bytes(GARBAGE)


def locks(mirror: Path) -> None:
    """What a git that was killed leaves."""
    for name in ("packed-refs.lock", "shallow.lock", "config.lock", "HEAD.lock"):
        (mirror / name).touch()


def gone(mirror: Path) -> None:
    """Another name: as if somebody tidied up."""
    mirror.rename(mirror.with_name(f"away-{os.urandom(4).hex()}"))


DAMAGES: tuple[Callable[[Path], None], ...] = (
    packs,
    no_objects,
    head,
    config,
    settings,
    refs,
    shallow,
    locks,
    gone,
)


def mirror_of(scene: Scene) -> Path:
    [mirror] = scene.machines[0].states[0].glob("runner/mac1/mirror-*.git")
    return mirror


def keeps_something(scene: Scene) -> bool:
    return bool(scene.house.git("for-each-ref", "refs/kept/", cwd=mirror_of(scene)))


@pytest.mark.sampled(0, 3)  # single looks and pushes are tried with each in the runner's own tests
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_mirror_is_made_anew_and_costs_no_request(scene: Scene, damage: Callable[[Path], None]):
    runner = scene.machine()
    runner.start()
    scene.answered(scene.ask())
    damage(mirror_of(scene))
    asked = [scene.ask() for _ in range(3)]
    for nonce in asked:
        scene.answered(nonce)
    results = scene.close()
    assert [results[nonce].result.attempt for nonce in asked] == [1, 1, 1]


@pytest.mark.parametrize("damage", [refs, config], ids=lambda damage: damage.__name__)
def test_a_mirror_made_anew_is_said(scene: Scene, damage: Callable[[Path], None]):
    runner = scene.machine()
    runner.start()
    scene.answered(scene.ask())
    # A mirror that holds on to nothing yet is whole without any object.
    wait_for(lambda: keeps_something(scene), 20, "a workload that the mirror keeps")
    damage(mirror_of(scene))
    scene.answered(scene.ask())
    scene.says(runner, "made again")
    scene.close()


@pytest.mark.exhaustive  # each damage by itself is tried above
@pytest.mark.parametrize("seed", [1, 2])
def test_damage_of_every_kind_while_jobs_run_and_requests_come(scene: Scene, seed: int):
    chance = random.Random(seed)  # noqa: S311 - the same seed must give the same damage
    runner = scene.machine(lease_s=10)
    runner.start()
    asked = [scene.ask()]
    scene.answered(asked[0])
    for damage in chance.sample(DAMAGES, len(DAMAGES)):
        asked += [scene.ask(round(chance.uniform(0, 0.4), 2)) for _ in range(2)]
        if chance.random() < 0.5:
            scene.started(asked[-1])
        damage(mirror_of(scene))
    for nonce in asked:
        scene.answered(nonce, 60)
    scene.close()


def test_a_scan_that_was_cut_short_between_fetching_and_judging_makes_no_request_of_a_result(scene: Scene):
    """Killed after a scan fetched the branches and before it dropped the answered ones."""
    runner = scene.machine()
    runner.start()
    nonce = scene.ask()
    scene.answered(nonce)
    runner.kill()
    branch = scene.desk.accepted[nonce].submitted.ref
    spec = f"+{branch}:refs/scanned/{branch.removeprefix('refs/heads/')}"
    scene.house.git("fetch", "--quiet", "--depth=2", str(scene.house.remote), spec, cwd=mirror_of(scene))
    runner.start()
    later = scene.ask()
    scene.answered(later)
    assert len(scene.close()) == 2
