"""Fetches what Git LFS pointers of a workload stand for, or refuses the job: pointers never reach it.

Only from the one server that the machine's owner named (``[lfs] endpoint``): a workload's own ``.lfsconfig``
and attributes have no say, since git-lfs is given a repository that holds nothing but pointers written here
anew from hash and size. What arrives is compared with both. Format of a pointer:
https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from bridge.bus.git import Git
from bridge.bus.objects import Entry
from bridge.errors import BusError, MachineError, RequestRefused, described
from bridge.runner.policy.types import LfsRule
from bridge.weights import LFS_MARK

MOST_FILES = 10_000
TIMEOUT_S = 3600.0
_MAX_POINTER = 1024
_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\noid sha256:([0-9a-f]{64})\nsize ([0-9]{1,18})\n"
)
_NAMED = 3
_REMOTE = "lfs"
_CHUNK = 1 << 20


class PointersRefused(RequestRefused):
    """The workload holds pointers that this machine does not, or cannot, replace by what they stand for."""


@dataclass(frozen=True)
class _Object:
    oid: str
    size: int


def materialise(
    folder: Path,
    pointers: Iterable[str],
    rule: LfsRule,
    *,
    beside: Path,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Put what pointers stand for in their place.

    Args:
        folder: A workspace, laid out.
        pointers: Paths in it of files that are pointers.
        rule: What the owner says.
        beside: A folder on the same disk, for what is on its way.
        stop: Whether to leave it; asked a few times a second. Then some or all stay pointers.

    Returns:
        Bytes that were fetched.

    Raises:
        PointersRefused: The owner names no server, a pointer is none, they stand for too much, or the server
            does not give what they stand for.
    """
    paths = sorted(pointers)
    wanted = {path: _read(folder, path) for path in paths}
    objects = set(wanted.values())
    total = sum(each.size for each in objects)
    placed = sum(each.size for each in wanted.values())  # an object lies in every place that a pointer has
    shown = _shown(paths)
    if rule.endpoint is None:
        raise PointersRefused(
            f"the workload holds Git LFS pointers instead of files: {shown}",
            "its owner can name the server that they come from: [lfs] endpoint in policy.toml; or ask for a"
            " commit that has the files themselves",
        )
    if len(paths) > MOST_FILES or placed > rule.max_bytes:
        raise PointersRefused(
            f"the workload's Git LFS pointers stand for {len(paths)} files with {placed} bytes; at most"
            f" {MOST_FILES} files and {rule.max_bytes} bytes are taken: {shown}",
            "its owner can raise [lfs] max in policy.toml",
        )
    with tempfile.TemporaryDirectory(prefix="lfs-", dir=beside) as scratch:
        store = Path(scratch) / "lfs"
        said = _fetch(Path(scratch), objects, rule.endpoint, stop)
        for path, wants in wanted.items():
            if stop():
                return 0
            source = store / "objects" / wants.oid[:2] / wants.oid[2:4] / wants.oid
            if not _put(source, folder / path, wants):
                raise PointersRefused(
                    f"{path}: the server of Git LFS does not give the object {wants.oid[:12]} of {wants.size}"
                    f" bytes{': ' if said else ''}{said}",
                    "was it pushed? `git lfs push --all` sends a clone's objects",
                )
    return total


def _read(folder: Path, path: str) -> _Object:
    """The object that a file of a workspace stands for."""
    with (folder / path).open("rb") as handle:
        data = handle.read(_MAX_POINTER)
    found = _POINTER.fullmatch(data)
    if found is None:
        raise PointersRefused(
            f"{path} begins like a Git LFS pointer and is none, or one with extensions",
            "write it anew with git-lfs, or ask for a commit without it",
        )
    return _Object(found[1].decode("ascii"), int(found[2]))


def _fetch(scratch: Path, objects: set[_Object], endpoint: str, stop: Callable[[], bool]) -> str:
    """Let git-lfs fetch objects into a folder; what it said, one line, nothing if all went well."""
    total = sum(each.size for each in objects)
    own = Git(scratch, timeout_s=60.0)
    try:
        own.run("init", "--quiet", "--bare", str(scratch))
        entries = [
            Entry("100644", "blob", own.write_blob(_pointer(each)), each.oid)
            for each in sorted(objects, key=lambda each: each.oid)
        ]
        commit = own.commit_tree(own.write_tree(entries), [], "what is wanted\n")
        settings = {
            "lfs.url": endpoint,
            f"remote.{_REMOTE}.url": endpoint,
            "lfs.concurrenttransfers": "4",
            "lfs.fetchrecentalways": "false",
            "lfs.activitytimeout": "30",
        }
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        done = own.attempt(
            *(*words, "lfs", "fetch", _REMOTE, commit),
            timeout_s=TIMEOUT_S,
            guard=lambda: "told to stop" if stop() else _too_much(scratch / "lfs", total),
        )
    except (BusError, MachineError) as error:
        raise PointersRefused(f"git-lfs cannot be used here: {described(error)}") from None
    if done.exit_code == 0:
        return ""
    if b"is not a git command" in done.stderr:
        raise PointersRefused(
            "the workload holds Git LFS pointers, and git-lfs is not installed on this machine",
            "its owner can install git-lfs; `kakeya_mac runner check` says whether it is there",
        )
    if done.timed_out:
        return f"it took more than {TIMEOUT_S:.0f} s"
    if done.stopped is not None:
        return done.stopped
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return "" if not lines else lines[-1][:300]


def _pointer(wants: _Object) -> bytes:
    return LFS_MARK + f"v1\noid sha256:{wants.oid}\nsize {wants.size}\n".encode("ascii")


def _too_much(store: Path, total: int) -> str | None:
    """Whether the server sends more than the pointers announce."""
    size = 0
    for root, _, names in os.walk(store):
        for name in names:
            try:
                size += os.lstat(os.path.join(root, name)).st_size
            except OSError:  # moved to its place meanwhile
                continue
    return f"the server sends more than the {total} bytes it should" if size > total + _CHUNK else None


def _put(source: Path, target: Path, wants: _Object) -> bool:
    """Copy an object over its pointer; False: hash or size say that it is not the object."""
    digest, size = hashlib.sha256(), 0
    try:
        reader = source.open("rb")
    except OSError:
        return False
    with reader, target.open("r+b") as writer:
        while chunk := reader.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
            if size > wants.size:
                return False
            writer.write(chunk)
        writer.truncate()
    return size == wants.size and digest.hexdigest() == wants.oid


def _shown(paths: list[str]) -> str:
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return ", ".join(map(repr, paths[:_NAMED])) + more
