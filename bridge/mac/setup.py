"""``setup``, ``check`` and ``uninstall``: run the steps, say what became of each, exit with a code."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError, MachineError
from bridge.mac.actions import StepReport, missing
from bridge.mac.options import SetupOptions, parser
from bridge.mac.steps import Steps, removal_steps, self_test, setup_steps

log = logging.getLogger("bridge.mac")

# Nothing after these makes sense while they are missing.
_STOPS = ("machine", "environment")


def main(argv: Sequence[str]) -> int:
    """Run ``setup`` (the default), ``check`` or ``uninstall`` with flags, and return the exit code."""
    flags = parser().parse_args(list(argv))
    log.handlers[:] = [logging.StreamHandler(sys.stderr if flags.json else sys.stdout)]
    log.setLevel(logging.INFO)
    log.propagate = False
    if flags.dry_run:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that went away (`| head`) ends it
    try:
        return _run(flags)
    except BridgeError as error:
        return _fail(flags, error.message, error.remedy, error.exit_code)
    except KeyboardInterrupt:
        return _fail(flags, "interrupted; a second run goes on from here", None, 1)
    except Exception as error:
        traceback.print_exc()
        return _fail(flags, f"our own bug: {type(error).__name__}: {error}", "please report it", 70)


def _fail(flags: argparse.Namespace, message: str, remedy: str | None, code: int) -> int:
    print(f"error: {message}", *([f"  {remedy}"] if remedy else []), sep="\n", file=sys.stderr)
    if flags.json:
        print(json.dumps({"error": message, "remedy": remedy, "exit_code": code}, sort_keys=True))
    return code


def _run(flags: argparse.Namespace) -> int:
    options, name = SetupOptions(flags), flags.command
    is_plan, is_change = (flags.dry_run is wanted and name != "check" for wanted in (True, False))
    walk = partial(_walk, sudo=options.sudo, name=name, plan=is_plan, change=is_change)
    results = walk(removal_steps(options) if name == "uninstall" else setup_steps(options))
    changed = any(result["done"] for result in results)
    if name == "setup" and (is_plan or (options.program.exists() and results[-1]["name"] not in _STOPS)):
        with tempfile.TemporaryDirectory(prefix="kakeya-mac-test-") as folder:
            (test,) = walk([("self-test", partial(self_test, options, Path(folder)))])
        results.append({**test, "done": []} | ({"state": "advice"} if is_plan else {}))
    unready = [result["name"] for result in results if result["state"] not in ("done", "advice")]
    if is_plan:
        log.info("\nNothing was changed: this was a dry run.")
    elif unready:
        log.info("\nNot %s: %s.", "removed" if name == "uninstall" else "ready", ", ".join(unready))
    elif name == "uninstall":
        log.info("\nRemoved. %s", _left(options))
    else:
        log.info("\nReady." if changed else "\nReady; nothing had to be changed.")
    code = 0 if is_plan or not unready else 1
    if flags.json:
        document = {"command": name, "dry_run": flags.dry_run, "ready": not unready, "changed": changed}
        print(json.dumps({**document, "steps": results, "exit_code": code}, sort_keys=True), flush=True)
    return code


def _left(options: SetupOptions) -> str:
    """What stays, because it is the owner's."""
    return (
        f"Left: models ({options.models}), the policy and its folder ({options.config_dir}), state with"
        f" the key that signs results ({options.state_dir}), logs ({options.prefix / 'logs'}), git-lfs's"
        " filter (~/.gitconfig), the power settings (pmset), tailscale, results on the remote, and a deploy"
        " key that the server was given."
    )


def _walk(steps: Steps, *, sudo: bool, name: str, plan: bool, change: bool) -> list[dict[str, Any]]:
    """Report every step: with `plan` what would be done, with `change` after doing it."""
    results: list[dict[str, Any]] = []
    for step, look in steps:
        has_failed = any(result["state"] == "missing" for result in results)
        if has_failed and change and name == "uninstall" and not step.startswith("service "):
            log.info("the rest stays until that is settled")
            break
        report, lines = _look(look, sudo=sudo), list[str]()
        if change and report.state == "to do":
            report, lines = _apply(step, report, partial(_look, look, sudo=sudo))
        log.info("%-8s %s: %s  [%s]", report.state, step, report.finding, report.looked_at)
        if report.fix:
            log.info("      fix: %s", report.fix)
        would = report.actions if plan else ()
        for action in would:
            content = "".join(f"\n             | {line}" for line in action.content.splitlines())
            log.info("      would: %s%s", action.line, content)
        found = {name: getattr(report, name) for name in ("state", "looked_at", "finding", "fix")}
        results.append({"name": step, **found, "done": lines, "would": [action.line for action in would]})
        if change and name == "setup" and step in _STOPS and not report.is_ready:
            log.info("nothing after this makes sense before it is settled")
            break
    return results


def _look(look: Callable[[], StepReport], *, sudo: bool) -> StepReport:
    """A step's report; what needs an administrator is missing where setup may not use sudo."""
    report = look()
    if sudo or not any(action.sudo for action in report.actions):
        return report
    typed = "; ".join(action.line for action in report.actions)
    fix = f"setup with --sudo, or an administrator types: {typed}"
    return replace(report, state="missing" if report.state == "to do" else report.state, fix=fix)


def _apply(step: str, report: StepReport, look: Callable[[], StepReport]) -> tuple[StepReport, list[str]]:
    """Do what a step asks for; its report afterwards, and the lines that a person would have typed."""
    log.info("%s: %s", step, report.finding)
    try:
        for action in report.actions:
            log.info("      $ %s", action.line)
            action.run()
        after = look()
    except (MachineError, OSError) as error:
        fix = getattr(error, "remedy", None) or "mend that, and run it again"
        return missing(report.looked_at, str(error), fix), []
    if after.state == "to do":
        after = replace(after, state="missing", fix="still so: please report this bug")
    return after, [action.line for action in report.actions]
