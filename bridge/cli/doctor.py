"""``kakeya_mac doctor``: what this machine needs for its part in the bridge."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bridge.cli import echo_json

if TYPE_CHECKING:
    from bridge.doctor import Check
    from bridge.settings import Settings

MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}
READY = {
    "client": "Requests can be made from here.",
    "runner": "This machine can serve requests.",
    "ci": "This job can ask for runs.",
}
UNREADY = {
    "client": "Requests cannot be made from here",
    "runner": "This machine cannot serve requests",
    "ci": "This job cannot ask",
}


@click.command(
    epilog="""\b
Examples:
  kakeya_mac doctor
  kakeya_mac doctor --remote git@example.org:you/workload.git --json
  kakeya_mac doctor --role runner        # on the Mac
  kakeya_mac doctor --role ci            # in a step of a workflow

\b
JSON: role, status (ok, fail), checks [{name, level (ok, warn, fail), looked_at, finding, fix}], exit_code.
Exit code 0: the role can be played from here (warnings included); 6: it cannot."""
)
@click.option(
    "--role",
    type=click.Choice(("client", "runner", "ci")),
    help="Which part is meant (default: ci inside a workflow, runner where `runner setup` was, else client).",
)
@click.option(
    "--remote",
    metavar="URL",
    help="Git remote that carries the bus (default: setup's, else origin).",
)
@click.option("--allow-public", is_flag=True, help="A public repository with a self-hosted runner is meant.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line instead of text.")
def doctor(role: str | None, remote: str | None, allow_public: bool, as_json: bool) -> int:
    """Look at everything this machine's part needs; say what was found, and how to fix what is missing."""
    from bridge import settings
    from bridge.doctor import Level

    role = role or detect()
    checks: list[Check] = []
    for check in _examine(role, settings.load(remote=remote), allow_public=allow_public):
        checks.append(check)
        if not as_json:
            click.echo(f"{MARKS[check.level]}  {check.name}: {check.finding}  [{check.looked_at}]")
            if check.fix:
                click.echo(f"      fix: {check.fix}")
    usable = all(check.level is not Level.FAIL for check in checks)
    code = 0 if usable else 6
    if as_json:
        rows = [
            {"name": c.name, "level": c.level, "looked_at": c.looked_at, "finding": c.finding, "fix": c.fix}
            for c in checks
        ]
        document = {"role": role, "status": "ok" if usable else "fail", "exit_code": code, "checks": rows}
        echo_json(document, untrusted=("checks",))  # what a server says stands in them
        return code
    warned = sum(check.level is Level.WARN for check in checks)
    if usable and role == "ci" and warned:  # a warning may say that nothing can be asked
        click.echo(f"\nNo check failed, {warned} gave a warning.")
    elif usable:
        click.echo(f"\n{READY[role]}")
    else:
        failed = sum(check.level is Level.FAIL for check in checks)
        click.echo(f"\n{UNREADY[role]}: {failed} check{'s' * (failed > 1)} failed.")
    return code


def detect(environ: Mapping[str, str] | None = None) -> str:
    """``ci`` inside a workflow, ``runner`` where setup made this environment, else ``client``."""
    from bridge import interpreter

    environ = os.environ if environ is None else environ
    if environ.get("GITHUB_ACTIONS") == "true":
        return "ci"
    return "runner" if interpreter.record_path().exists() else "client"


def _examine(role: str, config: Settings, *, allow_public: bool) -> Iterator[Check]:
    from bridge.doctor import client

    if role != "runner":
        return client.examine(config, Path.cwd(), allow_public=allow_public, is_job=role == "ci")
    from bridge.doctor import runner  # a client needs no runner's code

    return runner.examine(config, Path.cwd(), allow_public=allow_public)
