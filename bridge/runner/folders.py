"""Removes what a job left, whatever that is: folders without permissions, names a thousand folders deep.

Standard removal recurses and follows names; a job can make a tree deeper than any stack and longer than any
path. Here every folder is first moved up to the top, so no name is ever longer than two parts below it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path


def remove_tree(top: Path) -> bool:
    """Remove a folder and everything in it, or a file; links are removed, not followed. Never raises.

    Returns:
        Whether nothing is left.
    """
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR(os.lstat(top).st_mode):
            os.unlink(top)
            return True
        numbers = iter(range(1 << 62))
        while _sweep(top, numbers):
            pass
        os.rmdir(top)
    return not os.path.lexists(top)


def _sweep(top: Path, numbers: Iterator[int]) -> bool:
    """Empty the folders directly below `top`, moving theirs up beside them; whether anything was removed."""
    progress = False
    _open_up(top)
    for entry in list(os.scandir(top)):
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                _open_up(entry.path)
                for inner in list(os.scandir(entry.path)):
                    if inner.is_dir(follow_symlinks=False):
                        _open_up(inner.path)  # moving a folder writes into it
                        os.rename(inner.path, _free(top, numbers))
                    else:
                        os.unlink(inner.path)
                os.rmdir(entry.path)
            else:
                os.unlink(entry.path)
            progress = True
    return progress


def _free(top: Path, numbers: Iterator[int]) -> str:
    """A name below `top` that nothing has."""
    return next(name for number in numbers if not os.path.lexists(name := f"{top}/{number}"))


def _open_up(folder: str | Path) -> None:
    with contextlib.suppress(OSError):
        os.chmod(folder, 0o700)
