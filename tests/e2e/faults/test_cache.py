"""A runner's cache of the remote is damaged while it runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.faults.scene import Scene
from tests.fixtures.repo import wait_for

pytestmark = pytest.mark.e2e

GARBAGE = b"\0damaged\xff" * 50


def packs(cache: Path) -> None:
    """Overwrite a part of every pack, index and loose object."""
    for path in [*cache.glob("objects/pack/*"), *cache.glob("objects/??/*")]:
        path.chmod(0o644)
        with path.open("r+b") as handle:
            handle.seek(max(0, path.stat().st_size // 3))
            handle.write(GARBAGE)


def no_objects(cache: Path) -> None:
    """Remove every object; the refs stay."""
    for path in [*cache.glob("objects/pack/*"), *cache.glob("objects/??/*")]:
        path.unlink()


def head(cache: Path) -> None:
    (cache / "HEAD").write_bytes(GARBAGE)


def config(cache: Path) -> None:
    (cache / "config").write_bytes(GARBAGE)


def settings(cache: Path) -> None:
    """A setting that git would obey."""
    with (cache / "config").open("a") as handle:
        handle.write("[core]\n\tsshCommand = /bin/false\n")


def refs(cache: Path) -> None:
    for path in [cache / "packed-refs", *(cache / "refs").rglob("*")]:
        if path.is_file():
            path.write_bytes(GARBAGE)


def shallow(cache: Path) -> None:
    (cache / "shallow").write_bytes(GARBAGE)


def locks(cache: Path) -> None:
    """What a git that was killed leaves."""
    for name in ("packed-refs.lock", "shallow.lock", "config.lock", "HEAD.lock"):
        (cache / name).touch()


def gone(cache: Path) -> None:
    """Another name: as if it had been deleted."""
    cache.rename(cache.with_name(f"away-{os.urandom(4).hex()}"))


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


def cache_of(scene: Scene) -> Path:
    [cache] = scene.machines[0].states[0].glob("runner/mac1/remote-*.git")
    return cache


def keeps_something(scene: Scene) -> bool:
    return bool(scene.repo.git("for-each-ref", "refs/kept/", cwd=cache_of(scene)))


@pytest.mark.sampled(0, 3)  # single looks and pushes are tried with each in the runner's own tests
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_cache_is_rebuilt_and_costs_no_request(scene: Scene, damage: Callable[[Path], None]):
    runner = scene.machine()
    runner.start()
    scene.answered(scene.ask())
    damage(cache_of(scene))
    asked = [scene.ask() for _ in range(3)]
    for nonce in asked:
        scene.answered(nonce)
    results = scene.close()
    assert [results[nonce].result.attempt for nonce in asked] == [1, 1, 1]


def test_rebuilding_the_cache_is_logged(scene: Scene):
    runner = scene.machine()
    runner.start()
    scene.answered(scene.ask())
    # A cache that keeps nothing yet is whole without any object.
    wait_for(lambda: keeps_something(scene), 20, "a workload that the cache keeps")
    config(cache_of(scene))
    scene.answered(scene.ask())
    scene.says(runner, "is damaged, fetching again")
    scene.close()
