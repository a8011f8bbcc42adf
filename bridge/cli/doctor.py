"""``kakeya_mac doctor``: what this machine needs for its part in the bridge."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import click

from bridge import interpreter, settings
from bridge.cli import echo_json
from bridge.cli.options import json_option
from bridge.doctor import Check, Level, examine_client, examine_runner

MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}
READY = {
    "client": ("Requests can be made from here.", "Requests cannot be made from here"),
    "runner": ("This machine can serve requests.", "This machine cannot serve requests"),
    "ci": ("This job can ask for runs.", "This job cannot ask"),
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
    "--remote", metavar="URL", help="Git remote that carries the bus (default: setup's, else origin)."
)
@click.option("--allow-public", is_flag=True, help="A public repository with a self-hosted runner is meant.")
@json_option
def doctor(role: str | None, remote: str | None, allow_public: bool, as_json: bool) -> int:
    """Look at everything this machine's part needs; say what was found, and how to fix what is missing."""
    role = role or detect()
    config, here = settings.load(remote=remote), Path.cwd()
    if role == "runner":
        examined = examine_runner(config, here, allow_public=allow_public)
    else:
        examined = examine_client(config, here, allow_public=allow_public, is_job=role == "ci")
    checks: list[Check] = []
    for check in examined:
        checks.append(check)
        if not as_json:
            click.echo(f"{MARKS[check.level]}  {check.name}: {check.finding}  [{check.looked_at}]")
            if check.fix:
                click.echo(f"      fix: {check.fix}")
    failed = sum(check.level is Level.FAIL for check in checks)
    warned = sum(check.level is Level.WARN for check in checks)
    code = 6 if failed else 0
    if as_json:
        document = {"role": role, "status": "fail" if failed else "ok", "exit_code": code}
        rows = [asdict(check) for check in checks]
        echo_json({**document, "checks": rows}, untrusted=("checks",))  # they quote the server
    elif failed:
        click.echo(f"\n{READY[role][1]}: {failed} check{'s' * (failed > 1)} failed.")
    elif role == "ci" and warned:  # a warning may say that nothing can be asked
        click.echo(f"\nNo check failed, {warned} gave a warning.")
    else:
        click.echo(f"\n{READY[role][0]}")
    return code


def detect(environ: Mapping[str, str] | None = None) -> str:
    """``ci`` inside a workflow, ``runner`` where setup made this environment, else ``client``."""
    environ = os.environ if environ is None else environ
    if environ.get("GITHUB_ACTIONS") == "true":
        return "ci"
    return "runner" if interpreter.record_path().exists() else "client"
