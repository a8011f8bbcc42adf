"""Lays out a commit's files for a job, from git objects alone.

No checkout: no hook, filter, attribute, submodule or LFS smudge has a say. Every path is checked part by
part. Folders come first, then plain files, created exclusively, then links, so nothing is ever made through a
link; they are refused when any of them leads outside. LFS pointers stay pointers and are counted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge.bus.git import Git
from bridge.errors import BusError, RequestRefused
from bridge.weights import LFS_MARK

MAX_FILES = 100_000
MAX_BYTES = 2 << 30
MAX_DEPTH = 100
_BATCH_BYTES = 32 << 20
_LINK, _SUBMODULE, _EXECUTABLE = "120000", "160000", "100755"
_MAX_LINK = 4096
_MISSING = "BAD"  # as git ls-tree says it
# What Apple's file systems leave out of a name when they look for a file.
_IGNORED = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")


class WorkloadRefused(RequestRefused):
    """The workload commit cannot be laid out safely, or lacks a file the request names."""


@dataclass(frozen=True)
class Laid:
    """What was laid out: files, bytes, and the paths that are LFS pointers."""

    files: int
    bytes: int
    pointers: frozenset[str]


@dataclass(frozen=True)
class _Blob:
    mode: str
    sha: str
    size: int
    path: str


def lay_out(git: Git, commit: str, folder: Path, paths: Sequence[str] | None = None) -> Laid:
    """Write the files of a commit below an empty folder.

    Args:
        git: A repository that holds the commit.
        commit: Its sha.
        folder: An existing, empty folder.
        paths: Only these files and folders; each must exist in the commit. None: everything.

    Raises:
        WorkloadRefused: A path is missing, a name or link is unsafe, or the caps are exceeded.
        BusError: The objects cannot be read.
    """
    folder = folder.resolve()
    blobs = list(_listing(git, commit, paths))
    for path in paths or ():
        wanted = path.removesuffix("/")
        if not any(blob.path == wanted or blob.path.startswith(wanted + "/") for blob in blobs):
            raise WorkloadRefused(f"the commit {commit[:12]} has no file {path!r}")
    total = sum(blob.size for blob in blobs)
    if len(blobs) > MAX_FILES or total > MAX_BYTES:
        raise WorkloadRefused(
            f"the commit {commit[:12]} has {len(blobs)} files with {total} bytes; at most {MAX_FILES} files"
            f" and {MAX_BYTES} bytes are laid out"
        )
    for path in _folders(commit, blobs):
        _make(folder, path)
    pointers = set()
    for batch in _batches(blob for blob in blobs if blob.mode != _LINK):
        for blob, data in zip(batch, _read(git, batch), strict=True):
            _write(folder, blob, data)
            if data.startswith(LFS_MARK):
                pointers.add(blob.path)
    links = [blob for blob in blobs if blob.mode == _LINK]
    for blob, data in zip(links, _read(git, links), strict=True):
        _link(folder, blob, data)
    for blob in links:
        if not Path(os.path.realpath(folder / blob.path)).is_relative_to(folder):
            raise WorkloadRefused(f"the link {blob.path!r} of the commit {commit[:12]} leads outside it")
    return Laid(len(blobs), total, frozenset(pointers))


def _listing(git: Git, commit: str, paths: Sequence[str] | None) -> Iterator[_Blob]:
    wanted = [path.removesuffix("/") for path in paths or ()]
    output = git.run("ls-tree", "-r", "-l", "-z", "--full-tree", commit, "--", *wanted)
    for row in output.split(b"\0"):
        if not row:
            continue
        head, _, raw = row.partition(b"\t")
        mode, _, sha, size = head.decode("ascii").split()
        if mode == _SUBMODULE:
            continue
        path = os.fsdecode(raw)
        _check_path(path)
        if size == _MISSING:
            raise BusError(f"the object {sha} of {commit[:12]} is missing in {git.directory}")
        if mode == _LINK and int(size) > _MAX_LINK:
            raise WorkloadRefused(f"the link {path!r} has {size} bytes")
        yield _Blob(mode, sha, int(size), path)


def _folders(commit: str, blobs: Iterable[_Blob]) -> list[str]:
    """The folders that some files lie in, outer ones first. A tree of few objects can name any number."""
    found = set[str]()
    for blob in blobs:
        path = blob.path
        while (path := path.rpartition("/")[0]) and path not in found:
            found.add(path)
        if len(found) > MAX_FILES:
            raise WorkloadRefused(
                f"the commit {commit[:12]} has more than {MAX_FILES} folders; no more are laid out"
            )
    return sorted(found)


def _check_path(path: str) -> None:
    if path.count("/") >= MAX_DEPTH:
        raise WorkloadRefused(f"the workload holds a path of more than {MAX_DEPTH} parts: {path[:80]!r}…")
    for part in path.split("/"):
        if part in ("", ".", "..") or "\\" in part or _is_git_folder(part):
            raise WorkloadRefused(f"the workload holds a path that is not laid out: {path!r}")


def _is_git_folder(part: str) -> bool:
    """Whether some file system takes a name for ``.git``. Git itself checks out none of them."""
    plain = _IGNORED.sub("", part).partition(":")[0].rstrip(". ").lower()
    return plain in (".git", "git~1")


def _batches(blobs: Iterable[_Blob]) -> Iterator[list[_Blob]]:
    batch: list[_Blob] = []
    size = 0
    for blob in blobs:
        if batch and size + blob.size > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(blob)
        size += blob.size
    if batch:
        yield batch


def _read(git: Git, blobs: Sequence[_Blob]) -> list[bytes]:
    return git.read_objects([blob.sha for blob in blobs], limit=sum(blob.size for blob in blobs))


def _make(folder: Path, path: str) -> None:
    try:
        (folder / path).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise WorkloadRefused(f"cannot lay out {path!r}: {error.strerror}") from None


def _write(folder: Path, blob: _Blob, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(folder / blob.path, flags, 0o700 if blob.mode == _EXECUTABLE else 0o600)
    except OSError as error:
        # Two names that this file system takes for one, a file where a folder must be, a name too long.
        raise WorkloadRefused(f"cannot lay out {blob.path!r}: {error.strerror}") from None
    with os.fdopen(handle, "wb") as sink:
        sink.write(data)


def _link(folder: Path, blob: _Blob, data: bytes) -> None:
    target = os.fsdecode(data)
    if not target or target.startswith("/") or "\0" in target:
        raise WorkloadRefused(f"the link {blob.path!r} leads to {target!r}, which is outside the workload")
    try:
        (folder / blob.path).symlink_to(target)
    except OSError as error:
        raise WorkloadRefused(f"cannot lay out the link {blob.path!r}: {error.strerror}") from None
