"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.houses import House, build_house
from tests.worlds import World, make_world


@pytest.fixture
def house(tmp_path: Path) -> House:
    """A bare remote, a workload clone, private state and configuration."""
    return build_house(tmp_path / "house")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A bus on real repositories, driven call by call."""
    return make_world(tmp_path, monkeypatch)
