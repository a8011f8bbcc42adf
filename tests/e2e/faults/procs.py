"""Processes as ``/proc`` shows them: whose they are, what they are, and making an end of them.

Linux only. A process belongs to a run when the run's folder is in its arguments or its environment; that
holds for runners, their git children, supervisors and jobs alike, also after their parent died.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_SERVER_WORDS = ("receive-pack", "upload-pack")


def die_with_parent() -> None:
    """For `preexec_fn`: the kernel kills this child when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def belonging_to(root: Path) -> list[int]:
    """Every living process of a run but this one."""
    mark = os.fsencode(root)
    return [
        pid
        for pid in _pids()
        if pid != os.getpid() and (mark in _read(pid, "cmdline") or mark in _read(pid, "environ"))
    ]


def children(top: int) -> list[int]:
    """Living processes that `top` started itself."""
    return _by_parent().get(top, [])


def descendants(top: int) -> list[int]:
    """Living processes below `top`, parents first."""
    by_parent = _by_parent()
    found: list[int] = []
    front = [top]
    while front:
        front = [pid for parent in front for pid in by_parent.get(parent, [])]
        found += front
    return found


def _by_parent() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for pid in _pids():
        fields = _read(pid, "stat").rpartition(b")")[2].split()
        if len(fields) > 1 and fields[0] != b"Z":
            children.setdefault(int(fields[1]), []).append(pid)
    return children


def command(pid: int) -> str:
    """A process's arguments as one line; empty when it is gone."""
    return _read(pid, "cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip()


def is_server_side(pid: int, remote: Path) -> bool:
    """Whether a process does the remote's part of a push or fetch over a path: not ours to kill."""
    if any(word in command(pid) for word in _SERVER_WORDS):
        return True
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(remote)
    except OSError:
        return False


def is_git(pid: int) -> bool:
    """Whether a process is git, or one of its programs."""
    return _read(pid, "comm").startswith(b"git")


def send(pids: Iterable[int], number: signal.Signals) -> int:
    """Signal processes; how many were still there."""
    there = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            there += 1
    return there


def end_all(root: Path, seconds: float = 10.0) -> list[str]:
    """Kill every process of a run until none is left; the commands of those that would not go."""
    deadline = time.monotonic() + seconds
    while left := belonging_to(root):
        if time.monotonic() > deadline:
            return [command(pid) for pid in left]
        send(left, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)
    return []


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it ended meanwhile
        return b""


def unpublished(state: Path) -> list[str]:
    """Nonces of the results that runners of a state folder keep and have not published."""
    found = []
    for path in state.glob("runner/*/store-*.sqlite"):
        database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)
        with contextlib.suppress(sqlite3.OperationalError):  # it is just being made
            found += [row[0] for row in database.execute("SELECT nonce FROM result")]
        database.close()
    return found
