"""What the workflow's tests stand on: the bench of the runner's."""

from tests.bridge.runner.conftest import bench

__all__ = ["bench"]
