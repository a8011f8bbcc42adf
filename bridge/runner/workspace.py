"""A job's files: lays out a commit and its LFS objects, reads the report, removes what the job left."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bridge.errors import BusError, MachineError, RequestRefused
from bridge.git.repo import GitRepo
from bridge.proc import run_program
from bridge.runner.policy import LfsRule
from evidence_format.weights import POINTER, file_sha256

MAX_FILES = 100_000
MAX_BYTES = 2 << 30
MAX_DEPTH = 100
MAX_REPORT = 32 << 20
MAX_POINTERS = 10_000
_FETCH_S, _REMOVAL_S = 3600.0, 600.0
_LINK, _SUBMODULE, _EXECUTABLE = "120000", "160000", "100755"
# What Apple's file systems leave out of a name when they look for a file.
_IGNORED = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")
_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\noid sha256:([0-9a-f]{64})\nsize ([0-9]{1,18})\n"
)
_MAX_POINTER = 1024
_NAMED = 3  # pointers that a message names
_SLACK = 1 << 20  # what git-lfs writes beside objects


class WorkloadRefused(RequestRefused):
    """The workload cannot be laid out safely, or lacks a named file or an object of Git LFS."""


class ReportUnusable(MachineError):
    """The report that a job wrote cannot be read."""


class _Blob(NamedTuple):
    mode: str
    sha: str
    size: int
    path: str


def lay_out(git: GitRepo, commit: str, folder: Path, paths: Sequence[str] | None = None) -> frozenset[str]:
    """Write the files of a commit below an existing, empty folder; the paths that are LFS pointers.

    With `paths` only these files and folders, each of which must exist in the commit. There is no checkout,
    so no hook, filter, attribute, submodule or LFS smudge runs. Folders come first, then plain files, created
    exclusively, then links, so nothing is ever written through a link.
    """
    folder = folder.resolve()
    wanted = [path.removesuffix("/") for path in paths or ()]
    blobs = list(_list_blobs(git, commit, wanted))
    for path in wanted:
        if not any(blob.path == path or blob.path.startswith(path + "/") for blob in blobs):
            raise WorkloadRefused(f"the commit {commit[:12]} has no file {path!r}")
    total = sum(blob.size for blob in blobs)
    if len(blobs) > MAX_FILES or total > MAX_BYTES:
        most = f"at most {MAX_FILES} files and {MAX_BYTES} bytes are laid out"
        raise WorkloadRefused(f"the commit {commit[:12]} has {len(blobs)} files with {total} bytes; {most}")
    for path in _folders(commit, blobs):
        with _creating(path):
            (folder / path).mkdir(mode=0o700, exist_ok=True)
    pointers, links = set[str](), []
    for blob in sorted(blobs, key=lambda blob: blob.mode == _LINK):
        data = git.read_objects([blob.sha], limit=blob.size)[0]
        with _creating(blob.path):
            if blob.mode == _LINK:
                (folder / blob.path).symlink_to(os.fsdecode(data))
                links.append(blob.path)
                continue
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            mode = 0o700 if blob.mode == _EXECUTABLE else 0o600
            with os.fdopen(os.open(folder / blob.path, flags, mode), "wb") as sink:
                sink.write(data)
        if data.startswith(POINTER):
            pointers.add(blob.path)
    for path in links:
        if not Path(os.path.realpath(folder / path)).is_relative_to(folder):
            raise WorkloadRefused(f"the link {path!r} of the commit {commit[:12]} leads outside it")
    return frozenset(pointers)


def _list_blobs(git: GitRepo, commit: str, wanted: Sequence[str]) -> Iterator[_Blob]:
    output = git.run("ls-tree", "-r", "-l", "-z", "--full-tree", commit, "--", *wanted)
    for row in filter(None, output.split(b"\0")):
        head, _, raw = row.partition(b"\t")
        mode, _, sha, size = head.decode("ascii").split()
        if mode == _SUBMODULE:
            continue
        path = os.fsdecode(raw)
        parts = path.split("/")
        if len(parts) > MAX_DEPTH or any(
            part in ("", ".", "..") or "\\" in part or _is_git_folder(part) for part in parts
        ):
            raise WorkloadRefused(f"the workload holds a path that is not laid out: {path[:200]!r}")
        if size == "BAD":  # so git ls-tree says that it is missing
            raise BusError(f"the object {sha} of {commit[:12]} is missing in {git.directory}")
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
            raise WorkloadRefused(f"the commit {commit[:12]} has more than {MAX_FILES} folders")
    return sorted(found)


@contextlib.contextmanager
def _creating(path: str) -> Iterator[None]:
    """Refuse what fails: two names that are one on this file system, a file for a folder, a long name."""
    try:
        yield
    except (OSError, ValueError) as error:  # a ValueError: a link with a NUL in it
        raise WorkloadRefused(f"cannot lay out {path!r}: {getattr(error, 'strerror', error)}") from None


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
    """Replace the pointer files at these paths of a workspace by the objects they name; bytes fetched.

    Objects come only from the one server that the owner names: the workload's ``.lfsconfig`` and attributes
    are ignored, because git-lfs runs in a repository that holds nothing but pointers written here from hash
    and size, which are compared with what arrives. `scratch_dir` is on the same disk, for objects on their
    way. When `stop` says so, asked a few times a second, some or all stay pointers.
    """
    wanted = {path: _read_pointer(folder, path) for path in sorted(pointers)}
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
    objects = set(wanted.values())
    with tempfile.TemporaryDirectory(prefix="lfs-", dir=scratch_dir) as scratch:
        said = _fetch(Path(scratch), objects, rule.endpoint, stop)
        for path, (oid, size) in wanted.items():
            if stop():
                return 0
            source = Path(scratch) / "lfs" / "objects" / oid[:2] / oid[2:4] / oid
            if not source.is_file() or (source.stat().st_size, file_sha256(source)) != (size, oid):
                raise WorkloadRefused(
                    f"{path}: the LFS server does not give the object {oid[:12]} of {size} bytes{said}",
                    "was it pushed (`git lfs push --all`), and is git-lfs installed on the runner?",
                )
            shutil.copyfile(source, folder / path)
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
    pointers: dict[str, bytes | None] = {
        oid: POINTER + f"v1\noid sha256:{oid}\nsize {size}\n".encode("ascii") for oid, size in objects
    }
    settings = (
        *(f"lfs.url={endpoint}", f"remote.lfs.url={endpoint}", "lfs.concurrenttransfers=4"),
        *("lfs.fetchrecentalways=false", "lfs.activitytimeout=30"),
    )

    def objection() -> str | None:
        if stop():
            return "told to stop"
        size = 0
        for file in (scratch / "lfs").rglob("*"):
            with contextlib.suppress(OSError):  # moved to its place meanwhile
                size += file.lstat().st_size
        return f"the server sends more than the {total} bytes it should" if size > total + _SLACK else None

    own = GitRepo(scratch, timeout_s=60.0)
    own.run("init", "--quiet", "--bare", str(scratch))
    with own.scratch() as wanted:
        commit = wanted.commit_files(None, pointers, "what is wanted\n")
        words = [word for setting in settings for word in ("-c", setting)]
        command = (*words, "lfs", "fetch", "lfs", commit)
        done = wanted.attempt(*command, timeout_s=_FETCH_S, guard=objection)
    if done.ok:
        return ""
    if b"is not a git command" in done.stderr:
        return ": git-lfs is not installed on this machine"
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.exit_code}"]
    return f": {done.stopped or lines[-1][:300]}{' (timeout)' if done.timed_out else ''}"


# After the job --------------------------------------------------------------------------------------------


def read_report(folder: Path, name: str) -> bytes | None:
    """The bytes of the report that a job wrote into its result folder; None when it wrote none.

    It must be a plain file with one name, within `MAX_REPORT`, and no part of its path may be a link: the job
    may have replaced the folder and its parent. Else `ReportUnusable`.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as stack:
        try:
            handle = os.open(folder.parents[1], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, handle)
            kinds = {folder.parent.name: os.O_DIRECTORY, folder.name: os.O_DIRECTORY, name: 0}
            for part, kind in kinds.items():
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
