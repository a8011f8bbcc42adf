"""Set a Mac up as a runner, and take it down again: ``scripts/setup_mac.sh``, ``kakeya_mac runner setup``.

All of it runs before anything is installed: only the standard library and modules that need no more.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bridge.errors import MachineError
from bridge.proc import ProgramResult, run_in_terminal, run_program, write_atomic

log = logging.getLogger(__name__)

ROOT = Path("/")  # programs start here, never in the current folder, which may hold anything
ANSWER_S = 30.0
_STOPS = ("machine", "environment")  # nothing after these makes sense while they are missing
_RUNNERS_TOKEN = "ACTIONS_RUNNER_INPUT_TOKEN"  # noqa: S105 - a variable's name
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


# A step looks at one part of the Mac, changes nothing, and says what would bring it there.
Look = Callable[[], StepReport]
Step = tuple[str, Look]

done = partial(StepReport, "done")
advice = partial(StepReport, "advice")
missing = partial(StepReport, "missing")


def todo(looked_at: str | Path, finding: str, *actions: Action) -> StepReport:
    """What setup can bring there by itself."""
    return StepReport("to do", looked_at, finding, actions=actions)


def owners_environment() -> dict[str, str]:
    """The environment of setup's programs: the owner's (proxies, Homebrew), in a C locale."""
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
    token: Callable[[], str] | None = None,
    sudo: bool = False,
    may_fail: bool = False,
    remedy: str | None = None,
) -> Action:
    """Run a program. `token` returns the one that GitHub's runner reads; it is never shown."""
    words = [*(["sudo"] if sudo else []), *map(str, argv)]
    line = f"{_RUNNERS_TOKEN}=… {shlex.join(words)}" if token else shlex.join(words)

    def run() -> None:
        env, said, secret = owners_environment(), "", token() if token else ""
        if sudo:
            code = run_in_terminal(words, env=env, cwd=ROOT)
        else:
            env |= {_RUNNERS_TOKEN: secret} if secret else {}
            ended = run_program(words, env=env, cwd=ROOT, timeout_s=3600.0)
            code, said = ended.exit_code, f": {last_words(ended)}"
            said = said.replace(secret, "…") if secret else said
        if code != 0 and not may_fail:
            raise MachineError(f"{line} ended with {code}{said}", remedy)

    return Action(line, run, sudo=sudo)


make_folder = partial(command, "mkdir", "-p", "-m", "755")
remove = partial(command, "rm", "-rf")


def write(path: Path, text: str) -> Action:
    """Write a file atomically."""

    def run() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode(), mode=0o644)

    return Action(f"write {path} ({len(text.encode())} bytes)", run, text)


def have_files(files: dict[Path, str], *before: Action) -> StepReport:
    """Have these files with their texts."""
    wrong = {path: text for path, text in files.items() if not path.is_file() or path.read_text() != text}
    if not wrong:
        return done(next(iter(files)), "as it should be")
    writes = [write(path, text) for path, text in wrong.items()]
    return todo(next(iter(wrong)), "missing, or not what is wanted now", *before, *writes)


def walk(steps: Iterable[Step], mode: str, sudo: bool) -> list[dict[str, Any]]:
    """Report every step: in the mode ``plan`` with what would be done; ``setup`` and ``uninstall`` do it."""
    results: list[dict[str, Any]] = []
    for name, look in steps:
        failed = {result["name"] for result in results if result["state"] in ("to do", "missing")}
        stops = failed.intersection(_STOPS) if mode == "setup" else failed
        if stops and mode in ("setup", "uninstall") and not name.startswith("service "):
            log.info("the rest waits until that is settled")
            break
        report, lines = _look(look, sudo), list[str]()
        if mode in ("setup", "uninstall") and report.state == "to do":
            log.info("%s: %s", name, report.finding)
            lines = [action.line for action in report.actions]
            report = _apply(report, look, sudo)
        log.info("%-8s %s: %s  [%s]", report.state, name, report.finding, report.looked_at)
        if report.fix:
            log.info("      fix: %s", report.fix)
        would = report.actions if mode == "plan" else ()
        for action in would:
            content = "".join(f"\n             | {line}" for line in action.content.splitlines())
            log.info("      would: %s%s", action.line, content)
        found = {key: str(getattr(report, key)) for key in ("state", "looked_at", "finding", "fix")}
        results.append({"name": name, **found, "done": lines, "would": [action.line for action in would]})
    return results


def _look(look: Look, sudo: bool) -> StepReport:
    """A step's report; what needs an administrator is missing where setup may not use sudo."""
    report = look()
    if sudo or not any(action.sudo for action in report.actions):
        return report
    fix = f"setup with --sudo, or an administrator types: {'; '.join(a.line for a in report.actions)}"
    return replace(report, state="missing" if report.state == "to do" else report.state, fix=fix)


def _apply(report: StepReport, look: Look, sudo: bool) -> StepReport:
    try:
        for action in report.actions:
            log.info("      $ %s", action.line)
            action.run()
    except (MachineError, OSError) as error:
        fix = getattr(error, "remedy", None) or "mend that, and run it again"
        return missing(report.looked_at, str(error), fix)
    return _look(look, sudo)
