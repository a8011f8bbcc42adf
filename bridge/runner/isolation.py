"""What a job's child gets: private folders, an environment from an allowlist, and limits.

The child runs in folders of its own (`Room`), never with the runner's HOME, environment or descriptors.
Time, output and process limits are enforced by the supervisor. Not enforced yet, and said so in every
result: how much memory it takes, and where it writes within the user's own permissions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge.runner.child import Enforced
from bridge.runner.folders import remove_tree

# Names that may pass from the runner's environment to a job; none of them is a secret.
PASSED_NAMES = ("KAKEYA_BLAS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TZ", "VECLIB_MAXIMUM_THREADS")
SYSTEM_PATH = ("/opt/homebrew/bin", "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")
# Credentials in the user's home that no job may read where the machine can hide them.
CREDENTIALS = (
    ".ssh",
    ".gnupg",
    ".aws",
    ".netrc",
    ".git-credentials",
    ".config/gh",
    ".config/git/credentials",
    ".docker",
    ".pypirc",
)
# Where programs outside listen that would do a job's work for it.
SOCKETS = ("/run/user", "/run/dbus", "/run/docker.sock", "/run/containerd", "/run/podman")
_GIB = 1 << 30


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


def environment(room: Room, ours: Mapping[str, str]) -> dict[str, str]:
    """The complete environment of a job.

    Args:
        room: Its folders.
        ours: The runner's environment, of which only `PASSED_NAMES` pass.
    """
    path = [str(Path(sys.executable).parent), *SYSTEM_PATH]
    passed = {name: ours[name] for name in PASSED_NAMES if name in ours}
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


def limits(enforced: Enforced) -> dict[str, int]:
    """RLIMIT values: open files, file size in bytes, core dumps, and processes where the count is ours."""
    values = {"NOFILE": 4096, "FSIZE": 4 * _GIB, "CORE": 0}
    # Elsewhere the kernel counts all processes of the user, not the job's.
    return {**values, "NPROC": 1024} if enforced.tree == "process namespace" else values


def hidden(home: Path, ours: Mapping[str, str], *own: Path) -> list[Path]:
    """Files, folders and sockets that a job must not reach where the machine can hide them.

    Args:
        home: The user's home, with the credentials in it.
        ours: The runner's environment, which names the key agent's socket.
        own: The runner's state and configuration: keys, policy, mirror, spool.
    """
    agent = [Path(ours["SSH_AUTH_SOCK"])] if ours.get("SSH_AUTH_SOCK") else []
    return [*(home / name for name in CREDENTIALS), *(Path(name) for name in SOCKETS), *agent, *own]
