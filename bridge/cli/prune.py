"""``kakeya_mac prune``: finished requests go into the archive, their refs are deleted."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

import click

from bridge.bus.archive import Pruned
from bridge.bus.archive import prune as archive_finished
from bridge.cli import show
from bridge.cli.options import json_option, option_with_default, remote_option
from bridge.cli.output import connect
from bridge.protocol.sanitize import clean_line

_UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}
_LONGEST_DAYS = 36_500
_INTERVAL_S = 2.0


def _duration(_context: click.Context, _parameter: click.Parameter, value: str) -> timedelta:
    """A length of time as it is typed: ``14d``, ``12h``, ``30m``, ``90s``."""
    match = re.fullmatch(r"([0-9]{1,9})([dhms])", value.strip())
    if match is None:
        raise click.BadParameter(f"{value!r} is not a duration; write it like 14d, 12h, 30m or 90s")
    length = timedelta(**{_UNITS[match[2]]: int(match[1])})
    if length.days > _LONGEST_DAYS:
        raise click.BadParameter(f"{value!r} is longer than {_LONGEST_DAYS} days")
    return length


@click.command(
    epilog="""\b
Examples:
  kakeya_mac prune --dry-run
  kakeya_mac prune --older-than 14d --keep 500
  kakeya_mac prune --older-than 12h --json

`result`, `status`, `logs`, `fetch` and `history` find archived requests as before. A request is left where it
is while it has no result, is in the inbox or claimed, when its result is younger than an hour, and when
its branch holds anything but a runner's own commit.

JSON: one line with dry_run, archived (nonces), deleted (refs), left ({nonce, ref, reason}), unfinished,
archive (commit), refused (the server's words, or null) and exit_code.

Exit code: 0; 6 when the server takes the archive but deletes no refs: nothing is lost then."""
)
@option_with_default(
    "--older-than",
    callback=_duration,
    default="14d",
    metavar="DURATION",
    help="Archive requests of this age.",
)
@option_with_default(
    "--keep",
    type=click.IntRange(min=0),
    default=500,
    help="Archive all but the newest N finished ones, whatever their age.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be archived; change nothing on the remote.")
@json_option
@remote_option
def prune(older_than: timedelta, keep: int, dry_run: bool, as_json: bool, remote: str | None) -> int:
    """Move finished requests into the archive branch, then delete their refs.

    Every push downloads the remote's whole list of refs, so a bus stays quick when finished requests go.
    Nothing unfinished is touched; doing it twice, or on two machines at a time, is harmless.
    """
    link = connect(remote)
    done = archive_finished(
        link.cache(),
        older_than=older_than,
        keep=keep,
        now=datetime.now(UTC),
        dry_run=dry_run,
        progress=_progress(),
    )
    refused = None if done.refused is None else clean_line(done.refused)
    document = asdict(done) | {
        "dry_run": dry_run,
        "refused": refused,
        "exit_code": 0 if refused is None else 6,
    }
    del document["remaining"]
    code = show(as_json, document, _lines(done, dry_run), untrusted=("left", "deleted", "refused"))
    if refused is not None and not as_json:
        click.echo(f"error: {clean_line(link.bus.shown)} keeps the refs: {refused}", err=True)
        click.echo(
            "  the results are in the archive and on their branches, nothing is lost; allow deleting"
            " refs/heads/mac-bridge* and refs/mac-bridge/*, then prune again",
            err=True,
        )
    return code


def _progress() -> Callable[[int, int], None]:
    """Progress on standard error, every two seconds."""
    shown_s = time.monotonic()

    def show(count: int, total: int) -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s >= _INTERVAL_S:
            click.echo(f"looked at {count} of {total} requests", err=True)
            shown_s = time.monotonic()

    return show


def _lines(done: Pruned, dry_run: bool) -> Iterator[str]:
    verb = "would be archived" if dry_run else "archived"
    yield f"{len(done.archived)} finished request(s) {verb}, {len(done.deleted)} ref(s) deleted"
    if dry_run:
        yield from (f"  {nonce}" for nonce in done.archived)
    if done.unfinished:
        yield f"{done.unfinished} of that age stay: they have no result yet, or one of the last hour"
    for left in done.left:
        yield f"left: {clean_line(left.ref)}: {clean_line(left.reason)}"
