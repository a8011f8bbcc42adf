"""Ends the process of GitHub's runner that works on a job.

A hook that fails does not stop a job's ``if: always()`` steps; nothing does but the end of the worker, which
started the hook. Only an ancestor of this process, of this user, and of that very name is ever ended, and at
once: it takes a polite signal for a cancelled run, whose ``always()`` steps it would still do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import MachineError
from bridge.proc import run_program

NAME = "Runner.Worker"
_MOST_ANCESTORS = 64
_PS_S = 5.0


@dataclass(frozen=True)
class Ancestor:
    """A running process.

    Attributes:
        pid: Its id.
        parent: Its parent's.
        user: Id of its user.
        name: Of its program, without folders.
    """

    pid: int
    parent: int
    user: int
    name: str


def find(pid: int | None = None, look: Callable[[int], Ancestor | None] | None = None) -> int | None:
    """The worker above a process; None: there is none, or it is another user's.

    Args:
        pid: Whose ancestors are looked at; None: this process's.
        look: Tells of one process; None: the system's way.
    """
    look = look or _system()
    seen = look(os.getpid() if pid is None else pid)
    for _ in range(_MOST_ANCESTORS):
        if seen is None or seen.parent <= 1:
            return None
        seen = look(seen.parent)
        if seen is not None and seen.name == NAME:
            return seen.pid if seen.user == os.getuid() else None
    return None


def end(pid: int, look: Callable[[int], Ancestor | None] | None = None) -> None:
    """End the worker `find` found; one that is gone is fine, and nothing else in its place is ended.

    Args:
        pid: What `find` said, it may be a while ago.
        look: As of `find`.
    """
    seen = (look or _system())(pid)
    if seen is None or (seen.name, seen.user) != (NAME, os.getuid()):
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _system() -> Callable[[int], Ancestor | None]:
    return _from_proc if sys.platform == "linux" else _from_ps


def _from_proc(pid: int) -> Ancestor | None:
    folder = Path("/proc") / str(pid)
    try:
        name, _, rest = (folder / "stat").read_text(errors="replace").partition(" (")[2].rpartition(") ")
        parent = int(rest.split()[1])
        user = folder.stat().st_uid
    except (OSError, ValueError, IndexError):
        return None
    return Ancestor(pid, parent, user, name)


def _from_ps(pid: int) -> Ancestor | None:
    try:
        done = run_program(["/bin/ps", "-o", "ppid=,uid=,comm=", "-p", str(pid)], timeout_s=_PS_S)
        parent, user, name = done.stdout.decode("utf-8", "replace").strip().split(maxsplit=2)
        return Ancestor(pid, int(parent), int(user), os.path.basename(name))
    except (MachineError, ValueError):
        return None
