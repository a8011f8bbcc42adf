"""Checks that every role shares: Python, git, OpenSSH, the engine, and what a machine keeps its jobs from."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import asdict

from bridge import __version__, signing
from bridge.bus.git import Git
from bridge.doctor.finding import Check, Level
from bridge.errors import BridgeError
from bridge.runner.isolation import trial
from bridge.runner.isolation.enforced import NOT_ENFORCED

OLDEST_GIT = (2, 31)


def python() -> Check:
    """Which package, on which interpreter."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    return Check("kakeya-mac", Level.OK, sys.executable, f"kakeya-mac {__version__} on Python {version}")


def git_version(git: Git) -> Check:
    """Whether git is new enough: 2.31, which scratch object stores and config in variables need."""
    try:
        text = git.run("--version").decode().split()[2]
    except BridgeError as error:
        return Check(
            "git", Level.FAIL, "git --version", error.message, error.remedy or "install git 2.31 or later"
        )
    numbers = tuple(int(part) for part in text.split(".")[:2])
    if numbers < OLDEST_GIT:
        return Check(
            "git", Level.FAIL, "git --version", f"git {text} is too old", "install git 2.31 or later"
        )
    return Check("git", Level.OK, "git --version", f"git {text}")


def ssh_keygen() -> Check:
    """Whether signatures can be made and verified."""
    if signing.available():
        return Check("ssh-keygen", Level.OK, "PATH", "signatures can be made and verified")
    return Check(
        "ssh-keygen",
        Level.WARN,
        "PATH",
        "not found: requests go out unsigned and no result can be verified",
        "install OpenSSH's client (openssh-client)",
    )


def has_engine() -> bool:
    """Whether the engine's libraries are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("mlx", "mlx_lm"))


def isolation() -> Iterator[Check]:
    """What a runner on this machine keeps its jobs from, one check an item."""
    where = "a supervisor without a job"
    try:
        enforced = asdict(trial.enforced_here())
    except BridgeError as error:
        yield Check("jobs", Level.WARN, where, error.message, error.remedy or "no runner can serve here")
        return
    for item, what in trial.ITEMS.items():
        how = enforced[item]
        if how == NOT_ENFORCED:
            finding = f"nothing here keeps a job from {what}"
            yield Check(f"jobs: {item}", Level.WARN, where, finding, trial.REMEDY)
        else:
            yield Check(f"jobs: {item}", Level.OK, where, f"{how}: keeps a job from {what}")


def engine() -> Check:
    """What the engine's presence means."""
    if not has_engine():
        return Check(
            "engine",
            Level.OK,
            "mlx, mlx-lm",
            "not installed: this is a client only; runners need the extra `engine`",
        )
    return Check(
        "engine", Level.OK, "mlx, mlx-lm", "installed: this machine can run kakeya_engine and a runner"
    )
