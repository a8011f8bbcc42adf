"""The fixture of the runner's tests."""

import pytest

from tests.fixtures.repo import RepoFixture
from tests.fixtures.runner import RunnerFixture


@pytest.fixture
def runner(repo: RepoFixture) -> RunnerFixture:
    """A runner fixture with the owner's usual presets."""
    made = RunnerFixture(repo)
    made.install()
    return made
