"""The processes of a job: who descends from whom, and leaving none of them behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection

_SWEEPS, _PAUSE_S = 500, 0.01


def descendants() -> list[int]:
    """Processes below this one, from /proc; empty where there is none."""
    parents: dict[int, int] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat") as file:
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    found: list[int] = []
    front = {os.getpid()}
    while front:
        front = {pid for pid, parent in parents.items() if parent in front}
        found.extend(front)
    return found


def end_descendants(group: int = 0) -> tuple[int, dict[int, int]]:
    """Kill and collect all that descends from this process, until nothing is there.

    Args:
        group: A process group that dies with them; 0: none. Where orphans are adopted by others, this and
            what still hangs together is all that is known of them.

    Returns:
        The number of processes that would not die, and exit codes by process id.
    """
    ended: dict[int, int] = {}
    for _ in range(_SWEEPS):
        _kill_once(group)
        collected = reap()
        if collected is None:
            return 0, ended
        ended |= collected
        time.sleep(_PAUSE_S)
    return max(1, len(descendants())), ended


def _kill_once(group: int) -> None:
    """Kill what is there now. All are stopped first: those that keep forking would else be ahead of us."""
    if os.getpid() == 1:
        _signal_all(signal.SIGKILL)
        return
    if group:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    stopped: set[int] = set()
    while fresh := set(descendants()) - stopped:
        _send(fresh, signal.SIGSTOP)
        stopped |= fresh
    _send(stopped, signal.SIGKILL)


def reap() -> dict[int, int] | None:
    """Collect every child that ended: exit codes by process id; None when there is no child at all."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended or None
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def _signal_all(number: int) -> None:
    """Everything in this process's namespace but itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, number)


def _send(pids: Collection[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
