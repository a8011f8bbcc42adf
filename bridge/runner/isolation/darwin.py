"""The processes of macOS, through libproc: who descends from whom, and how much memory each takes.

Memory is the footprint, as Activity Monitor shows it: what a process has of the memory that CPU and GPU
share counts there, and not as resident memory.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, Protocol

from bridge.errors import MachineError
from bridge.proc import run_program
from bridge.runner.isolation.processes import Process

# All processes of the user with their environments, one a line.
ENVIRONMENTS = ("/bin/ps", "-axEww", "-o", "pid=,command=")
_PS_S, _PS_BYTES = 10.0, 16 << 20
# struct proc_bsdinfo of <sys/proc_info.h>: parent at 16, seconds and microseconds of its start at 120.
_BSD_INFO, _BSD_SIZE, _PARENT_AT, _STARTED_AT = 3, 136, 16, 120
# struct proc_taskinfo: the number of threads at 84.
_TASK_INFO, _TASK_SIZE, _THREADS_AT = 4, 96, 84
# struct rusage_info_v0 of <sys/resource.h>: the footprint at 72.
_RUSAGE_SIZE, _FOOTPRINT_AT = 96, 72


class Library(Protocol):
    """The calls of libproc that are used."""

    def proc_listallpids(self, buffer: Any, size: int) -> int:
        """Fill in process ids; returns how many there are."""

    def proc_pidinfo(self, pid: int, flavour: int, argument: int, buffer: Any, size: int) -> int:
        """Fill in a struct; returns its size."""

    def proc_pid_rusage(self, pid: int, flavour: int, buffer: Any) -> int:
        """Fill in what a process uses; returns 0."""


def table(library: Library | None = None) -> list[Process]:
    """Every process that can be seen; what ended meanwhile is left out.

    Args:
        library: Of the machine, or one that stands for it.
    """
    calls: Library = library or ctypes.CDLL(None)
    room = calls.proc_listallpids(None, 0) + 64
    numbers = ctypes.create_string_buffer(4 * room)
    count = min(calls.proc_listallpids(numbers, 4 * room), room)
    found = (_process(calls, pid) for pid in struct.unpack_from(f"={max(count, 0)}i", numbers.raw))
    return [each for each in found if each is not None]


def _process(calls: Library, pid: int) -> Process | None:
    bsd = ctypes.create_string_buffer(_BSD_SIZE)
    if calls.proc_pidinfo(pid, _BSD_INFO, 0, bsd, _BSD_SIZE) != _BSD_SIZE:
        return None
    task, usage = ctypes.create_string_buffer(_TASK_SIZE), ctypes.create_string_buffer(_RUSAGE_SIZE)
    threads, memory = 1, 0  # of other users' processes no more is told
    if calls.proc_pidinfo(pid, _TASK_INFO, 0, task, _TASK_SIZE) == _TASK_SIZE:
        [threads] = struct.unpack_from("=i", task.raw, _THREADS_AT)
    if calls.proc_pid_rusage(pid, 0, usage) == 0:
        [memory] = struct.unpack_from("=Q", usage.raw, _FOOTPRINT_AT)
    [parent] = struct.unpack_from("=I", bsd.raw, _PARENT_AT)
    seconds, micro = struct.unpack_from("=QQ", bsd.raw, _STARTED_AT)
    return Process(pid, parent, threads, memory, started=seconds * 1_000_000 + micro)


def marked(home: str, ps: Sequence[str] = ENVIRONMENTS) -> set[int]:
    """Processes whose environment names this folder as HOME, wherever they hang in the tree.

    Args:
        home: HOME of a job, which no other program has.
        ps: The program that lists environments.
    """
    try:
        done = run_program(ps, timeout_s=_PS_S, limit_bytes=_PS_BYTES)
    except MachineError:
        return set()
    return parse_marked(done.stdout.decode("utf-8", "replace"), home)


def parse_marked(listing: str, home: str) -> set[int]:
    """The process ids of the lines that name ``HOME=home`` as one of their words."""
    found = set[int]()
    for line in listing.splitlines():
        pid, _, rest = line.strip().partition(" ")
        if f" HOME={home} " in f" {rest} " and pid.isdigit():
            found.add(int(pid))
    return found
