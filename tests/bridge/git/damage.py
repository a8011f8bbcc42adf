"""Ways in which a repository on a disk breaks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path


def empty(folder: Path) -> None:
    for path in list((folder / "objects").rglob("*")):
        if path.is_file():
            path.unlink()


def corrupt(folder: Path) -> None:
    for path in list((folder / "objects").rglob("*")):
        if path.is_file():
            path.chmod(0o644)
            path.write_bytes(b"x" * 30)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no HEAD": lambda folder: (folder / "HEAD").unlink(),
    "no objects folder": lambda folder: shutil.rmtree(folder / "objects"),
    "no objects": empty,
    "broken objects": corrupt,
    "no folder": shutil.rmtree,
    "configuration": lambda folder: (folder / "config").write_text("[broken"),
}
