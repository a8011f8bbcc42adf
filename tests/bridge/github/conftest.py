"""A fake server and its API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bridge.github import GitHub
from tests.bridge.github.apis import made
from tests.servers.github import GitHubServer, github_server


@pytest.fixture
def server() -> Iterator[GitHubServer]:
    with github_server() as running:
        yield running


@pytest.fixture
def slept() -> list[float]:
    return []


@pytest.fixture
def github(server: GitHubServer, slept: list[float]) -> GitHub:
    return made(server, slept)
