"""A fake GitHub server with its API, and both jobs of a workflow run."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from bridge.github.api import GitHub
from tests.bridge.github.apis import api
from tests.bridge.github.jobs import WorkflowJobs
from tests.bridge.runner.conftest import runner
from tests.fixtures.runner import RunnerFixture
from tests.servers.github import GitHubServer, github_server

__all__ = ["github", "jobs", "runner", "server"]


@pytest.fixture
def server() -> Iterator[GitHubServer]:
    with github_server() as running:
        yield running


@pytest.fixture
def github(server: GitHubServer) -> GitHub:
    return api(server)


@pytest.fixture
def jobs(runner: RunnerFixture) -> Iterator[WorkflowJobs]:
    """Both jobs in this process."""
    made, logger = WorkflowJobs(runner), logging.getLogger("bridge")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(made)
    yield made
    logger.removeHandler(made)
    logger.setLevel(level)
