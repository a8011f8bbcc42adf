"""Fixtures of the fault scenarios."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.faults.scene import Scene, build_fault_repo
from tests.fixtures.repo import RepoFixture


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RepoFixture]:
    """A repository with the jobs of the fault harness; every process of it is ended afterwards."""
    with build_fault_repo(tmp_path, monkeypatch) as built:
        yield built


@pytest.fixture
def scene(repo: RepoFixture) -> Iterator[Scene]:
    """A scene on the repository's remote, by its path."""
    with Scene(repo) as built:
        yield built
