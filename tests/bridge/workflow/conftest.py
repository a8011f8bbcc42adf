"""What the workflow's tests stand on: the bench of the runner's, and both jobs in this process."""

import pytest

from tests.bridge.runner.bench import Bench
from tests.bridge.runner.conftest import bench
from tests.bridge.workflow.desk import Desk

__all__ = ["bench", "desk"]


@pytest.fixture
def desk(bench: Bench) -> Desk:
    """Both jobs in this process."""
    return Desk(bench)
