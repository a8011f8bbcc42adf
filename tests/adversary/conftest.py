"""The dry runner of the fast attacks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.adversary.dry_runner import DryRunner, open_dry_runner
from tests.fixtures.repo import build_repo


@pytest.fixture(scope="session")
def dry_runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DryRunner]:
    """A runner's queue and admission on a repository with hostile commits."""
    with open_dry_runner(build_repo(tmp_path_factory.mktemp("adversary") / "repo")) as opened:
        yield opened
