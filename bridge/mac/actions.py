"""What a step of setup reports, and the changes it proposes: a dry run prints them, setup runs them."""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bridge.errors import MachineError
from bridge.proc import ProgramResult, run_in_terminal, run_program, write_atomic

log = logging.getLogger(__name__)

ROOT = Path("/")  # programs start here, never in the current folder, which may hold anything
ANSWER_S = 30.0
_LONGEST_S = 3600.0
_PAUSE_S = 2.0
# Variables of the owner's shell that would leak a secret or send a program elsewhere.
_DROPPED = ("KAKEYA_RUNNER_TOKEN", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


@dataclass(frozen=True)
class Action:
    """One change: the line that a person would type, the function that makes it, a written file's text."""

    line: str
    run: Callable[[], None] = field(repr=False)
    content: str = ""
    sudo: bool = False


@dataclass(frozen=True)
class StepReport:
    """What a step found, where it looked, what a person can do, and what setup would do about it.

    The state is ``done``, ``to do``, ``advice`` (ready nevertheless) or ``missing`` (a person has to act).
    """

    state: str
    looked_at: str
    finding: str
    fix: str = ""
    actions: Sequence[Action] = ()

    @property
    def is_ready(self) -> bool:
        """Whether the Mac can serve with it."""
        return self.state in ("done", "advice")


done = partial(StepReport, "done")
todo = partial(StepReport, "to do", fix="")
advice = partial(StepReport, "advice")
missing = partial(StepReport, "missing")


def owners_environment() -> dict[str, str]:
    """The environment of setup's programs: the owner's (proxies, Homebrew, gh), in a C locale."""
    return {**{name: value for name, value in os.environ.items() if name not in _DROPPED}, "LC_ALL": "C"}


def answer(*argv: str) -> str | None:
    """What a program prints; None if it is missing or fails."""
    try:
        ended = run_program(argv, env=owners_environment(), cwd=ROOT, timeout_s=ANSWER_S)
    except MachineError:
        return None
    return ended.stdout.decode("utf-8", "replace").strip() if ended.ok else None


def succeeds(*argv: str) -> bool:
    """Whether a program exists and exits with 0."""
    return answer(*argv) is not None


def last_words(ended: ProgramResult) -> str:
    """The end of a program's output in one printable line."""
    lines = (ended.stderr or ended.stdout).decode("utf-8", "replace").strip().splitlines()
    return "".join(c if c.isprintable() else "?" for c in " | ".join(lines[-6:]))[:2000]


def command(
    *argv: str,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    secret: tuple[str, Callable[[], str]] | None = None,
    sudo: bool = False,
    may_fail: bool = False,
    tries: int = 1,
    remedy: str | None = None,
) -> Action:
    """Run a program. `secret` is a variable and the function that returns its value, which is never shown."""
    words = [f"{name}={shlex.quote(value)}" for name, value in (env or {}).items()]
    words += [f"{secret[0]}=…"] if secret else []
    line = " ".join([*words, *(["sudo"] if sudo else []), shlex.join(argv)])
    line = line if cwd == ROOT else f"cd {shlex.quote(str(cwd))} && {line}"

    def run() -> None:
        hidden = secret[1]() if secret else ""
        variables = {**owners_environment(), **(env or {}), **({secret[0]: hidden} if secret else {})}
        for left in reversed(range(tries)):
            said = ""
            if sudo:
                code = run_in_terminal(["sudo", *argv], env=variables, cwd=cwd)
            else:
                ended = run_program(argv, env=variables, cwd=cwd, timeout_s=_LONGEST_S)
                code, said = ended.exit_code, f": {last_words(ended)}"
            if code == 0 or may_fail:
                return
            if left:
                log.info("      exit code %s; trying again in %.0f s", code, _PAUSE_S)
                time.sleep(_PAUSE_S)
        raise MachineError(f"{line} ended with {code}{said.replace(hidden, '…') if hidden else said}", remedy)

    return Action(line, run, sudo=sudo)


def make_folder(path: Path, mode: str = "755") -> Action:
    """Make a folder and its parents."""
    return command("mkdir", "-p", "-m", mode, str(path))


def remove(path: Path) -> Action:
    """Remove a file or folder that setup made."""
    return command("rm", "-rf", str(path))


def write(path: Path, text: str) -> Action:
    """Write a file atomically."""

    def run() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode(), mode=0o644)

    return Action(f"write {path} ({len(text.encode())} bytes)", run, text)


def is_written(path: Path, text: str) -> bool:
    """Whether a file already has this text."""
    return path.is_file() and path.read_bytes() == text.encode()


def file_step(path: Path, text: str, finding: str) -> StepReport:
    """Have a file with this text."""
    if is_written(path, text):
        return done(str(path), finding)
    return todo(str(path), "missing, or not what is wanted now", actions=[write(path, text)])
