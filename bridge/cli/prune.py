"""``kakeya_mac prune``: finished requests go into the archive, their refs are deleted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

import click

from bridge.bus.archive import Pruned
from bridge.bus.archive import prune as archive_finished
from bridge.cli import show
from bridge.cli.options import option_with_default
from bridge.cli.output import Connection, bus_command
from bridge.protocol.sanitize import clean_line

_UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}


def _duration(value: str) -> timedelta:
    """A length of time as it is typed: ``14d``, ``12h``, ``30m``, ``90s``."""
    match = re.fullmatch(r"([0-9]{1,5})([dhms])", value.strip())
    if match is None:
        raise click.BadParameter(f"{value!r} is no duration such as 14d, 12h, 30m or 90s")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


@click.command(
    epilog="""\b
Examples:
  kakeya_mac prune --dry-run
  kakeya_mac prune --older-than 14d --keep 500
  kakeya_mac prune --older-than 12h --json

Every command finds archived requests as before. A request stays while it has no result, or one of the last
hour, is in the inbox or claimed, and when its branch holds anything but a runner's own commit.

JSON: dry_run, archived (nonces), deleted (refs), left ({handle, nonce, ref, reason}), unfinished, archive
(commit), refused (the server's words, or null) and exit_code: 6 when the server deletes no refs; nothing is
lost."""
)
@option_with_default(
    "--older-than", type=_duration, default="14d", metavar="AGE", help="Archive what is older."
)
@option_with_default("--keep", type=click.IntRange(0), default=500, help="Archive all but the newest N.")
@click.option("--dry-run", is_flag=True, help="Say what would be archived; change nothing on the remote.")
@bus_command
def prune(link: Connection, older_than: timedelta, keep: int, dry_run: bool, as_json: bool) -> int:
    """Move finished requests into the archive branch, then delete their refs.

    Every push downloads the remote's whole list of refs, so a bus stays quick when finished requests go.
    """
    now = datetime.now(UTC)
    done = archive_finished(
        link.cache(), older_than=older_than, keep=keep, now=now, dry_run=dry_run, progress=_show_progress
    )
    document = asdict(done) | {"dry_run": dry_run, "exit_code": 0 if done.refused is None else 6}
    del document["remaining"]
    document["left"] = [{"handle": left.nonce, **asdict(left)} for left in done.left]
    code = show(as_json, document, _lines(done, dry_run), untrusted=("left", "deleted", "refused"))
    if done.refused is not None and not as_json:
        click.echo(
            f"error: {clean_line(link.bus.shown)} keeps the refs: {clean_line(done.refused)}\n"
            "  the results are in the archive and on their branches, nothing is lost; allow deleting"
            " refs/heads/mac-bridge* and refs/mac-bridge/*, then prune again",
            err=True,
        )
    return code


def _show_progress(done: int, total: int) -> None:
    click.echo(f"looked at {done} of {total} requests", err=True)


def _lines(done: Pruned, dry_run: bool) -> Iterator[str]:
    verb = "would be archived" if dry_run else "archived"
    yield f"{len(done.archived)} finished request(s) {verb}, {len(done.deleted)} ref(s) deleted"
    if dry_run:
        yield from (f"  {nonce}" for nonce in done.archived)
    if done.unfinished:
        yield f"{done.unfinished} of that age stay: they have no result yet, or one of the last hour"
    for left in done.left:
        yield f"left: {clean_line(left.ref)}: {clean_line(left.reason)}"
