"""``kakeya_mac queue``: what waits on the bus, what runs, and what ran last."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime

import click

from bridge import presets
from bridge.bus.registry import read_registry
from bridge.cli import show, warn
from bridge.cli.options import option_with_default
from bridge.cli.output import Connection, api_warnings, bus_command
from bridge.client import history, runners
from bridge.client.recent import remember
from bridge.errors import BusError
from bridge.github.dispatch import FoundRun, runs_by_nonce
from bridge.render.outcome import request_table, row_json


@click.command(
    epilog="""\b
Examples:
  kakeya_mac queue
  kakeya_mac queue --json --remote https://example.org/team/repo.git

JSON: {"requests": [...], "waiting": N, "running": N, "finished": [...]}; each request has handle, nonce,
preset, requested_by, requested_at, age_s, state, terminal, ahead, expected_s, eta_s, expired, runner, claim
{standing, signer}, attempt, started_at, elapsed_s, beat_age_s, progress {done, total, step}, tokens_per_s,
cancelling, commit_measured, run and run_problem; see `kakeya_mac status --help`."""
)
@option_with_default("--recent", type=click.IntRange(0), default=5, help="Finished requests below.")
@bus_command
def queue(link: Connection, recent: int, as_json: bool) -> int:
    """What waits on the bus and what runs, the oldest first, and what ran last, on which Mac.

    Runners, progress and times are what the runners' heartbeats say; anyone with push rights can write one.
    Statuses are shown as published; `kakeya_mac result HANDLE` checks one. Requesters take turns: an older
    request need not start first.
    """
    cache = link.cache()
    rows = history.queue(cache, now=datetime.now(UTC), trusted=link.config.trusted_runners)
    found, github = dict[str, FoundRun](), link.api() if rows else None
    if github is not None:
        with api_warnings():
            found = runs_by_nonce(github, [row.nonce for row in rows])
    runs = {nonce: each.run for nonce, each in found.items() if each.run is not None}
    problems = {nonce: text for nonce, each in found.items() if (text := each.problem(nonce)) is not None}
    if problems:
        # A run may have published its result after the first look; of a daemon's request it gives none.
        rows = history.queue(cache, now=datetime.now(UTC), trusted=link.config.trusted_runners)
        actions = history.for_workflows(cache, [row for row in rows if row.nonce in problems])
        problems = {nonce: text for nonce, text in problems.items() if nonce in actions}
    if rows:
        try:
            live = read_registry(cache).live(datetime.now(UTC))
            rows = [_with_times(row, runners.typical_duration_s(live, row.preset)) for row in rows]
        except BusError as error:
            warn([f"cannot tell which runners are there: {error.message}"])
    finished = history.history(cache, limit=recent)[0] if recent else ()
    remember(link.config.state_dir, [(row.nonce, row.preset) for row in (*reversed(finished), *rows)])
    installed = presets.load_all(link.config.presets)
    now, waiting = time.time(), sum(row.ahead is not None for row in rows)
    run_json = {nonce: run.as_json() for nonce, run in runs.items()}
    document = {
        "requests": [
            row_json(row, now, installed)
            | {"run": run_json.get(row.nonce), "run_problem": problems.get(row.nonce)}
            for row in rows
        ],
        "waiting": waiting,
        "running": len(rows) - waiting,
        "finished": [row_json(row, now, installed) for row in finished],
    }
    lines = request_table(rows, now, installed, runs) if rows else ["nothing waits and nothing runs"]
    lines += [f"{nonce}: {text}" for nonce, text in problems.items()]
    lines += request_table(finished, now, installed) if finished else []
    return show(as_json, document, lines, untrusted=("requests", "finished"), note=bool(rows or finished))


def _with_times(row: history.Row, typical_s: float | None) -> history.Row:
    """A request with when it is likely to start and to end."""
    eta_s = runners.eta_s(typical_s, ahead=row.ahead, elapsed_s=row.elapsed_s, progress=row.progress)
    return replace(row, expected_s=runners.expected_wait_s(typical_s, row.ahead), eta_s=eta_s)
