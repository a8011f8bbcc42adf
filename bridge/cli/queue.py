"""``kakeya_mac queue``: what waits on the bus, what runs, and what ran last."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bridge.cli import echo_json, note_untrusted

if TYPE_CHECKING:
    from bridge.client.history import Row
    from bridge.client.lookout import Lookout
    from bridge.client.remotes import Remote
    from bridge.client.runs import RunView

# Presets of which it is worked out how long they wait: anybody may have asked for thousands.
_FORECASTS = 50


@click.command(
    epilog="""\b
Examples:
  kakeya_mac queue
  kakeya_mac queue --json --remote https://example.org/team/repo.git

JSON: one line {"requests": [...], "waiting": N, "running": N, "finished": [...]}. Each request has nonce,
preset, state (queued, claimed, workspace, running, gating, publishing), ahead (older ones that wait too;
requesters take turns, so not all of them need to start first), expected_s (until it is likely to start, from
what live runners say), runner, claim {standing, signer}
(once a runner is trusted), attempt, requested_at, age_s, elapsed_s (running for), beat_age_s (since its
runner's last sign, by that machine's clock), progress {done, total, step}, cancelling and run (its workflow
run over GitHub Actions, where there is a token: id, url, state, conclusion, attempt, machine, job, step); a
key that does not apply, or is not known, is null.
finished are the newest of `kakeya_mac history`."""
)
@click.option(
    "--recent",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    metavar="N",
    help="Finished requests shown below.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON line instead of a table.")
@click.option("--remote", metavar="URL", help="Git remote that carries the bus (default: origin).")
def queue(recent: int, as_json: bool, remote: str | None) -> int:
    """What waits on the bus and what runs, the oldest first, and what ran last, on which Mac.

    Runners, progress and times are what the runners' heartbeats say; anyone with push rights can write one.
    Statuses are shown as published; `kakeya_mac result HANDLE` checks one.
    """
    from bridge import settings
    from bridge.bus.git import Git
    from bridge.client.history import history
    from bridge.client.history import queue as open_requests
    from bridge.client.lookout import Lookout
    from bridge.client.remotes import resolve_remote
    from bridge.render.queue import history_table, queue_table, row_json
    from bridge.render.tables import console

    config, git = settings.load(remote=remote), Git(Path.cwd())
    bus = resolve_remote(git, config.remote)
    lookout = Lookout(git, bus.address, config.trusted_runners)
    rows = open_requests(
        config.state_dir,
        bus.address,
        origin=git,
        now=datetime.now(UTC),
        trusted=config.trusted_runners,
    )
    rows = _with_waits(rows, lookout)
    runs = _runs(bus, rows)
    ran = history(config.state_dir, bus.address, origin=git, limit=recent).rows if recent else ()
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
        out.print(queue_table(rows, now, out.width, runs))
        if any(row.ahead for row in rows):
            click.echo("requesters take turns: an older request need not start first")
    else:
        click.echo("nothing waits and nothing runs")
    if ran:
        out.print(history_table(ran, now, out.width))
    if rows or ran:
        note_untrusted()
    return 0


def _runs(bus: Remote, rows: Sequence[Row]) -> dict[str, RunView]:
    """The workflow runs of the rows, where there is a token; what is wrong is a warning."""
    from bridge.cli.attending import usable_api, warn
    from bridge.client.runs import runs_by_nonce
    from bridge.errors import ApiError

    github = usable_api(bus) if rows else None
    if github is None:
        return {}
    try:
        return runs_by_nonce(github, [row.nonce for row in rows])
    except ApiError as error:
        warn(error)
        return {}


def _with_waits(rows: Sequence[Row], lookout: Lookout) -> list[Row]:
    """The rows with how long each is likely to wait; why nobody knows is a warning."""
    _, failure = lookout.result()
    if failure is not None and any(row.ahead is not None for row in rows):
        click.echo(f"warning: {failure}", err=True)
    running = sum(row.ahead is None for row in rows)
    presets = dict.fromkeys(row.preset for row in rows if row.ahead is not None and row.preset is not None)
    forecasts = {name: lookout.forecast(name, running=running) for name in list(presets)[:_FORECASTS]}

    def expected_s(row: Row) -> float | None:
        forecast = forecasts.get(row.preset or "")
        return None if row.ahead is None or forecast is None else forecast.wait_s(row.ahead)

    return [replace(row, expected_s=expected_s(row)) for row in rows]
