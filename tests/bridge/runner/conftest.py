"""The bench that a runner's tests work at."""

import pytest

from tests.bridge.runner.bench import Bench
from tests.houses import House


@pytest.fixture
def bench(house: House) -> Bench:
    """A bench with the owner's usual presets."""
    made = Bench(house)
    made.install()
    return made
