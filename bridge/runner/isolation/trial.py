"""What this machine would enforce around a job, found out by starting a supervisor without one."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bridge.runner.child import Standby, Supervised
from bridge.runner.isolation.enforced import Enforced

# What each item keeps a job from, in words for people, and what helps where nothing does.
ITEMS = {
    "network": "reaching the network and programs that listen here",
    "tree": "leaving processes behind",
    "writes": "writing outside of its own folders",
    "credentials": "reading keys, runners' state and credentials",
    "processes": "signalling other programs and looking into them",
    "calls": "using kernel interfaces that no job needs",
    "memory": "taking more memory and processes than it may",
    "disk": "taking more of the disk than it may",
}
REMEDY = (
    "Linux: permit unprivileged user namespaces, or use a kernel with Landlock and seccomp; "
    "macOS: give the runner a user of its own"
)


def enforced_here() -> Enforced:
    """What a job without network would be kept in by on this machine.

    Raises:
        MachineError: No supervisor can be started here, or it cannot isolate a job.
    """
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder) / "room"
        room.mkdir()
        with Supervised(Standby(Path(folder) / "lock", writable=[room])) as supervised:
            return supervised.enforced
