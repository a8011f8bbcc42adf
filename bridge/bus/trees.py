"""One row of a tree object read or replaced in its raw bytes. Pure; as git stores trees.

A tree is rows of ``mode SP name NUL sha``, sorted by name, a folder's name counting with a slash at its
end. Reading stops where the sought name would stand, so a root folder of 50,000 files costs no more than
its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

_FOLDER = b"40000"


@dataclass(frozen=True)
class Row:
    """One row: its mode in raw form (``40000`` is a folder) and the sha in hex."""

    mode: str
    sha: str

    @property
    def is_folder(self) -> bool:
        """Whether the row is a subtree."""
        return self.mode == _FOLDER.decode()


def find(tree: bytes, name: str, digest_bytes: int) -> Row | None:
    """The row of that name, whatever its kind.

    Args:
        tree: A raw tree object.
        name: A file name, not a path.
        digest_bytes: 20 or 32, by the repository's hash.
    """
    start, end = _place(tree, name.encode(), digest_bytes)
    if start == end:
        return None
    mode, _, rest = tree[start:end].partition(b" ")
    return Row(mode.decode("ascii", "replace"), rest[-digest_bytes:].hex())


def with_folder(tree: bytes, name: str, sha: str) -> bytes:
    """The tree with the subtree `sha` under `name`, replacing a folder of that name."""
    digest = bytes.fromhex(sha)
    start, end = _place(tree, name.encode(), len(digest))
    return tree[:start] + _FOLDER + b" " + name.encode() + b"\0" + digest + tree[end:]


def _place(tree: bytes, name: bytes, digest_bytes: int) -> tuple[int, int]:
    """Where the row of that name stands; an empty range where a folder of that name would."""
    wanted = name + b"/"
    at = 0
    while at < len(tree):
        space = tree.index(b" ", at)
        null = tree.index(b"\0", space)
        end = null + 1 + digest_bytes
        found = tree[space + 1 : null]
        if found == name:
            return at, end
        if found + (b"/" if tree[at:space] == _FOLDER else b"") > wanted:
            break
        at = end
    return at, at
