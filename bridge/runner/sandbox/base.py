"""What a job gets: its folders, its environment, its limits, and the list of everything it may reach."""

from __future__ import annotations

import importlib.util
import os
import site
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from bridge.proc import run_program
from bridge.runner.policy import JobLimits
from bridge.runner.workspace import remove_tree

# Names that may pass from the runner's environment to a job; none of them is a secret.
PASSED_NAMES = ("KAKEYA_BLAS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TZ", "VECLIB_MAXIMUM_THREADS")
SYSTEM_PATH = ("/opt/homebrew/bin", "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")
NOT_ENFORCED = "not enforced"
# What each item of `Enforcement` keeps a job from.
ITEMS = {
    "network": "reaching the network and programs that listen here",
    "tree": "leaving processes behind",
    "writes": "writing outside its own folders",
    "credentials": "reading keys, runners' state and credentials",
    "processes": "signalling other programs and looking into them",
    "calls": "using kernel interfaces that no job needs",
    "memory": "taking more memory and processes than it may",
    "disk": "taking more of the disk than it may",
}
_PACKAGES = ("bridge", "engine")
_TRIAL_S = 30.0
_DISK_RESERVE = 1 << 30  # bytes of the disk that no job may fill


class JobDirs:
    """The private folders of one job, below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "home"
        self.temporary = root / "tmp"  # TMPDIR; in the Linux sandbox also its /tmp and /var/tmp
        self.shared_memory = root / "shm"  # in the Linux sandbox its /dev/shm
        self.workspace = root / "workspace"  # its working directory: what the preset asks for of the commit
        self.out = root / "out"  # for ``${out:NAME}`` files: the only place that reports are read from

    def make(self) -> None:
        """Create the folders, empty, for the owner alone."""
        remove_tree(self.root)
        for folder in (self.root, self.home, self.temporary, self.shared_memory, self.workspace, self.out):
            folder.mkdir(parents=True, mode=0o700)


@dataclass(frozen=True)
class Access:
    """Everything that one job may reach, besides system libraries.

    Of two entries where one lies inside the other, the inner one decides.
    """

    dirs: JobDirs  # its own folders, which it may write
    readable: tuple[Path, ...] = ()  # to read and run: the installation, models, the owner's programs
    writable: tuple[Path, ...] = ()  # further folders to write: the kernel cache
    hidden: tuple[Path, ...] = ()  # not to be read even inside a readable folder: runners' state and keys
    network: bool = False  # whether it gets the machine's network


@dataclass(frozen=True)
class Enforcement:
    """What keeps a job in: the `sandbox` program or ``none``, and the means for each of `ITEMS`.

    `network` is ``open`` where a job may reach it.
    """

    sandbox: str = "none"
    network: str = NOT_ENFORCED
    tree: str = NOT_ENFORCED
    writes: str = NOT_ENFORCED
    credentials: str = NOT_ENFORCED
    processes: str = NOT_ENFORCED
    calls: str = NOT_ENFORCED
    memory: str = "watched"
    disk: str = "watched"

    def facts(self) -> dict[str, str]:
        """The facts of a result: ``sandbox`` and ``isolation_*``."""
        return {"sandbox": self.sandbox, **{f"isolation_{name}": getattr(self, name) for name in ITEMS}}


class Sandbox(Protocol):
    """A program that starts a job so that it reaches only what its `Access` lists."""

    @property
    def wrappers(self) -> int:
        """How many processes of its own it keeps above the job's program."""

    def command(self, argv: Sequence[str], access: Access) -> list[str]:
        """The command line that runs `argv` in the sandbox."""

    def enforcement(self, *, network: bool) -> Enforcement:
        """What it enforces, where `network` says whether the job gets the machine's network."""


@dataclass(frozen=True)
class NoSandbox:
    """Starts a job as it is; `why` says what is missing on this machine."""

    why: str
    wrappers: int = 0

    def command(self, argv: Sequence[str], access: Access) -> list[str]:  # noqa: ARG002 - nothing is enforced
        """`argv` as it is."""
        return list(argv)

    def enforcement(self, *, network: bool) -> Enforcement:
        """Only the supervisor's own means: it ends the process tree and measures."""
        return Enforcement(
            network="open" if network else NOT_ENFORCED,
            tree="adopted" if sys.platform == "linux" else "hunted",
        )


def try_sandbox(sandbox: Sandbox, program: str) -> str | None:
    """Start a program that does nothing in a sandbox; what went wrong, or None."""
    with tempfile.TemporaryDirectory() as folder:
        dirs = JobDirs(Path(folder) / "job")
        dirs.make()
        done = run_program(sandbox.command([program], Access(dirs)), timeout_s=_TRIAL_S)
    if done.ok:
        return None
    return done.stderr.decode("utf-8", "replace").strip() or f"exit code {done.exit_code}"


def installation() -> list[Path]:
    """Where this program's interpreter and packages are, also those that ``.pth`` files add.

    Of a checkout these are the packages only, neither its other files nor its ``.git``.
    """
    packages = []
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        packages += [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    # Not sys.path: that holds the folder the runner was started in, which may be the home.
    files = [file for folder in site.getsitepackages() for file in Path(folder).glob("*.pth")]
    lines = [line.strip() for file in files for line in file.read_text("utf-8", "replace").splitlines()]
    parents = {str(package.parent) for package in packages}
    added = [Path(line) for line in lines if os.path.isabs(line) and line not in parents]
    return [path for path in (Path(sys.prefix), Path(sys.base_prefix), *packages, *added) if path.exists()]


def environment(dirs: JobDirs, ours: Mapping[str, str], also: Iterable[str] = ()) -> dict[str, str]:
    """The complete environment of a job.

    Of `ours`, the runner's, only `PASSED_NAMES` pass, and what the policy lets pass `also`. None of it
    overrides what is set here.
    """
    path = [str(Path(sys.executable).parent), *SYSTEM_PATH]
    passed = {name: ours[name] for name in (*PASSED_NAMES, *also) if name in ours}
    return {
        **passed,
        "PATH": os.pathsep.join(path),
        "HOME": str(dirs.home),
        "TMPDIR": str(dirs.temporary),
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
    }


def resource_limits(limits: JobLimits) -> dict[str, int]:
    """RLIMIT values: open files, bytes of a file, core dumps, and on Linux processes with their threads."""
    values = {"NOFILE": limits.open_files, "FSIZE": limits.file_bytes, "CORE": 0}
    if sys.platform == "linux":  # the kernel counts everything that this user runs
        owned = (each.info for each in psutil.process_iter(["uids", "num_threads"]) if each.info["uids"])
        running = (info["num_threads"] or 0 for info in owned if info["uids"].real == os.getuid())
        values["NPROC"] = limits.processes + sum(running)
    return values


def allowed(limits: JobLimits, memory: int) -> dict[str, int]:
    """What the watchdog measures a job against, by `watchdog.Breach.what`; `memory` is the machine's."""
    return {
        "memory": memory * 4 // 5 if limits.memory_bytes is None else limits.memory_bytes,
        "processes": limits.processes,
        "disk": limits.disk_bytes,
        "files": limits.files,
        "left": _DISK_RESERVE,
    }
