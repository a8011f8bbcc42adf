"""``kakeya_mac history``: what ran, on branches and in the archive."""

from __future__ import annotations

import time

import click

from bridge.cli import show
from bridge.cli.options import json_option, option_with_default, remote_option
from bridge.cli.output import connect
from bridge.client.history import history as read_history
from bridge.protocol.result import Status
from bridge.render.outcome import request_table, row_json

_STATUSES = ("passed", "failed", "refused", "rejected", "cancelled", "lost")


@click.command(
    epilog="""\b
Examples:
  kakeya_mac history
  kakeya_mac history -n 100 --preset throughput --status failed
  kakeya_mac history --json

JSON: one line {"requests": [...], "complete": BOOL}. Each request has nonce, preset, state (finished), status
and reason (null where its result cannot be read), runner, attempt, requested_at, age_s, elapsed_s (took),
finished_at and archived. complete is false where a filter gave up before the oldest request.

Without partial clones on the server the first look into the archive fetches all of it."""
)
@option_with_default("-n", "count", type=click.IntRange(min=1), default=20, help="So many at most.")
@click.option("--preset", metavar="NAME", help="Only requests of this preset.")
@click.option("--status", type=click.Choice(_STATUSES), help="Only requests that ended so.")
@json_option
@remote_option
def history(count: int, preset: str | None, status: str | None, as_json: bool, remote: str | None) -> int:
    """The newest finished requests, the retired ones in the archive included.

    Statuses are shown as published and not checked; `kakeya_mac result HANDLE` checks digests, signature and
    evidence of one.
    """
    wanted = None if status is None else Status(status)
    found, now = read_history(connect(remote).cache(), limit=count, preset=preset, status=wanted), time.time()
    none = "no finished request" + ("" if preset is None and status is None else " of that kind")
    document = {"requests": [row_json(row, now) for row in found.rows], "complete": found.complete}
    lines = [request_table(found.rows, now) if found.rows else none]
    show(as_json, document, lines, untrusted=("requests",), note=bool(found.rows))
    if not as_json and found.rows:
        click.echo("statuses as published; `kakeya_mac result HANDLE` checks one", err=True)
    if not as_json and not found.complete:
        click.echo("older requests were not looked through", err=True)
    return 0
