"""``kakeya_mac doctor``: what this machine needs for its part in the bridge."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click

from bridge import interpreter, settings
from bridge.cli import show
from bridge.cli.options import json_option, remote_option
from bridge.doctor import Level, examine


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
    "--role", type=click.Choice(["client", "runner", "ci"]), help="Which part is meant (default: found out)."
)
@remote_option
@click.option("--allow-public", is_flag=True, help="A public repository with a self-hosted runner is meant.")
@json_option
def doctor(role: str | None, remote: str | None, allow_public: bool, as_json: bool) -> int:
    """Look at everything this machine's part needs; say what was found, and how to fix what is missing."""
    role = role or detect()
    checks = list(examine(role, settings.load(remote=remote), Path.cwd(), allow_public=allow_public))
    failed = sum(check.level is Level.FAIL for check in checks)
    warned = sum(check.level is Level.WARN for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.level.upper():<4}  {check.name}: {check.finding}  [{check.looked_at}]")
        lines += [f"      fix: {check.fix}"] if check.fix else []
    counts = f"{failed} failed, {warned} warning(s)" if failed or warned else "ready"
    lines.append(f"\n{role}: {counts}")
    document = {
        "role": role,
        "status": "fail" if failed else "ok",
        "checks": [asdict(check) for check in checks],
        "exit_code": 6 if failed else 0,
    }
    return show(as_json, document, lines, untrusted=("checks",))  # they quote the server


def detect() -> str:
    """``ci`` inside a workflow, ``runner`` where setup made this environment, else ``client``."""
    if os.environ.get("GITHUB_ACTIONS") == "true":
        return "ci"
    return "runner" if interpreter.record_path().exists() else "client"
