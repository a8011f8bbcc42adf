"""Trees as data: rows of any mode and any name, also such as git would never write."""

from __future__ import annotations

from dataclasses import dataclass

from tests.objects import FOLDER, GITLINK, LINK, PLAIN, PROGRAM, Objects

__all__ = ["FOLDER", "GITLINK", "LINK", "PLAIN", "PROGRAM", "Row", "Rows", "file", "folder", "link", "write"]


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


def write(objects: Objects, rows: Rows) -> str:
    """Store a tree of these rows: folders of one name are merged, other rows that come twice stay twice."""
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
    return objects.tree((row.mode, row.name, _sha(objects, row)) for row in [*merged.values(), *others])


def _sha(objects: Objects, row: Row) -> str:
    if isinstance(row.content, str):
        return row.content
    if isinstance(row.content, tuple):
        return write(objects, row.content)
    return objects.blob(row.content)
