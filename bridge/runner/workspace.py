"""A job's files: lays out a commit for it, reads the report it wrote, and removes everything it left.

A commit is laid out from git objects, not by a checkout: no hook, filter, attribute, submodule or LFS smudge
runs. Every path is checked part by part. Folders come first, then plain files, created exclusively, then
links, so nothing is ever written through a link; a link that leads outside is refused. LFS pointers stay
pointers and are listed.

A job may leave anything: links, devices, folders that cannot be entered, trees deeper than any path.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import BusError, MachineError, RequestRefused
from bridge.git.repo import GitRepo
from bridge.proc import run_program
from bridge.weights import LFS_MARK

MAX_FILES = 100_000
MAX_BYTES = 2 << 30
MAX_DEPTH = 100
MAX_REPORT = 32 << 20
_REMOVAL_S = 600.0
_BATCH_BYTES = 32 << 20
_LINK, _SUBMODULE, _EXECUTABLE = "120000", "160000", "100755"
_MAX_LINK = 4096
_MISSING = "BAD"  # as git ls-tree says it
# What Apple's file systems leave out of a name when they look for a file.
_IGNORED = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")


class WorkloadRefused(RequestRefused):
    """The workload commit cannot be laid out safely, or lacks a file that the request names."""


class ReportUnusable(Exception):
    """The report cannot be read; the message says why."""


@dataclass(frozen=True)
class _Blob:
    mode: str
    sha: str
    size: int
    path: str


def lay_out(git: GitRepo, commit: str, folder: Path, paths: Sequence[str] | None = None) -> frozenset[str]:
    """Write the files of a commit below an existing, empty folder.

    Args:
        git: A repository that holds the commit.
        commit: Its sha.
        folder: The folder.
        paths: Only these files and folders; each must exist in the commit. None: everything.

    Returns:
        The paths that are LFS pointers.

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
        with _creating(path):
            (folder / path).mkdir(mode=0o700, exist_ok=True)
    pointers = set()
    for batch in _batches(blob for blob in blobs if blob.mode != _LINK):
        for blob, data in zip(batch, _read(git, batch), strict=True):
            with _creating(blob.path):
                _write(folder / blob.path, data, executable=blob.mode == _EXECUTABLE)
            if data.startswith(LFS_MARK):
                pointers.add(blob.path)
    links = [blob for blob in blobs if blob.mode == _LINK]
    for blob, data in zip(links, _read(git, links), strict=True):
        target = os.fsdecode(data)
        if not target or target.startswith("/") or "\0" in target:
            raise WorkloadRefused(
                f"the link {blob.path!r} leads to {target!r}, which is outside the workload"
            )
        with _creating(blob.path):
            (folder / blob.path).symlink_to(target)
    for blob in links:
        if not Path(os.path.realpath(folder / blob.path)).is_relative_to(folder):
            raise WorkloadRefused(f"the link {blob.path!r} of the commit {commit[:12]} leads outside it")
    return frozenset(pointers)


def _listing(git: GitRepo, commit: str, paths: Sequence[str] | None) -> Iterator[_Blob]:
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
    """The folders of some files, outer ones first; bounded, because few objects can name any number."""
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
    """Whether some file system reads a name as ``.git``. GitRepo itself checks out none of them."""
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


def _read(git: GitRepo, blobs: Sequence[_Blob]) -> list[bytes]:
    return git.read_objects([blob.sha for blob in blobs], limit=sum(blob.size for blob in blobs))


@contextlib.contextmanager
def _creating(path: str) -> Iterator[None]:
    """Refuse what fails: two names that are one on this file system, a file for a folder, a long name."""
    try:
        yield
    except OSError as error:
        raise WorkloadRefused(f"cannot lay out {path!r}: {error.strerror}") from None


def _write(path: Path, data: bytes, *, executable: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o700 if executable else 0o600), "wb") as sink:
        sink.write(data)


def read_report(folder: Path, name: str) -> bytes | None:
    """The bytes of the report that a job wrote into its result folder; None when it wrote none.

    It must be a plain file with one name, within `MAX_REPORT`, and no part of its path may be a link: the job
    may have replaced the folder and its parent.

    Raises:
        ReportUnusable: It is something else.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as stack:
        try:
            handle = os.open(folder.parents[1], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, handle)
            parts = (folder.parent.name, folder.name, name)
            for part, kind in zip(parts, (os.O_DIRECTORY, os.O_DIRECTORY, 0), strict=True):
                handle = os.open(part, flags | kind, dir_fd=handle)
                stack.callback(os.close, handle)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ReportUnusable(f"the report {name} cannot be opened: {error.strerror}") from None
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise ReportUnusable(f"the report {name} is not a plain file of its own")
        with os.fdopen(os.dup(handle), "rb") as source:
            data = source.read(MAX_REPORT + 1)
    if len(data) > MAX_REPORT:
        raise ReportUnusable(f"the report {name} has more than {MAX_REPORT} bytes")
    return data


def remove_tree(top: Path) -> bool:
    """Remove a folder and everything in it, or a file, following no link; whether nothing is left."""
    with contextlib.suppress(OSError, RecursionError):
        if top.is_dir() and not top.is_symlink():
            shutil.rmtree(top)
        else:
            top.unlink(missing_ok=True)
    if os.path.lexists(top):  # folders without permissions, or deeper than Python recurses
        with contextlib.suppress(MachineError):
            run_program(["chmod", "-R", "u+rwx", str(top)], timeout_s=_REMOVAL_S)
            run_program(["rm", "-rf", str(top)], timeout_s=_REMOVAL_S)
    return not os.path.lexists(top)
