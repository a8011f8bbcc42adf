"""``kakeya_mac doctor``: what this checkout needs to use the bridge."""

from __future__ import annotations

from pathlib import Path

import click

from bridge.cli import echo_json

MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}


@click.command(
    epilog="""\b
Examples:
  kakeya_mac doctor
  kakeya_mac doctor --remote git@example.org:you/workload.git --json

Exit code 0: requests can be made from here (warnings included); 6: they cannot."""
)
@click.option("--remote", metavar="URL", help="Git remote that carries the bus (default: origin).")
@click.option("--json", "as_json", is_flag=True, help="One JSON line instead of text.")
def doctor(remote: str | None, as_json: bool) -> int:
    """Look at everything a request needs; say what was found, and how to fix what is missing."""
    from bridge import settings
    from bridge.client.doctor import Check, Level, examine

    checks: list[Check] = []
    for check in examine(settings.load(remote=remote), Path.cwd()):
        checks.append(check)
        if not as_json:
            click.echo(f"{MARKS[check.level]}  {check.name}: {check.finding}  [{check.looked_at}]")
            if check.fix:
                click.echo(f"      fix: {check.fix}")
    usable = all(check.level is not Level.FAIL for check in checks)
    if as_json:
        rows = [
            {"name": c.name, "level": c.level, "looked_at": c.looked_at, "finding": c.finding, "fix": c.fix}
            for c in checks
        ]
        code = 0 if usable else 6
        document = {"status": "ok" if usable else "fail", "exit_code": code, "checks": rows}
        echo_json(document, untrusted=("checks",))  # what a server says stands in them
    elif usable:
        click.echo("\nRequests can be made from here.")
    return 0 if usable else 6
