"""Fixtures of the engine's tests. A fast BLAS is loaded with the package, before anything imports mlx."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import engine  # noqa: F401 - before mlx
from engine.blas import fit_threads
from tests.engine import tiny
from tests.engine.refusals import Bench, make_bench

fit_threads(tiny.GEMMA["hidden_size"])  # as for any narrow model; several workers would wait for each other


@pytest.fixture(scope="session")
def gemma() -> Any:
    """A random hybrid-attention model: layers S S F S S F, window 8."""
    return tiny.build()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a drafter that fits it, as folders."""
    root = tmp_path_factory.mktemp("models")
    return tiny.save_target(root / "target"), tiny.save_drafter(root / "drafter")


@pytest.fixture
def bench(
    folders: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Bench:
    """Copies of both folders to spoil, and the command line that must refuse them."""
    return make_bench(folders, tmp_path, capsys, monkeypatch)
