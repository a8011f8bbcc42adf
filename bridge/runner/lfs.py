"""Replaces Git LFS pointers of a workload by the objects they name, or refuses the job.

Objects come only from the one server that the owner names (``[lfs] endpoint``): the workload's
``.lfsconfig`` and attributes are ignored, because git-lfs runs in a repository that holds nothing but
pointers written here from hash and size. Both are compared with what arrives. Format of a pointer:
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

from bridge.errors import BusError, MachineError, RequestRefused, describe
from bridge.git.repo import GitRepo
from bridge.runner.policy import LfsRule
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
    """The workload holds pointers that this machine may not or cannot replace."""


@dataclass(frozen=True)
class _Object:
    oid: str
    size: int


def replace_pointers(
    folder: Path,
    pointers: Iterable[str],
    rule: LfsRule,
    *,
    scratch_dir: Path,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Replace the pointer files at these paths of a workspace by the objects they name.

    Args:
        folder: The workspace.
        pointers: Paths in it.
        rule: The policy's rule.
        scratch_dir: A folder on the same disk, for objects on their way.
        stop: Whether to give up; asked a few times a second. Then some or all stay pointers.

    Returns:
        Bytes that were fetched.

    Raises:
        PointersRefused: The policy names no server, a file is no valid pointer, the objects are too many or
            too big, or the server does not deliver them.
    """
    paths = sorted(pointers)
    wanted = {path: _read(folder, path) for path in paths}
    objects = set(wanted.values())
    total = sum(each.size for each in objects)
    placed = sum(each.size for each in wanted.values())  # one object may have several pointers
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    shown = ", ".join(map(repr, paths[:_NAMED])) + more
    if rule.endpoint is None:
        raise PointersRefused(
            f"the workload holds Git LFS pointers instead of files: {shown}",
            "its owner can name the server that they come from: [lfs] endpoint in policy.toml; or ask for a"
            " commit that has the files themselves",
        )
    if len(paths) > MOST_FILES or placed > rule.max_bytes:
        raise PointersRefused(
            f"the workload's Git LFS pointers name {len(paths)} files with {placed} bytes; at most"
            f" {MOST_FILES} files and {rule.max_bytes} bytes are accepted: {shown}",
            "its owner can raise [lfs] max in policy.toml",
        )
    with tempfile.TemporaryDirectory(prefix="lfs-", dir=scratch_dir) as scratch:
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
    """The object that a pointer names."""
    with (folder / path).open("rb") as handle:
        data = handle.read(_MAX_POINTER)
    found = _POINTER.fullmatch(data)
    if found is None:
        raise PointersRefused(
            f"{path} begins like a Git LFS pointer and is none, or one with extensions",
            "write it again with git-lfs, or ask for a commit without it",
        )
    return _Object(found[1].decode("ascii"), int(found[2]))


def _fetch(scratch: Path, objects: set[_Object], endpoint: str, stop: Callable[[], bool]) -> str:
    """Fetch objects into a folder; return what git-lfs said, one line, empty if all went well."""
    total = sum(each.size for each in objects)
    own = GitRepo(scratch, timeout_s=60.0)
    text = "v1\noid sha256:{}\nsize {}\n"
    pointers = {each.oid: LFS_MARK + text.format(each.oid, each.size).encode("ascii") for each in objects}
    try:
        own.run("init", "--quiet", "--bare", str(scratch))
        with own.scratch() as wanted:
            commit = wanted.commit_files(None, dict(pointers), "what is wanted\n")
            settings = (
                f"lfs.url={endpoint}",
                f"remote.{_REMOTE}.url={endpoint}",
                "lfs.concurrenttransfers=4",
                "lfs.fetchrecentalways=false",
                "lfs.activitytimeout=30",
            )
            words = [word for setting in settings for word in ("-c", setting)]
            done = wanted.attempt(
                *(*words, "lfs", "fetch", _REMOTE, commit),
                timeout_s=TIMEOUT_S,
                guard=lambda: "told to stop" if stop() else _too_much(scratch / "lfs", total),
            )
    except (BusError, MachineError) as error:
        raise PointersRefused(f"git-lfs cannot be used here: {describe(error)}") from None
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
    try:
        reader = source.open("rb")
    except OSError:
        return False
    digest, size = hashlib.sha256(), 0
    with reader, target.open("r+b") as writer:
        while chunk := reader.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
            if size > wants.size:
                return False
            writer.write(chunk)
        writer.truncate()
    return size == wants.size and digest.hexdigest() == wants.oid
