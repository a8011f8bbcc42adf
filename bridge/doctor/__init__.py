"""What is missing here? Findings for the three roles of a machine: a client, a runner, a workflow's job.

This file has what they share: a finding, and the checks of the programs. `client` looks at a checkout, its
remote and GitHub's side of that, `runner` at a machine that serves.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from bridge import __version__, signing
from bridge.errors import BridgeError
from bridge.git.repo import GitRepo
from bridge.runner.machine import find_sandbox
from bridge.runner.sandbox.base import NOT_ENFORCED, NoSandbox

OLDEST_GIT = (2, 31)  # config in variables
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


class Level(StrEnum):
    """How bad a finding is: `fail` means that the role cannot be played from here."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, how bad it is, what was found, and what to do about it."""

    name: str
    level: Level
    looked_at: str
    finding: str
    fix: str = ""


def ok(name: str, looked_at: str, finding: str, fix: str = "") -> Check:
    """All is well; `fix` is advice."""
    return Check(name, Level.OK, looked_at, finding, fix)


def warn(name: str, looked_at: str, finding: str, fix: str) -> Check:
    """The role can be played, with this drawback."""
    return Check(name, Level.WARN, looked_at, finding, fix)


def fail(name: str, looked_at: str, finding: str, fix: str) -> Check:
    """The role cannot be played from here."""
    return Check(name, Level.FAIL, looked_at, finding, fix)


def failed(
    name: str, looked_at: str, error: BridgeError, fix: str = "mend it", level: Level = Level.FAIL
) -> Check:
    """An error as a finding; `fix` where the error has no remedy of its own."""
    return Check(name, level, looked_at, error.message, error.remedy or fix)


def python() -> Check:
    """Which package, on which interpreter."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    return ok("kakeya-mac", sys.executable, f"kakeya-mac {__version__} on Python {version}")


def git_version(git: GitRepo) -> Check:
    """Whether git is new enough."""
    install = "install git 2.31 or later"
    try:
        text = git.run("--version").decode().split()[2]
    except BridgeError as error:
        return failed("git", "git --version", error, install)
    if tuple(int(part) for part in text.split(".")[:2]) < OLDEST_GIT:
        return fail("git", "git --version", f"git {text} is too old", install)
    return ok("git", "git --version", f"git {text}")


def ssh_keygen() -> Check:
    """Whether signatures can be made and verified."""
    if signing.available():
        return ok("ssh-keygen", "PATH", "signatures can be made and verified")
    finding = "not found: requests go out unsigned and no result can be verified"
    return warn("ssh-keygen", "PATH", finding, "install OpenSSH's client (openssh-client)")


def has_engine() -> bool:
    """Whether the engine's libraries are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("mlx", "mlx_lm"))


def engine() -> Iterator[Check]:
    """What the engine's presence means; with it, the sandbox, and what it keeps a job from."""
    where = "mlx, mlx-lm"
    if not has_engine():
        yield ok("engine", where, "not installed: a client only; runners need the extra `engine`")
        return
    yield ok("engine", where, "installed: this machine can run kakeya_engine and a runner")
    where, sandbox = "a trial", find_sandbox()
    enforced = sandbox.enforcement(network=False)
    if isinstance(sandbox, NoSandbox):
        finding = f"{sandbox.why}: presets that run code of the requested commit are refused"
        fix = "macOS: report it; Linux: apt-get install bubblewrap, and permit user namespaces"
        yield warn("sandbox", where, finding, fix)
    else:
        yield ok("sandbox", where, f"{enforced.sandbox} works")
    for item, how in enforced.items().items():
        if how == NOT_ENFORCED:
            finding = f"nothing here keeps a job from {ITEMS[item]}"
            yield warn(f"jobs: {item}", where, finding, "see docs/isolation.md")
        else:
            yield ok(f"jobs: {item}", where, f"{how}: keeps a job from {ITEMS[item]}")
