"""Set a Mac up as a runner, and take it down again: ``scripts/setup_mac.sh``, ``kakeya_mac runner setup``.

options.py is what the owner asks for, setup.py the steps in their order, launchd.py the services. Here is
what a step reports, and the changes it proposes: a dry run prints them, setup runs them. It all runs before
anything is installed: only the standard library and `bridge`, `bridge.errors`, `proc`, `weights` and
`interpreter` may be imported.
"""

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
    """What a step found, where it looked, what a person can do, and what setup would do about it."""

    state: str  # ``done``, ``to do``, ``advice`` (ready nevertheless) or ``missing`` (a person has to act)
    looked_at: str | Path
    finding: str
    fix: str = ""
    actions: Sequence[Action] = ()


done = partial(StepReport, "done")
advice = partial(StepReport, "advice")
missing = partial(StepReport, "missing")


def todo(looked_at: str | Path, finding: str, *actions: Action) -> StepReport:
    """What setup can bring there by itself."""
    return StepReport("to do", looked_at, finding, actions=actions)


def owners_environment() -> dict[str, str]:
    """The environment of setup's programs: the owner's (proxies, Homebrew, gh), in a C locale."""
    return {**{name: value for name, value in os.environ.items() if name not in _DROPPED}, "LC_ALL": "C"}


def answer(*argv: str | Path) -> str | None:
    """What a program prints; None if it is missing or fails."""
    try:
        ended = run_program([*map(str, argv)], env=owners_environment(), cwd=ROOT, timeout_s=ANSWER_S)
    except MachineError:
        return None
    return ended.stdout.decode("utf-8", "replace").strip() if ended.ok else None


def last_words(ended: ProgramResult) -> str:
    """The end of a program's output in one printable line."""
    lines = (ended.stderr or ended.stdout).decode("utf-8", "replace").strip().splitlines()
    return "".join(c if c.isprintable() else "?" for c in " | ".join(lines[-6:]))[:2000]


def command(
    *argv: str | Path,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    secret: tuple[str, Callable[[], str]] | None = None,
    sudo: bool = False,
    may_fail: bool = False,
    tries: int = 1,
    remedy: str | None = None,
) -> Action:
    """Run a program. `secret` is a variable and the function that returns its value, which is never shown."""
    words = [*(["sudo"] if sudo else []), *map(str, argv)]
    shown = [f"{name}={shlex.quote(value)}" for name, value in (env or {}).items()]
    shown += [f"{secret[0]}=…"] if secret else []
    line = " ".join([*shown, shlex.join(words)])
    line = line if cwd == ROOT else f"cd {shlex.quote(str(cwd))} && {line}"

    def run() -> None:
        hidden, said = secret[1]() if secret else "", ""
        variables = {**owners_environment(), **(env or {}), **({secret[0]: hidden} if secret else {})}
        for left in reversed(range(tries)):
            if sudo:
                code = run_in_terminal(words, env=variables, cwd=cwd)
            else:
                ended = run_program(words, env=variables, cwd=cwd, timeout_s=_LONGEST_S)
                code, said = ended.exit_code, f": {last_words(ended)}"
            if code == 0 or may_fail:
                return
            if left:
                log.info("      exit code %s; trying again in %.0f s", code, _PAUSE_S)
                time.sleep(_PAUSE_S)
        raise MachineError(f"{line} ended with {code}{said.replace(hidden, '…') if hidden else said}", remedy)

    return Action(line, run, sudo=sudo)


make_folder = partial(command, "mkdir", "-p", "-m", "755")
make_private_folder = partial(command, "mkdir", "-p", "-m", "700")
remove = partial(command, "rm", "-rf")


def write(path: Path, text: str) -> Action:
    """Write a file atomically."""

    def run() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode(), mode=0o644)

    return Action(f"write {path} ({len(text.encode())} bytes)", run, text)


def is_written(path: Path, text: str) -> bool:
    """Whether a file already has this text."""
    return path.is_file() and path.read_bytes() == text.encode()
