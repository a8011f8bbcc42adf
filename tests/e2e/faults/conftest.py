"""Fixtures of the fault scenarios."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.faults.scene import Scene, stage
from tests.houses import House


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    """A house with the jobs of the fault harness; every process of it is ended afterwards."""
    with stage(tmp_path, monkeypatch) as built:
        yield built


@pytest.fixture
def scene(house: House) -> Iterator[Scene]:
    """A stage on the house's remote, by its path."""
    with Scene(house) as built:
        yield built
