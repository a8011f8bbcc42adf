"""Where the commands of these tests are typed."""

import pytest

from tests.worlds import World


@pytest.fixture
def here(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world whose clone is the working directory."""
    monkeypatch.chdir(world.house.clone)
    return world
