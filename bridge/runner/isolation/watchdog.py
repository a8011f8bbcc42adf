"""Measures a job against its limits while it runs: memory, processes, and what its folders hold.

The kernel's own limits (`resource`) count per process or per user, so what all processes of a job take
together is measured here, a few times a second; folders less often, the longer a measurement takes. What is
breached between two measurements is found by the next one, or by the last one after the job's end.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from bridge.runner.isolation import libc, processes

LOOK_S = 0.25
_ROOM_S, _SHARE = 1.0, 20  # folders are measured every second, and for a twentieth of the time at most
_DEEPEST = 400
_BLOCK = 512


@dataclass(frozen=True)
class Breach:
    """A limit that a job went beyond.

    Attributes:
        what: ``memory`` (bytes), ``processes`` (with their threads), ``disk`` (bytes), ``files``, ``depth``
            (folders in folders), or ``left`` (bytes left of the disk, whoever filled it).
        used: What was measured; counting may have ended at the limit.
        allowed: The limit; of what is ``left``, the least.
    """

    what: str
    used: int
    allowed: int


class Watchdog:
    """The measurements of one job.

    Args:
        allowed: The limits, by `Breach.what`; those that are missing are not measured.
        room: The job's folders; they exist.
        scratch: Bytes of memory that belong to the job and to no process.
        clock: Monotonic seconds.

    Attributes:
        seen: When each process started that a look found, by its id.
    """

    def __init__(
        self,
        allowed: Mapping[str, int],
        room: str,
        *,
        scratch: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allowed = allowed
        # Held open: whatever the job puts in its place, this stays what is measured.
        self._room = os.open(room, os.O_PATH | os.O_DIRECTORY if libc.LINUX else os.O_RDONLY)
        self._scratch = scratch
        self._clock = clock
        self._room_due = clock() + _ROOM_S
        self._least = min(allowed.get("left", 0), self._left() // 2)
        self._shared = processes.shared_memory()
        self.seen: dict[int, int] = {}

    def look(self) -> Breach | None:
        """The first limit that is breached now."""
        running = processes.below_us()
        self.seen.update((each.pid, each.started) for each in running)
        found = self._over("processes", sum(each.threads for each in running)) or self._memory(running)
        found = found or self._full_disk()
        began = self._clock()
        if found is None and began >= self._room_due:
            found = self.look_at_room(running)
            now = self._clock()
            self._room_due = now + max(_ROOM_S, _SHARE * (now - began))
        return found

    def look_at_room(self, running: Iterable[processes.Process] = ()) -> Breach | None:
        """The first limit of the job's folders that is breached now.

        Args:
            running: The job's processes, which may hold files open that have no name any more.
        """
        used = measure(self._room, most_files=self._allowed.get("files", 1 << 62))
        if used.too_deep:
            return Breach("depth", _DEEPEST + 1, _DEEPEST)
        nameless = sum(_nameless_bytes(self._room, running))
        return self._over("files", used.files) or self._over("disk", used.bytes + nameless)

    def _memory(self, running: list[processes.Process]) -> Breach | None:
        scratch = self._scratch()
        # What was shared and is not touched any more counts for no process: all there is may be the job's.
        shared = max(scratch, processes.shared_memory() - self._shared)
        if self._over("memory", sum(each.resident for each in running) + shared) is None:
            return None
        # Pages that several share were counted for each: be exact before it costs the job its life.
        exact = [processes.exact_memory(each) for each in running]
        touched = sum(shared for _, shared in exact)
        if not any(map(processes.shares_nameless, running)):
            shared = scratch
        return self._over("memory", sum(own for own, _ in exact) + max(shared, touched))

    def _full_disk(self) -> Breach | None:
        left = self._left()
        return Breach("left", left, self._least) if left < self._least else None

    def _left(self) -> int:
        disk = os.fstatvfs(self._room)
        return disk.f_bavail * disk.f_frsize

    def _over(self, what: str, used: int) -> Breach | None:
        allowed = self._allowed.get(what)
        return None if allowed is None or used <= allowed else Breach(what, used, allowed)


@dataclass(frozen=True)
class Used:
    """What a folder holds: entries, bytes on the disk, and whether it is nested too deep to tell."""

    files: int
    bytes: int
    too_deep: bool


def measure(top: int, *, most_files: int) -> Used:
    """Count what lies below a folder that somebody hostile may change meanwhile; no link is followed.

    Args:
        top: Descriptor of the folder.
        most_files: Where counting may end.
    """
    files, size, seen = 0, 0, set[int]()
    folders: list[tuple[int, list[os.DirEntry[str]]]] = []
    try:
        _enter(folders, ".", top)
        while folders:
            handle, entries = folders[-1]
            if not entries:
                folders.pop()
                os.close(handle)
                continue
            entry = entries.pop()
            files += 1
            with contextlib.suppress(OSError):  # it may be gone again
                status = entry.stat(follow_symlinks=False)
                if status.st_ino not in seen:
                    size += status.st_blocks * _BLOCK
                if status.st_nlink > 1:
                    seen.add(status.st_ino)
                if stat.S_ISDIR(status.st_mode):
                    if len(folders) >= _DEEPEST:
                        return Used(files, size, True)
                    _enter(folders, entry.name, handle)
            if files > most_files:
                break
        return Used(files, size, False)
    finally:
        for handle, _ in folders:
            os.close(handle)


def _enter(folders: list[tuple[int, list[os.DirEntry[str]]]], name: str, parent: int) -> None:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(name, flags, dir_fd=parent)
    except PermissionError:  # its owner may close a folder to itself, not to us
        os.chmod(name, 0o700, dir_fd=parent)
        handle = os.open(name, flags, dir_fd=parent)
    with os.scandir(handle) as entries:
        folders.append((handle, list(entries)))


def _nameless_bytes(room: int, running: Iterable[processes.Process]) -> Iterable[int]:
    """Sizes of the files on the room's disk that are open and have no name any more."""
    device = os.fstat(room).st_dev
    seen = set[int]()
    for each in running:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{each.pid}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{each.pid}/fd/{name}")
                    fresh = status.st_ino not in seen and status.st_dev == device
                    if fresh and status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                        seen.add(status.st_ino)
                        yield status.st_blocks * _BLOCK
