"""The stage of the fast attacks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.adversary.stage import Stage, open_stage
from tests.houses import build_house


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A runner's queue and admission on a repository with hostile commits."""
    with open_stage(build_house(tmp_path_factory.mktemp("adversary") / "house")) as opened:
        yield opened
