"""Git objects as bytes: blobs, trees and commits, their names, and writing them into an object store.

What a push carries is written here without a process for each object. The format is git's own (loose objects,
deflated); nothing here reads a repository, and nothing checks whether what an object names is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from bridge.errors import BrokenObject

IDENTITY = "kakeya-mac <kakeya-mac@localhost>"

_FOLDER = "040000"
_COMMIT = {
    digits: re.compile(
        rb"tree (?P<tree>[0-9a-f]{%d})\n(?P<parents>(?:parent [0-9a-f]{%d}\n)*)(?!parent )" % (digits, digits)
    )
    for digits in (40, 64)
}
_LEVEL = 1


@dataclass(frozen=True)
class Entry:
    """One row of a tree: mode as git writes it (``100644``), ``blob`` / ``tree`` / ``commit``, sha, name."""

    mode: str
    kind: str
    sha: str
    name: str


@dataclass(frozen=True)
class Commit:
    """A commit as git stores it."""

    sha: str
    tree: str
    parents: tuple[str, ...]
    message: str


@dataclass(frozen=True)
class Store:
    """Where a repository keeps loose objects, and the hash that names them: ``sha1`` or ``sha256``."""

    folder: Path
    algorithm: str

    def pack_guard(self, limit_bytes: int) -> Callable[[], str | None]:
        """What objects to packs that bring more bytes than a limit, those being written included."""
        packs = self.folder / "pack"
        before = set(packs.glob("*"))

        def too_much() -> str | None:
            size = 0
            for file in set(packs.glob("*")) - before:
                with contextlib.suppress(FileNotFoundError):
                    size += file.stat().st_size
            return f"the remote sends more than {limit_bytes} bytes" if size > limit_bytes else None

        return too_much

    def put(self, kind: str, data: bytes) -> str:
        """Write one object if it is not there; returns its sha.

        Raises:
            OSError: It cannot be written.
        """
        whole = f"{kind} {len(data)}\0".encode() + data
        sha = hashlib.new(self.algorithm, whole, usedforsecurity=False).hexdigest()
        path = self.folder / sha[:2] / sha[2:]
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            draft = path.parent / f"tmp_obj_{secrets.token_hex(8)}"
            draft.write_bytes(zlib.compress(whole, _LEVEL))
            draft.chmod(0o444)
            draft.rename(path)
        return sha


def tree_bytes(entries: Sequence[Entry]) -> bytes:
    """A tree of these rows, in git's order, where a folder sorts as if its name ended in a slash.

    Raises:
        ValueError: A name that no tree can hold, or one that comes twice.
    """
    rows: dict[bytes, bytes] = {}
    for entry in entries:
        name = os.fsencode(entry.name)
        place = name + b"/" if entry.mode == _FOLDER else name
        if not name or b"/" in name or b"\0" in name or place in rows:
            raise ValueError(f"a tree cannot hold {entry.name!r} (or not twice)")
        rows[place] = entry.mode.lstrip("0").encode() + b" " + name + b"\0" + bytes.fromhex(entry.sha)
    return b"".join(rows[place] for place in sorted(rows))


def commit_bytes(tree: str, parents: Sequence[str], message: str, when: datetime) -> bytes:
    """A commit under the bridge's own name, dated `when` (aware)."""
    signed = f"{IDENTITY} {int(when.timestamp())} +0000"
    head = [f"tree {tree}", *(f"parent {parent}" for parent in parents)]
    return "\n".join([*head, f"author {signed}", f"committer {signed}", "", message]).encode()


def parse_commit(sha: str, data: bytes) -> Commit:
    """A commit from its bytes: tree and parents where git reads them, and nowhere else in the header.

    Raises:
        BrokenObject: It does not begin as a commit does.
    """
    digits = 64 if data[45:46] not in (b"\n", b"") else 40
    match = _COMMIT[digits].match(data)
    if match is None:
        raise BrokenObject(f"the commit {sha[:12]} is broken: it does not begin with its tree and parents")
    parents = match["parents"].decode("ascii").split("\n")[:-1]
    message = data.partition(b"\n\n")[2]
    return Commit(
        sha,
        match["tree"].decode("ascii"),
        tuple(line.removeprefix("parent ") for line in parents),
        message.decode("utf-8", "replace"),
    )
