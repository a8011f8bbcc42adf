"""The two published models of `make real`, and HumanEval's problems."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import engine  # noqa: F401 - before mlx
from tests.real.models import NAMES


@pytest.fixture(scope="session")
def real_folder() -> Path:
    """What `scripts/install_real_models.sh` filled; a test without it fails, it is not skipped."""
    folder = Path(os.environ.get("KAKEYA_REAL", "/nowhere"))
    missing = [name for name in NAMES if not (folder / "kakeya-models" / name / "config.json").is_file()]
    if missing:
        pytest.fail(f"{folder} lacks {', '.join(missing)}; run these tests with: make real")
    return folder


@pytest.fixture(autouse=True)
def home(real_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models have their names in this home folder."""
    monkeypatch.setenv("HOME", str(real_folder))
