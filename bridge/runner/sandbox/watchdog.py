"""Measures a job while it runs, and ends its processes: the tree, and what escaped from it.

The kernel's own limits count per process or per user, so what all processes of a job take together is
measured here, a few times a second; folders less often, the longer a measurement takes. What is exceeded
between two measurements is found by the next one, or by the last one after the job's end.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import psutil

LOOK_S = 0.25
_FOLDERS_S, _SHARE = 1.0, 20  # folders are measured every second, and for a twentieth of the time at most
_MAX_DEPTH = 400
_BLOCK = 512
_PATIENCE_S, _PAUSE_S = 60.0, 0.01
_Answer = TypeVar("_Answer")


class Breach(NamedTuple):
    """A limit that a job exceeded.

    `what` is ``memory`` (bytes), ``processes`` (with their threads), ``disk`` (bytes), ``files``, ``depth``
    (folders in folders), or ``left`` (bytes left on the disk).
    """

    what: str
    used: int  # what was measured; counting may have ended at the limit
    allowed: int  # of ``left``, the least


class Watchdog:
    """The measurements of one job, whose processes descend from this one; `seen` holds all that a look found.

    `allowed` has the limits by `Breach.what`; what is missing is not measured.
    """

    def __init__(
        self, allowed: Mapping[str, int], folder: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._allowed = allowed
        # Held open: whatever the job puts in its place, this is what is measured.
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._clock = clock
        self._due = clock() + _FOLDERS_S
        self._least_left = min(allowed.get("left", 0), self._left() // 2)
        self.seen: set[psutil.Process] = set()

    def look(self) -> Breach | None:
        """The first limit that is exceeded now."""
        running = descendants()
        self.seen.update(running)
        found = self._over("processes", sum(_each(running, psutil.Process.num_threads)))
        found = found or self._over("memory", sum(_each(running, lambda each: each.memory_info().rss)))
        if found is not None and found.what == "memory" and sys.platform == "linux":
            # Pages that several processes share were counted for each of them: be exact before the job dies.
            found = self._over("memory", sum(_each(running, _proportional_memory)))
        if found is None and (left := self._left()) < self._least_left:
            found = Breach("left", left, self._least_left)
        began = self._clock()
        if found is None and began >= self._due:
            found = self.look_at_folders(running)
            now = self._clock()
            self._due = now + max(_FOLDERS_S, _SHARE * (now - began))
        return found

    def look_at_folders(self, running: Iterable[psutil.Process] = ()) -> Breach | None:
        """The first limit of the job's folders that is exceeded now.

        What the processes in `running` hold open without a name counts, too.
        """
        used = measure(self._folder, most_files=self._allowed.get("files", sys.maxsize))
        if used.too_deep:
            return Breach("depth", _MAX_DEPTH + 1, _MAX_DEPTH)
        unnamed = sum(_unnamed_bytes(self._folder, running))
        return self._over("files", used.files) or self._over("disk", used.bytes + unnamed)

    def _left(self) -> int:
        disk = os.fstatvfs(self._folder)
        return disk.f_bavail * disk.f_frsize

    def _over(self, what: str, used: int) -> Breach | None:
        allowed = self._allowed.get(what)
        return None if allowed is None or used <= allowed else Breach(what, used, allowed)


# Processes ------------------------------------------------------------------------------------------------


def descendants() -> list[psutil.Process]:
    """Everything that descends from this process."""
    return psutil.Process().children(recursive=True)


def reap() -> dict[int, int]:
    """Collect children that ended: exit codes by process id, negative for signals."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


class TreeEnd(NamedTuple):
    """Exit codes of children by process id; how many processes had left the tree, and how many survive."""

    exit_codes: dict[int, int]
    escaped: int
    survivors: int


def end_tree(seen: Iterable[psutil.Process], home: str | None) -> TreeEnd:
    """Kill and collect everything that descends from this process, and what escaped from the tree.

    Where orphans go to another parent (macOS), a process that leaves its session hangs below no process of
    ours. It is found if a look saw it, or by the HOME that only this job has; one that cleared its
    environment between two looks is not. With no `home` the kernel keeps the tree together, and nothing can
    have escaped.
    """
    exit_codes: dict[int, int] = {}
    known, escaped = set(seen), set[psutil.Process]()
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        below = set(descendants())
        known |= below
        left_over = set() if home is None else _escaped(known, home) - below
        escaped |= left_over
        running = below | left_over
        if not running or time.monotonic() > deadline:
            return TreeEnd(exit_codes, len(escaped), len(running))
        # Stopped first, so that nothing forks while the rest is killed.
        list(_each(running, psutil.Process.suspend))
        list(_each(running, psutil.Process.kill))
        exit_codes |= reap()
        time.sleep(_PAUSE_S)


def end_orphans(home: str) -> None:
    """Kill what a job left whose supervisor was killed, found by its HOME."""
    deadline = time.monotonic() + _PATIENCE_S
    while (left := _escaped((), home)) and time.monotonic() < deadline:
        list(_each(left, psutil.Process.kill))
        time.sleep(_PAUSE_S)


def _escaped(known: Iterable[psutil.Process], home: str) -> set[psutil.Process]:
    found = set()
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if each.pid != os.getpid() and each.environ().get("HOME") == home:
                found.add(each)
    return {each for each in (*known, *found) if any(_each([each], _lives))}


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _each(processes: Iterable[psutil.Process], ask: Callable[[psutil.Process], _Answer]) -> Iterator[_Answer]:
    """The answer of each process that is still there and lets us ask."""
    for each in processes:
        with contextlib.suppress(psutil.Error):
            yield ask(each)


def _proportional_memory(process: psutil.Process) -> int:
    memory = process.memory_full_info()
    return int(memory.pss + memory.swap)


# Folders --------------------------------------------------------------------------------------------------


class FolderUse(NamedTuple):
    """What a folder holds: entries, bytes on the disk, and whether it is nested too deep to tell."""

    files: int
    bytes: int
    too_deep: bool


def measure(top: int, *, most_files: int) -> FolderUse:
    """Count what lies below an open folder that a hostile job may change meanwhile; no link is followed.

    Counting may end at `most_files`.
    """
    files, size, seen = 0, 0, set[int]()
    for path, folders, names, handle in os.fwalk(".", dir_fd=top):
        if path.count("/") > _MAX_DEPTH:
            return FolderUse(files, size, True)
        for name in (*folders, *names):
            files += 1
            if files > most_files:
                return FolderUse(files, size, False)
            with contextlib.suppress(OSError):  # it may be gone again
                status = os.lstat(name, dir_fd=handle)
                size += 0 if status.st_ino in seen else status.st_blocks * _BLOCK
                seen.add(status.st_ino)
                if stat.S_ISDIR(status.st_mode) and status.st_mode & 0o500 != 0o500:
                    # A job may close a folder to itself, not to us.
                    os.chmod(name, 0o700, dir_fd=handle, follow_symlinks=False)
    return FolderUse(files, size, False)


def _unnamed_bytes(folder: int, running: Iterable[psutil.Process]) -> Iterator[int]:
    """Sizes of files on the disk of a folder that processes hold open and that have no name (Linux)."""
    device = os.fstat(folder).st_dev
    seen = set[int]()
    for each in running:
        with contextlib.suppress(OSError):
            for link in os.scandir(f"/proc/{each.pid}/fd"):
                with contextlib.suppress(OSError):
                    status = link.stat()
                    fresh = status.st_ino not in seen and status.st_dev == device
                    if fresh and status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                        seen.add(status.st_ino)
                        yield status.st_blocks * _BLOCK
