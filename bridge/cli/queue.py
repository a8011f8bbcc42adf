"""``kakeya_mac queue``: what waits on the bus and what runs."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import click

from bridge.cli import echo_json


@click.command(
    epilog="""\b
Examples:
  kakeya_mac queue
  kakeya_mac queue --json --remote https://example.org/team/repo.git

JSON: one line {"requests": [...], "waiting": N, "running": N}. Each request has nonce, preset, state (queued,
claimed, workspace, running, gating, publishing), ahead (older ones that wait too), runner, attempt,
requested_at, age_s, elapsed_s (running for), beat_age_s (since its runner's last sign, by that machine's
clock), progress {done, total, step} and cancelling; a key that does not apply is null."""
)
@click.option("--json", "as_json", is_flag=True, help="One JSON line instead of a table.")
@click.option("--remote", metavar="URL", help="Git remote that carries the bus (default: origin).")
def queue(as_json: bool, remote: str | None) -> int:
    """What waits on the bus and what runs, the oldest first.

    Runners, progress and times are what the runners' heartbeats say; anyone with push rights can write one.
    """
    from bridge import settings
    from bridge.bus.git import Git
    from bridge.client.history import queue as open_requests
    from bridge.client.remotes import resolve_remote
    from bridge.render.queue import queue_table, row_json

    config, git = settings.load(remote=remote), Git(Path.cwd())
    bus = resolve_remote(git, config.remote)
    rows = open_requests(config.state_dir, bus.address, origin=git, now=datetime.now(UTC))
    waiting = sum(row.ahead is not None for row in rows)
    if as_json:
        requests = [row_json(row, time.time()) for row in rows]
        echo_json({"requests": requests, "waiting": waiting, "running": len(rows) - waiting})
    elif not rows:
        click.echo("nothing waits and nothing runs")
    else:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 140).print(queue_table(rows, time.time()))
    return 0
