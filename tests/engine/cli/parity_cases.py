"""Cases of ``parity`` and copies of them to spoil, and the command they are given to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cli import run

DATA = Path(__file__).parents[2] / "data" / "dflash"
Arrays = dict[str, Any]


def parity(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    code = run(["parity", "--golden", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def copy(case: str, folder: Path, change: Callable[[Arrays], None] | None = None) -> Path:
    """A case of its own, its reference arrays changed."""
    made = folder / case
    shutil.copytree(DATA / case, made)
    if change is not None:
        with np.load(made / "golden.npz") as stored:
            arrays = dict(stored)
        change(arrays)
        np.savez(made / "golden.npz", **arrays)
    return made


def reconfigure(folder: Path, **changes: Any) -> None:
    """Change fields of a case's config.json, those of ``dflash_config`` there."""
    config = json.loads((folder / "config.json").read_text())
    nested = config["dflash_config"]
    for name, value in changes.items():
        (nested if name in nested else config)[name] = value
    (folder / "config.json").write_text(json.dumps(config))
