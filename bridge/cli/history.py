"""``kakeya_mac history``: what ran, on branches and in the archive."""

from __future__ import annotations

import time

import click

from bridge.cli import echo_json, note_untrusted
from bridge.cli.options import remote_option

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
@click.option(
    "-n", "count", type=click.IntRange(min=1), default=20, show_default=True, help="So many at most."
)
@click.option("--preset", metavar="NAME", help="Only requests of this preset.")
@click.option("--status", type=click.Choice(_STATUSES), help="Only requests that ended so.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line instead of a table.")
@remote_option
def history(count: int, preset: str | None, status: str | None, as_json: bool, remote: str | None) -> int:
    """The newest finished requests, the retired ones in the archive included.

    Statuses are shown as published and not checked; `kakeya_mac result HANDLE` checks digests, signature and
    evidence of one.
    """
    from bridge.cli.output import connect
    from bridge.client.history import history as read_history
    from bridge.client.remotes import open_cache
    from bridge.protocol.result import Status
    from bridge.render.lists import request_table, row_json
    from bridge.render.terminal import console

    config, git, bus = connect(remote)
    wanted = None if status is None else Status(status)
    cache = open_cache(config.state_dir, bus, git)
    found = read_history(cache, limit=count, preset=preset, status=wanted)
    if as_json:
        requests = [row_json(row, time.time()) for row in found.rows]
        echo_json({"requests": requests, "complete": found.complete}, untrusted=("requests",))
        return 0
    if found.rows:
        out = console()
        out.print(request_table(found.rows, time.time(), out.width))
        note_untrusted()
        click.echo("statuses as published; `kakeya_mac result HANDLE` checks one", err=True)
    else:
        click.echo("no finished request" + ("" if preset is None and status is None else " of that kind"))
    if not found.complete:
        click.echo("older requests were not looked through", err=True)
    return 0
