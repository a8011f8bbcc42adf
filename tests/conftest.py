"""Fixtures shared by all tests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.houses import House, build_house
from tests.worlds import World, make_world


@pytest.hookimpl(tryfirst=True)  # before the marks select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test marked ``sampled(n)``, let one in n be fast and the others slow."""
    seen: Counter[str] = Counter()
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1


@pytest.fixture
def house(tmp_path: Path) -> House:
    """A bare remote, a workload clone, private state and configuration."""
    return build_house(tmp_path / "house")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A bus on real repositories, driven call by call."""
    return make_world(tmp_path, monkeypatch)
