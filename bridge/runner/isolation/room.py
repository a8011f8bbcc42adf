"""What a job's child gets: private folders, an environment from an allowlist, and limits of the kernel.

The child runs in folders of its own (`Room`), never with the runner's HOME, environment or descriptors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge.runner.folders import remove_tree
from bridge.runner.isolation import libc, processes
from bridge.runner.isolation.enforced import Enforced
from bridge.runner.limits import Limits

# Names that may pass from the runner's environment to a job; none of them is a secret.
PASSED_NAMES = ("KAKEYA_BLAS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TZ", "VECLIB_MAXIMUM_THREADS")
SYSTEM_PATH = ("/opt/homebrew/bin", "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")
_LEFT = 1 << 30  # bytes of the disk that no job may fill


@dataclass(frozen=True)
class Room:
    """The private folders of one job, below `root`."""

    root: Path

    @property
    def home(self) -> Path:
        """HOME of the child."""
        return self.root / "home"

    @property
    def temporary(self) -> Path:
        """TMPDIR of the child."""
        return self.root / "tmp"

    @property
    def workspace(self) -> Path:
        """Its working directory: what the preset wants of the workload commit."""
        return self.root / "workspace"

    @property
    def out(self) -> Path:
        """Where ``${out:NAME}`` files are written, and the only place results are collected from."""
        return self.root / "out"

    def make(self) -> None:
        """Create the folders, empty, for the owner alone."""
        self.remove()
        for folder in (self.root, self.home, self.temporary, self.workspace, self.out):
            folder.mkdir(parents=True, mode=0o700)

    def remove(self) -> bool:
        """Remove everything the job left; whether nothing remains."""
        return remove_tree(self.root)


def environment(room: Room, ours: Mapping[str, str], also: Iterable[str] = ()) -> dict[str, str]:
    """The complete environment of a job.

    Args:
        room: Its folders.
        ours: The runner's environment, of which only `PASSED_NAMES` pass.
        also: Further names that the owner lets pass. None of them overrides what is set here.
    """
    path = [str(Path(sys.executable).parent), *SYSTEM_PATH]
    passed = {name: ours[name] for name in (*PASSED_NAMES, *also) if name in ours}
    return {
        **passed,
        "PATH": os.pathsep.join(path),
        "HOME": str(room.home),
        "TMPDIR": str(room.temporary),
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
    }


def resource_limits(limits: Limits, enforced: Enforced) -> dict[str, int]:
    """RLIMIT values: open files, bytes of a file, core dumps, and on Linux processes with their threads."""
    values = {"NOFILE": limits.open_files, "FSIZE": limits.file_bytes, "CORE": 0}
    if not libc.LINUX:
        return values
    # Without a namespace of its own the kernel counts all processes of the user.
    others = 0 if enforced.tree == "process namespace" else processes.threads_of_us()
    return {**values, "NPROC": limits.processes + others}


def allowed(limits: Limits, memory: int) -> dict[str, int]:
    """What the watchdog measures a job against, by `watchdog.Breach.what`.

    Args:
        limits: Of the policy.
        memory: Bytes that the machine has.
    """
    return {
        "memory": memory * 4 // 5 if limits.memory_bytes is None else limits.memory_bytes,
        "processes": limits.processes,
        "disk": limits.disk_bytes,
        "files": limits.files,
        "left": _LEFT,
    }
