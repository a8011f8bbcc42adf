"""Where the commands of these tests are typed."""

import pytest

from tests.fixtures.bus import BusFixture


@pytest.fixture
def here(bus: BusFixture, monkeypatch: pytest.MonkeyPatch) -> BusFixture:
    """A bus whose clone is the working directory."""
    monkeypatch.chdir(bus.repo.clone)
    return bus
