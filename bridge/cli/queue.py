"""``kakeya_mac queue``: what waits on the bus, what runs, and what ran last."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import click
from rich.table import Table

from bridge.bus.registry import read_registry
from bridge.cli import show, warn
from bridge.cli.options import json_option, option_with_default, remote_option
from bridge.cli.output import api_or_none, api_warnings, connect
from bridge.client import history
from bridge.client.remotes import Remote
from bridge.client.runners import expected_wait_s
from bridge.errors import BusError
from bridge.git.cache import GitCache
from bridge.github.dispatch import RunView, runs_by_nonce
from bridge.render.outcome import request_table, row_json


@click.command(
    epilog="""\b
Examples:
  kakeya_mac queue
  kakeya_mac queue --json --remote https://example.org/team/repo.git

JSON: one line {"requests": [...], "waiting": N, "running": N, "finished": [...]}. Each request has nonce,
preset, state, ahead (requesters take turns, so not all of them need to start first), expected_s, runner,
claim {standing, signer} (once a runner is trusted), attempt, requested_at, age_s, elapsed_s (running for),
beat_age_s, progress {done, total, step}, cancelling and run; `kakeya_mac status --help` says what they are. A
key that does not apply, or is not known, is null. finished are the newest of `kakeya_mac history`."""
)
@option_with_default(
    "--recent", type=click.IntRange(min=0), default=5, metavar="N", help="Finished requests shown below."
)
@json_option
@remote_option
def queue(recent: int, as_json: bool, remote: str | None) -> int:
    """What waits on the bus and what runs, the oldest first, and what ran last, on which Mac.

    Runners, progress and times are what the runners' heartbeats say; anyone with push rights can write one.
    Statuses are shown as published; `kakeya_mac result HANDLE` checks one.
    """
    link = connect(remote)
    cache = link.cache()
    open_rows = history.queue(cache, now=datetime.now(UTC), trusted=link.config.trusted_runners)
    rows = _with_expected_waits(open_rows, cache)
    runs = _find_runs(link.bus, rows)
    finished = history.history(cache, limit=recent).rows if recent else ()
    now, waiting = time.time(), sum(row.ahead is not None for row in rows)
    document = {
        "requests": [
            row_json(row, now) | {"run": runs[row.nonce].as_json() if row.nonce in runs else None}
            for row in rows
        ],
        "waiting": waiting,
        "running": len(rows) - waiting,
        "finished": [row_json(row, now) for row in finished],
    }
    lines = _lines(rows, runs, finished, now)
    return show(as_json, document, lines, untrusted=("requests", "finished"), note=bool(rows or finished))


def _lines(
    rows: Sequence[history.Row], runs: Mapping[str, RunView], finished: Sequence[history.Row], now: float
) -> Iterator[str | Table]:
    if rows:
        yield request_table(rows, now, runs=runs)
    else:
        yield "nothing waits and nothing runs"
    if any(row.ahead for row in rows):
        yield "requesters take turns: an older request need not start first"
    if finished:
        yield request_table(finished, now)


def _find_runs(bus: Remote, rows: Sequence[history.Row]) -> dict[str, RunView]:
    """The workflow runs of the rows, where there is a token."""
    github = api_or_none(bus) if rows else None
    if github is not None:
        with api_warnings():
            return runs_by_nonce(github, [row.nonce for row in rows])
    return {}


def _with_expected_waits(rows: Sequence[history.Row], cache: GitCache) -> Sequence[history.Row]:
    """The rows with each preset's median duration on live runners times the older requests."""
    if not any(row.ahead for row in rows):
        return rows
    try:
        live = read_registry(cache).live(datetime.now(UTC))
    except BusError as error:
        warn([f"cannot tell which runners are there: {error.message}"])
        return rows
    return [
        replace(row, expected_s=expected_wait_s(live, row.preset, row.ahead)) if row.preset else row
        for row in rows
    ]
