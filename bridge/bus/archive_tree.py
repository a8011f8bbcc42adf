"""The archive's tree with more requests in it. Only the months and days that are touched are read.

Folders are built from blobs that are in the cache.
What the layout means is `bridge.bus.archived`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bridge.bus.archive_record import RECORD_NAME, RESULT_FOLDER, folder_of
from bridge.bus.archived import Archive
from bridge.bus.cache import Cache
from bridge.bus.git import Git
from bridge.bus.objects import Entry
from bridge.bus.retire import Retired
from bridge.errors import BusError
from bridge.protocol.refs import ARCHIVE

_FOLDER = "040000"
_PLAIN_FILE = "100644"
_REMEDY = "rename that branch, and a new one is begun"


def extended(cache: Cache, archive: Archive | None, new: Sequence[Retired]) -> str:
    """Write the root tree of an archive with these requests added; returns its sha.

    Raises:
        BusError: What stands at the archive's ref cannot be added to.
    """
    months: dict[str, dict[str, dict[str, str]]] = {}
    for one in new:
        month, day, nonce = folder_of(one.record.nonce)
        months.setdefault(month, {}).setdefault(day, {})[nonce] = _request_folder(cache.git, one)
    root = None if archive is None else cache.git.commit(archive.commit).tree
    old_months = _rows(cache, root)
    new_months = {}
    for month, days in months.items():
        old_days = _rows(cache, _subtree(old_months, month))
        new_days = {
            day: _with_folders(cache.git, _rows(cache, _subtree(old_days, day)), folders)
            for day, folders in days.items()
        }
        new_months[month] = _with_folders(cache.git, old_days, new_days)
    return _with_folders(cache.git, old_months, new_months)


def _rows(cache: Cache, tree: str | None) -> dict[str, Entry]:
    if tree is None:
        return {}
    cache.bring([tree])
    entries = cache.entries(tree)
    if entries is None:
        raise BusError(f"{ARCHIVE} holds a tree that cannot be read: {tree[:12]}", _REMEDY)
    return {entry.name: entry for entry in entries}


def _subtree(rows: Mapping[str, Entry], name: str) -> str | None:
    row = rows.get(name)
    if row is None:
        return None
    if row.kind != "tree":
        raise BusError(f"{ARCHIVE} holds {name!r}, which is no folder", "take it out by hand")
    return row.sha


def _with_folders(git: Git, rows: Mapping[str, Entry], folders: Mapping[str, str]) -> str:
    added = {name: Entry(_FOLDER, "tree", sha, name) for name, sha in folders.items()}
    try:
        return git.write_tree(list({**rows, **added}.values()))
    except ValueError as error:
        raise BusError(
            f"{ARCHIVE} is broken: {error}", "rename that branch, and a new one is begun"
        ) from None


def _request_folder(git: Git, one: Retired) -> str:
    rows = [
        Entry(_PLAIN_FILE, "blob", git.write_blob(one.record.to_bytes()), RECORD_NAME),
        Entry(_FOLDER, "tree", _folder(git, one.files), RESULT_FOLDER),
        *(Entry(_PLAIN_FILE, "blob", sha, name) for name, sha in one.request.items()),
    ]
    return git.write_tree(rows)


def _folder(git: Git, files: Mapping[str, str]) -> str:
    rows: list[Entry] = []
    below: dict[str, dict[str, str]] = {}
    for path, sha in files.items():
        name, slash, rest = path.partition("/")
        if slash:
            below.setdefault(name, {})[rest] = sha
        else:
            rows.append(Entry(_PLAIN_FILE, "blob", sha, name))
    rows += [Entry(_FOLDER, "tree", _folder(git, inner), name) for name, inner in below.items()]
    return git.write_tree(rows)
