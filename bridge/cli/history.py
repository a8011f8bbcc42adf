"""``kakeya_mac history``: what ran, on branches and in the archive."""

from __future__ import annotations

import time

import click

from bridge import presets
from bridge.cli import show
from bridge.cli.completion import complete_preset
from bridge.cli.options import option_with_default
from bridge.cli.output import Connection, bus_command
from bridge.client.history import history as read_history
from bridge.client.recent import remember
from bridge.protocol.result import Status
from bridge.render.outcome import request_table, row_json


@click.command(
    epilog="""\b
Examples:
  kakeya_mac history
  kakeya_mac history -n 100 --preset throughput --status failed
  kakeya_mac history --json

JSON: {"requests": [...], "complete": BOOL}; each request has handle, nonce, preset, requested_by (as it
says), requested_at, age_s, state (finished), terminal (true), status, reason (null: not readable), runner,
attempt, started_at, finished_at, elapsed_s (took), expired, archived and commit_measured (false: its preset
runs the installed engine and reads nothing of the commit; null: the preset is not installed here).
complete is false where a filter gave up before the oldest request."""
)
@option_with_default("-n", "count", type=click.IntRange(1), default=20, help="So many at most.")
@click.option(
    "--preset", metavar="NAME", help="Only requests of this preset.", shell_complete=complete_preset
)
@click.option(
    "--status", type=click.Choice([each.value for each in Status]), help="Only requests that ended so."
)
@bus_command
def history(link: Connection, count: int, preset: str | None, status: str | None, as_json: bool) -> int:
    """The newest finished requests, the retired ones in the archive included.

    Statuses are shown as published and not checked; `kakeya_mac result HANDLE` checks digests, signature and
    evidence of one.
    """
    wanted = None if status is None else Status(status)
    rows, is_complete = read_history(link.cache(), limit=count, preset=preset, status=wanted)
    remember(link.config.state_dir, [(row.nonce, row.preset) for row in reversed(rows)])
    now, installed = time.time(), presets.load_all(link.config.presets)
    none = "no finished request" + ("" if preset is None and status is None else " of that kind")
    document = {"requests": [row_json(row, now, installed) for row in rows], "complete": is_complete}
    lines = request_table(rows, now, installed) if rows else [none]
    show(as_json, document, lines, untrusted=("requests",), note=bool(rows))
    if not as_json and not is_complete:
        click.echo("older requests were not looked through", err=True)
    return 0
