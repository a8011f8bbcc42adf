"""What a job's child gets: private folders, an environment from an allowlist, and limits.

The child runs in folders of its own (`Room`), never with the runner's HOME, environment or descriptors.
Time, output and process limits are enforced by the supervisor. Not enforced yet, and said so in every
result: how much memory it takes, and where it writes within the user's own permissions.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge.runner.child import Enforced

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
_GIB = 1 << 30


@dataclass(frozen=True)
class Room:
    """The private folders of one job, below `root`, and its raw log."""

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

    @property
    def log(self) -> Path:
        """Standard output and error as they came, before redaction."""
        return self.root / "log"

    def make(self) -> None:
        """Create the folders, empty, for the owner alone."""
        self.remove()
        for folder in (self.root, self.home, self.temporary, self.workspace, self.out):
            folder.mkdir(parents=True, mode=0o700)
        self.log.touch(mode=0o600)

    def remove(self) -> None:
        """Remove everything, also what the job left without permissions."""
        shutil.rmtree(self.root, onerror=_unlock)


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


def hidden(home: Path, *own: Path) -> list[Path]:
    """Files and folders that a job must not read: the user's credentials and the runner's `own`."""
    return [*(home / name for name in CREDENTIALS), *own]


def _unlock(_function: object, path: str, _error: object) -> None:
    if not os.path.lexists(path):
        return
    os.chmod(Path(path).parent, 0o700)
    if os.path.isdir(path) and not os.path.islink(path):
        os.chmod(path, 0o700)
        shutil.rmtree(path, ignore_errors=True)
    else:
        os.unlink(path)
