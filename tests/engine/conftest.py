"""Fixtures of the engine's tests. A fast BLAS is loaded with the package, before anything imports mlx.

What imports mlx is imported by the fixtures: xdist's controller reads this file, too, and runs no test.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import engine  # noqa: F401 - before mlx

if TYPE_CHECKING:
    from tests.engine.refusals import Bench


@pytest.fixture(scope="session", autouse=True)
def threads() -> None:
    """As for any narrow model; several workers would wait for each other."""
    from engine.device import fit_threads
    from tests.engine import tiny

    fit_threads(tiny.GEMMA["hidden_size"])


@pytest.fixture(scope="session")
def gemma() -> Any:
    """A random hybrid-attention model: layers S S F S S F, window 8."""
    from tests.engine import tiny

    return tiny.build()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a drafter that fits it, as folders."""
    from tests.engine import tiny

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
    from tests.engine.refusals import make_bench

    return make_bench(folders, tmp_path, capsys, monkeypatch)
