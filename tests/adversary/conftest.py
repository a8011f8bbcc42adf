"""The place of the fast attacks: one repository, one runner's station, nothing pushed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bridge.bus.git import Git
from tests.adversary.attack import Forge
from tests.adversary.stage import Stage, install
from tests.bridge.runner.bench import Bench
from tests.houses import build_house


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A runner's station and a repository with hostile commits."""
    bench = Bench(build_house(tmp_path_factory.mktemp("adversary") / "house"))
    install(bench)
    station = bench.station()
    git = Git(bench.house.remote)
    yield Stage(station, git, Forge(git, station.audience, bench.house.root / "canary"))
    git.close()
