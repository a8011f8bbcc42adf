"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.houses import House, build_house


@pytest.fixture
def house(tmp_path: Path) -> House:
    """A bare remote, a workload clone, private state and configuration."""
    return build_house(tmp_path / "house")
