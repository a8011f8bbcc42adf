"""The processes of a job: who descends from whom, and leaving none of them behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from bridge.runner.isolation import libc

_PATIENCE_S, _PAUSE_S = 60.0, 0.01
_AT_ONCE = 20_000
_QUICKLY_S, _LOOKS = 2.0, 10  # after how long, each time, everything is stopped first, in how many looks
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Process:
    """One running process: its id and its parent's, threads, bytes of memory, when it started.

    The start has no unit; together with the id it tells a process from one that got its number later.
    """

    pid: int
    parent: int
    threads: int
    resident: int
    started: int = 0


def below_us() -> list[Process]:
    """The processes that descend from this one."""
    return below(os.getpid(), table())


def below(top: int, running: Iterable[Process]) -> list[Process]:
    """Those of the processes that descend from `top`, from near to far."""
    children: dict[int, list[Process]] = {}
    for each in running:
        children.setdefault(each.parent, []).append(each)
    found: list[Process] = []
    front = [top]
    while front:
        born = [each for pid in front for each in children.pop(pid, ())]
        found += born
        front = [each.pid for each in born]
    return found


def table() -> list[Process]:
    """Every process that can be seen."""
    if not libc.LINUX:
        from bridge.runner.isolation import darwin  # here, because it needs what is above

        return darwin.table()
    return from_proc()


def threads_of_us() -> int:
    """Processes and threads of this user on Linux, which the kernel counts against a limit of any of them."""
    count = 0
    for each in from_proc():
        with contextlib.suppress(OSError):
            count += each.threads if os.stat(f"/proc/{each.pid}").st_uid == os.getuid() else 0
    return count


def from_proc() -> list[Process]:
    """Every process that can be seen in /proc."""
    found: list[Process] = []
    with contextlib.suppress(FileNotFoundError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                found.append(parse_stat(int(name), file.read()))
    return found


def parse_stat(pid: int, text: bytes) -> Process:
    """A process as Linux's ``/proc/PID/stat`` shows it; its name may hold anything, brackets too."""
    fields = text.rpartition(b")")[2].split()
    return Process(
        pid,
        parent=int(fields[1]),
        threads=int(fields[17]),
        resident=int(fields[21]) * _PAGE,
        started=int(fields[19]),
    )


def exact_memory(process: Process) -> tuple[int, int]:
    """Bytes of memory of a process, and of memory made to be shared: files of memory, mapped or nameless.

    Pages that several have are divided among them; what is swapped out counts.
    """
    with contextlib.suppress(OSError), open(f"/proc/{process.pid}/smaps_rollup", "rb") as file:
        kib = {row.split()[0]: int(row.split()[1]) for row in file if row.endswith(b" kB\n")}
        shared = kib.get(b"Pss_Shmem:", 0)
        return 1024 * (kib.get(b"Pss:", 0) + kib.get(b"SwapPss:", 0) - shared), 1024 * shared
    return process.resident, 0


def shares_nameless(process: Process) -> bool:
    """Whether a process has memory to share that no file names, and that is nobody's while untouched."""
    try:
        with open(f"/proc/{process.pid}/maps", "rb") as file:
            return any(b"/dev/zero (deleted)" in row or b"[anon_shmem:" in row for row in file)
    except PermissionError:  # it does not let us look
        return True
    except OSError:
        return False


def shared_memory() -> int:
    """Bytes of memory made to be shared that the machine's programs have, touched or not; 0: unknown."""
    with contextlib.suppress(OSError), open("/proc/meminfo", "rb") as file:
        return sum(1024 * int(row.split()[1]) for row in file if row.startswith(b"Shmem:"))
    return 0


def end_descendants(group: int = 0) -> tuple[int, dict[int, int]]:
    """Kill and collect all that descends from this process, until nothing is there.

    Args:
        group: A process group that dies with them; 0: none. Where orphans are adopted by others, this and
            what still hangs together is all that is known of them.

    Returns:
        The number of processes that would not die, and exit codes by process id.
    """
    ended: dict[int, int] = {}
    began = time.monotonic()
    thorough = began + _QUICKLY_S
    while (now := time.monotonic()) < began + _PATIENCE_S:
        _kill_once(group, thoroughly=now >= thorough)
        if now >= thorough:
            thorough = time.monotonic() + _QUICKLY_S
        collected = reap()
        if collected is None:
            return 0, ended
        ended |= collected
        if not collected:
            time.sleep(_PAUSE_S)
    return max(1, len(below_us())), ended


def _kill_once(group: int, *, thoroughly: bool) -> None:
    """Kill what is there now, by one quick look: what forks and ends all the time is gone after a slow one.

    Args:
        group: A process group that dies with them; 0: none.
        thoroughly: Stop everything first, slowly: what forks and stays would replace what was killed.
    """
    if os.getpid() == 1:
        _signal_all(signal.SIGKILL)
        return
    if group and not libc.LINUX:  # there its number may be somebody else's by now, and all hangs below us
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    children = None if thoroughly else _children()
    send(_stopped() if children is None else children, signal.SIGKILL)


def _stopped() -> set[int]:
    """All that descends from this process, stopped, as far as a few looks find it."""
    stopped: set[int] = set()
    for _ in range(_LOOKS):
        fresh = {each.pid for each in below_us()} - stopped
        if not fresh:
            break
        send(fresh, signal.SIGSTOP)
        stopped |= fresh
    return stopped


def _children() -> list[int] | None:
    """Direct children of this process: whoever loses its parent is one of them soon. None: nobody says."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
        return [int(pid) for pid in file.read().split()]
    return None


def reap() -> dict[int, int] | None:
    """Collect children that ended: exit codes by process id; None when there is no child at all."""
    ended: dict[int, int] = {}
    for _ in range(_AT_ONCE):  # somebody may make them faster than this
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended or None
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def _signal_all(number: int) -> None:
    """Everything in this process's namespace but itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, number)


def send(pids: Collection[int], number: int) -> None:
    """Signal some processes; those that are gone or of others are left out."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
