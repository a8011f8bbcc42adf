"""A job's files: lays out a commit for it, reads the report it wrote, and removes everything it left.

A commit is laid out from git objects, not by a checkout: no hook, filter, attribute, submodule or LFS smudge
runs. Every path is checked part by part. Folders come first, then plain files, created exclusively, then
links, so nothing is ever written through a link; a link that leads outside is refused.

Pointers of Git LFS are replaced by the objects they name, or the job is refused. Objects come only from the
one server that the owner names (``[lfs] endpoint``): the workload's ``.lfsconfig`` and attributes are
ignored, because git-lfs runs in a repository that holds nothing but pointers written here from hash and size.
Both are compared with what arrives. Format: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md

A job may leave anything: links, devices, folders that cannot be entered, trees deeper than any path.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bridge.errors import BusError, MachineError, RequestRefused, describe
from bridge.git.repo import GitRepo
from bridge.proc import run_program
from bridge.runner.policy import LfsRule
from bridge.weights import LFS_MARK

MAX_FILES = 100_000
MAX_BYTES = 2 << 30
MAX_DEPTH = 100
MAX_REPORT = 32 << 20
MAX_POINTERS = 10_000
_FETCH_S, _REMOVAL_S = 3600.0, 600.0
_LINK, _SUBMODULE, _EXECUTABLE = "120000", "160000", "100755"
_MAX_LINK = 4096
_MISSING = "BAD"  # as git ls-tree says it
# What Apple's file systems leave out of a name when they look for a file.
_IGNORED = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")
_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\noid sha256:([0-9a-f]{64})\nsize ([0-9]{1,18})\n"
)
_MAX_POINTER = 1024
_NAMED = 3  # pointers that a message names
_CHUNK = 1 << 20


class WorkloadRefused(RequestRefused):
    """The workload cannot be laid out safely, or lacks a named file or an object of Git LFS."""


class ReportUnusable(Exception):
    """The report cannot be read; the message says why."""


class _Blob(NamedTuple):
    mode: str
    sha: str
    size: int
    path: str


def lay_out(git: GitRepo, commit: str, folder: Path, paths: Sequence[str] | None = None) -> frozenset[str]:
    """Write the files of a commit below an existing, empty folder; the paths that are LFS pointers.

    With `paths` only these files and folders, each of which must exist in the commit.

    Raises:
        WorkloadRefused: A path is missing, a name or link is unsafe, or the caps are exceeded.
        BusError: The objects cannot be read.
    """
    folder = folder.resolve()
    wanted = [path.removesuffix("/") for path in paths or ()]
    blobs = list(_list_blobs(git, commit, wanted))
    for path in wanted:
        if not any(blob.path == path or blob.path.startswith(path + "/") for blob in blobs):
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
    for blob in (blob for blob in blobs if blob.mode != _LINK):
        data = _read(git, blob)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        mode = 0o700 if blob.mode == _EXECUTABLE else 0o600
        with _creating(blob.path), os.fdopen(os.open(folder / blob.path, flags, mode), "wb") as sink:
            sink.write(data)
        if data.startswith(LFS_MARK):
            pointers.add(blob.path)
    links = [blob for blob in blobs if blob.mode == _LINK]
    for blob in links:
        target = os.fsdecode(_read(git, blob))
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


def _list_blobs(git: GitRepo, commit: str, wanted: Sequence[str]) -> Iterator[_Blob]:
    output = git.run("ls-tree", "-r", "-l", "-z", "--full-tree", commit, "--", *wanted)
    for row in filter(None, output.split(b"\0")):
        head, _, raw = row.partition(b"\t")
        mode, _, sha, size = head.decode("ascii").split()
        if mode == _SUBMODULE:
            continue
        path = os.fsdecode(raw)
        if path.count("/") >= MAX_DEPTH:
            raise WorkloadRefused(f"the workload holds a path of more than {MAX_DEPTH} parts: {path[:80]!r}…")
        if any(part in ("", ".", "..") or "\\" in part or _is_git_folder(part) for part in path.split("/")):
            raise WorkloadRefused(f"the workload holds a path that is not laid out: {path!r}")
        if size == _MISSING:
            raise BusError(f"the object {sha} of {commit[:12]} is missing in {git.directory}")
        if mode == _LINK and int(size) > _MAX_LINK:
            raise WorkloadRefused(f"the link {path!r} has {size} bytes")
        yield _Blob(mode, sha, int(size), path)


def _is_git_folder(part: str) -> bool:
    """Whether some file system reads a name as ``.git``. Git itself checks out none of them."""
    plain = _IGNORED.sub("", part).partition(":")[0].rstrip(". ").lower()
    return plain in (".git", "git~1")


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


def _read(git: GitRepo, blob: _Blob) -> bytes:
    return git.read_objects([blob.sha], limit=blob.size)[0]


@contextlib.contextmanager
def _creating(path: str) -> Iterator[None]:
    """Refuse what fails: two names that are one on this file system, a file for a folder, a long name."""
    try:
        yield
    except OSError as error:
        raise WorkloadRefused(f"cannot lay out {path!r}: {error.strerror}") from None


# Git LFS --------------------------------------------------------------------------------------------------


class _Object(NamedTuple):
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

    `scratch_dir` is on the same disk, for objects on their way. When `stop` says so, asked a few times a
    second, some or all stay pointers.

    Returns:
        Bytes that were fetched.

    Raises:
        WorkloadRefused: The policy names no server, a file is no valid pointer, the objects are too many or
            too big, or the server does not deliver them.
    """
    wanted = {path: _read_pointer(folder, path) for path in sorted(pointers)}
    objects = set(wanted.values())
    placed = sum(each.size for each in wanted.values())  # one object may have several pointers
    more = f" and {len(wanted) - _NAMED} more" if len(wanted) > _NAMED else ""
    shown = ", ".join(map(repr, list(wanted)[:_NAMED])) + more
    if rule.endpoint is None:
        raise WorkloadRefused(
            f"the workload holds Git LFS pointers instead of files: {shown}",
            "its owner can name the server that they come from: [lfs] endpoint in policy.toml; or ask for a"
            " commit that has the files themselves",
        )
    if len(wanted) > MAX_POINTERS or placed > rule.max_bytes:
        raise WorkloadRefused(
            f"the workload's Git LFS pointers name {len(wanted)} files with {placed} bytes; at most"
            f" {MAX_POINTERS} files and {rule.max_bytes} bytes are accepted: {shown}",
            "its owner can raise [lfs] max in policy.toml",
        )
    with tempfile.TemporaryDirectory(prefix="lfs-", dir=scratch_dir) as scratch:
        store = Path(scratch) / "lfs" / "objects"
        said = _fetch(Path(scratch), objects, rule.endpoint, stop)
        for path, wants in wanted.items():
            if stop():
                return 0
            if not _put(store / wants.oid[:2] / wants.oid[2:4] / wants.oid, folder / path, wants):
                raise WorkloadRefused(
                    f"{path}: the server of Git LFS does not give the object {wants.oid[:12]} of {wants.size}"
                    f" bytes{said}",
                    "was it pushed? `git lfs push --all` sends a clone's objects",
                )
    return sum(each.size for each in objects)


def _read_pointer(folder: Path, path: str) -> _Object:
    with (folder / path).open("rb") as handle:
        found = _POINTER.fullmatch(handle.read(_MAX_POINTER))
    if found is None:
        raise WorkloadRefused(
            f"{path} begins like a Git LFS pointer and is none, or one with extensions",
            "write it again with git-lfs, or ask for a commit without it",
        )
    return _Object(found[1].decode("ascii"), int(found[2]))


def _fetch(scratch: Path, objects: set[_Object], endpoint: str, stop: Callable[[], bool]) -> str:
    """Fetch objects into a folder; return what git-lfs said, empty if all went well."""
    total = sum(each.size for each in objects)
    own = GitRepo(scratch, timeout_s=60.0)
    pointers: dict[str, bytes | None] = {
        oid: LFS_MARK + f"v1\noid sha256:{oid}\nsize {size}\n".encode("ascii") for oid, size in objects
    }
    settings = (
        f"lfs.url={endpoint}",
        f"remote.lfs.url={endpoint}",
        "lfs.concurrenttransfers=4",
        "lfs.fetchrecentalways=false",
        "lfs.activitytimeout=30",
    )
    words = [word for setting in settings for word in ("-c", setting)]

    def objection() -> str | None:
        return "told to stop" if stop() else _too_much(scratch / "lfs", total)

    try:
        own.run("init", "--quiet", "--bare", str(scratch))
        with own.scratch() as wanted:
            commit = wanted.commit_files(None, pointers, "what is wanted\n")
            command = (*words, "lfs", "fetch", "lfs", commit)
            done = wanted.attempt(*command, timeout_s=_FETCH_S, guard=objection)
    except (BusError, MachineError) as error:
        raise WorkloadRefused(f"git-lfs cannot be used here: {describe(error)}") from None
    if b"is not a git command" in done.stderr:
        raise WorkloadRefused(
            "the workload holds Git LFS pointers, and git-lfs is not installed on this machine",
            "its owner can install git-lfs; `kakeya_mac runner check` says whether it is there",
        )
    if done.ok:
        return ""
    if done.timed_out:
        return f": it took more than {_FETCH_S:.0f} s"
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return f": {done.stopped or (lines[-1][:300] if lines else f'exit code {done.exit_code}')}"


def _too_much(store: Path, total: int) -> str | None:
    """Whether the server sends more than the pointers announce."""
    size = 0
    for root, _, names in os.walk(store):
        for name in names:
            with contextlib.suppress(OSError):  # moved to its place meanwhile
                size += os.lstat(os.path.join(root, name)).st_size
    return f"the server sends more than the {total} bytes it should" if size > total + _CHUNK else None


def _put(source: Path, target: Path, wants: _Object) -> bool:
    """Copy an object over its pointer; False: hash or size say that it is not the object."""
    digest, size = hashlib.sha256(), 0
    try:
        reader = source.open("rb")
    except OSError:
        return False
    with reader, target.open("r+b") as writer:
        while size <= wants.size and (chunk := reader.read(_CHUNK)):
            digest.update(chunk)
            size += len(chunk)
            writer.write(chunk)
        writer.truncate()
    return size == wants.size and digest.hexdigest() == wants.oid


# After the job --------------------------------------------------------------------------------------------


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
