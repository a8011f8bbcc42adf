"""What differs between two trees, from their raw bytes. Folders are opened one by one, and only so many.

A tree of a few objects can name more files than any memory holds, so only the first `MOST_FOLDERS` changed
folders are opened; the others come back as themselves, with the mode `FOLDER_MODE`.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bridge.errors import BrokenObject

FOLDER_MODE = "040000"
MOST_FOLDERS = 64

_ROW = {digest: re.compile(rb"([0-7]{5,6}) ([^\0]+)\0(.{%d})" % digest, re.DOTALL) for digest in (20, 32)}
_Rows = dict[bytes, tuple[str, str]]  # name -> (mode, sha)


@dataclass(frozen=True)
class Change:
    """A path that differs between two trees: ``A`` added, ``M`` modified, ``D`` deleted, ``T`` retyped."""

    status: str
    path: str
    mode: str
    sha: str


def between(read: Callable[[str], bytes], old: str | None, new: str) -> list[Change]:
    """What differs between two trees, in the order of their names.

    Args:
        read: Gives the raw bytes of a tree.
        old: A tree's sha; None: nothing.
        new: A tree's sha.

    Raises:
        BrokenObject: A tree is none, or no tree that git would write.
        BusError: A tree cannot be read.
    """
    found: list[Change] = []
    waiting: deque[tuple[Change, str | None]] = deque(_compare(read, old, new, ""))
    opened = 0
    while waiting:
        change, before = waiting.popleft()
        if change.mode != FOLDER_MODE or opened == MOST_FOLDERS:
            found.append(change)
            continue
        opened += 1
        inner = _compare(read, before, change.sha, f"{change.path}/")
        waiting.extend(inner)
        if not inner:  # a new folder without files, or one whose bytes alone differ
            found.append(change)
    return found


def _compare(
    read: Callable[[str], bytes], old: str | None, new: str, inside: str
) -> list[tuple[Change, str | None]]:
    """Rows that differ between two trees, folders closed; with each its old folder's sha, if any."""
    before = {} if old is None else _rows(read(old), len(old) // 2)
    after = _rows(read(new), len(new) // 2)
    found = []
    for name in sorted({name for name, _ in before.items() ^ after.items()}):
        path = inside + os.fsdecode(name)
        was, now = before.get(name), after.get(name)
        folder = was[1] if was is not None and was[0] == FOLDER_MODE else None
        if now is None:
            found.append((Change("D", path, "000000", "0" * len(new)), folder))
        else:
            found.append((Change(_status(was, now), path, *now), folder))
    return found


def _status(was: tuple[str, str] | None, now: tuple[str, str]) -> str:
    if was is None:
        return "A"
    return "M" if was[0][:3] == now[0][:3] else "T"


def _rows(tree: bytes, digest_bytes: int) -> _Rows:
    found = _ROW[digest_bytes].findall(tree)
    rows = {name: (mode.decode().zfill(6), sha.hex()) for mode, name, sha in found}
    whole = sum(len(mode) + len(name) + 2 + digest_bytes for mode, name, _ in found)
    if whole != len(tree) or len(rows) != len(found):
        raise BrokenObject("a tree is broken: it holds something else than rows, or a name twice")
    return rows
