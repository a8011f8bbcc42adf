"""Trees as data: rows of any mode and any name, also such as git would never write."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.bus.git import Git

PLAIN, PROGRAM, LINK, GITLINK, FOLDER = "100644", "100755", "120000", "160000", "40000"


@dataclass(frozen=True)
class Row:
    """One row of a tree.

    Attributes:
        mode: As git writes it.
        name: Any bytes without NUL.
        content: Bytes of a file, rows of a folder, or the hex name of an object that need not exist.
    """

    mode: str
    name: bytes
    content: bytes | tuple[Row, ...] | str = b""


Rows = tuple[Row, ...]


def file(name: str | bytes, text: str | bytes = "", mode: str = PLAIN) -> Row:
    """A file at a path; its folders are made around it."""
    path = name.encode() if isinstance(name, str) else name
    *folders, last = path.split(b"/")
    row = Row(mode, last, text.encode() if isinstance(text, str) else text)
    for part in reversed(folders):
        row = Row(FOLDER, part, (row,))
    return row


def link(name: str | bytes, target: str | bytes) -> Row:
    """A symbolic link at a path."""
    return file(name, target, LINK)


def folder(name: str | bytes, *rows: Row) -> Row:
    """A folder with these rows and no others."""
    return Row(FOLDER, name.encode() if isinstance(name, str) else name, rows)


def write(git: Git, rows: Rows) -> str:
    """Store a tree of these rows: folders of one name are merged if all are `file`'s; sorted as git sorts.

    Rows that come twice otherwise stay twice.
    """
    merged: dict[bytes, Row] = {}
    others = []
    for row in rows:
        known = merged.get(row.name)
        if known is None:
            merged[row.name] = row
        elif isinstance(known.content, tuple) and isinstance(row.content, tuple):
            merged[row.name] = Row(FOLDER, row.name, known.content + row.content)
        else:
            others.append(row)
    written = sorted([*merged.values(), *others], key=_place)
    return git.write_raw_tree(b"".join(_bytes(git, row) for row in written))


def _place(row: Row) -> bytes:
    return row.name + b"/" if row.mode == FOLDER else row.name


def _bytes(git: Git, row: Row) -> bytes:
    if isinstance(row.content, str):
        sha = row.content
    elif isinstance(row.content, tuple):
        sha = write(git, row.content)
    else:
        sha = git.write_blob(row.content)
    return row.mode.encode() + b" " + row.name + b"\0" + bytes.fromhex(sha)
