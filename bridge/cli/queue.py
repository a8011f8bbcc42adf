"""``kakeya_mac queue``: what waits on the bus, what runs, and what ran last."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from bridge.cli import echo_json, note_untrusted
from bridge.cli.options import remote_option

if TYPE_CHECKING:
    from bridge.client.history import Row
    from bridge.client.remotes import Remote
    from bridge.git.cache import GitCache
    from bridge.github.dispatch import RunView


@click.command(
    epilog="""\b
Examples:
  kakeya_mac queue
  kakeya_mac queue --json --remote https://example.org/team/repo.git

JSON: one line {"requests": [...], "waiting": N, "running": N, "finished": [...]}. Each request has nonce,
preset, state (queued, claimed, workspace, running, gating, publishing), ahead (older ones that wait too;
requesters take turns, so not all of them need to start first), expected_s (the preset's median duration
times those), runner, claim {standing, signer} (once a runner is trusted), attempt, requested_at, age_s,
elapsed_s (running for), beat_age_s (since its runner's last heartbeat, by that machine's clock), progress
{done, total, step}, cancelling and run (its workflow run over GitHub Actions, where there is a token: id,
url, state, conclusion, attempt, machine, job, step); a key that does not apply, or is not known, is null.
finished are the newest of `kakeya_mac history`."""
)
@click.option(
    "--recent",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    metavar="N",
    help="ProgramResult requests shown below.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON line instead of a table.")
@remote_option
def queue(recent: int, as_json: bool, remote: str | None) -> int:
    """What waits on the bus and what runs, the oldest first, and what ran last, on which Mac.

    Runners, progress and times are what the runners' heartbeats say; anyone with push rights can write one.
    Statuses are shown as published; `kakeya_mac result HANDLE` checks one.
    """
    from bridge.cli.output import connect
    from bridge.client.history import history
    from bridge.client.history import queue as open_requests
    from bridge.client.remotes import open_cache
    from bridge.render.lists import request_table, row_json
    from bridge.render.terminal import console

    config, git, bus = connect(remote)
    cache = open_cache(config.state_dir, bus, git)
    rows = open_requests(cache, now=datetime.now(UTC), trusted=config.trusted_runners)
    rows = _with_expected_waits(rows, cache)
    runs = _find_runs(bus, rows)
    ran = history(cache, limit=recent).rows if recent else ()
    waiting = sum(row.ahead is not None for row in rows)
    now = time.time()
    if as_json:
        echo_json(
            {
                "requests": [
                    {**row_json(row, now), "run": runs[row.nonce].as_json() if row.nonce in runs else None}
                    for row in rows
                ],
                "waiting": waiting,
                "running": len(rows) - waiting,
                "finished": [row_json(row, now) for row in ran],
            },
            untrusted=("requests", "finished"),
        )
        return 0
    out = console()
    if rows:
        out.print(request_table(rows, now, out.width, runs))
        if any(row.ahead for row in rows):
            click.echo("requesters take turns: an older request need not start first")
    else:
        click.echo("nothing waits and nothing runs")
    if ran:
        out.print(request_table(ran, now, out.width))
    if rows or ran:
        note_untrusted()
    return 0


def _find_runs(bus: Remote, rows: Sequence[Row]) -> dict[str, RunView]:
    """The workflow runs of the rows, where there is a token."""
    from bridge.cli.workflow_runs import api_or_none, warn_api
    from bridge.errors import ApiError
    from bridge.github.dispatch import runs_by_nonce

    github = api_or_none(bus) if rows else None
    if github is None:
        return {}
    try:
        return runs_by_nonce(github, [row.nonce for row in rows])
    except ApiError as error:
        warn_api(error)
        return {}


def _with_expected_waits(rows: Sequence[Row], cache: GitCache) -> list[Row]:
    """The rows with each preset's median duration on live runners times the older requests."""
    from bridge.bus.registry import read_registry
    from bridge.cli.output import warn
    from bridge.client.runners import expected_wait_s
    from bridge.errors import BusError

    if not any(row.ahead for row in rows):
        return list(rows)
    try:
        live = read_registry(cache).live(datetime.now(UTC))
    except BusError as error:
        warn([f"cannot tell which runners are there: {error.message}"])
        return list(rows)
    return [
        replace(row, expected_s=expected_wait_s(live, row.preset, row.ahead)) if row.preset else row
        for row in rows
    ]
