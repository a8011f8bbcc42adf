"""``kakeya_mac prune``: finished requests go into the archive, their refs are deleted."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click

from bridge.cli import echo_json
from bridge.cli.options import remote_option

if TYPE_CHECKING:
    from bridge.bus.archive import Pruned

_UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}
_INTERVAL_S = 2.0
_LONGEST_DAYS = 36_500


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
@click.option(
    "--older-than",
    callback=_duration,
    default="14d",
    show_default=True,
    metavar="DURATION",
    help="Archive requests of this age.",
)
@click.option(
    "--keep",
    type=click.IntRange(min=0),
    default=500,
    show_default=True,
    help="Archive all but the newest N finished ones, whatever their age.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be archived; change nothing on the remote.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line instead of text.")
@remote_option
def prune(older_than: timedelta, keep: int, dry_run: bool, as_json: bool, remote: str | None) -> int:
    """Move finished requests into the archive branch, then delete their refs.

    Every push downloads the remote's whole list of refs, so a bus stays quick when finished requests go.
    Nothing unfinished is touched; doing it twice, or on two machines at a time, is harmless.
    """
    from bridge.bus.archive import prune as archive_finished
    from bridge.cli.output import connect
    from bridge.client.remotes import open_cache

    config, git, bus = connect(remote)
    done = archive_finished(
        open_cache(config.state_dir, bus, git),
        older_than=older_than,
        keep=keep,
        now=datetime.now(UTC),
        dry_run=dry_run,
        progress=_Progress().show,
    )
    code = 0 if done.refused is None else 6
    if as_json:
        echo_json(_document(done, dry_run, code), untrusted=("left", "deleted", "refused"))
    else:
        _show(done, bus.shown, dry_run)
    return code


class _Progress:
    """Progress on standard error, once it takes longer than two seconds, and then every two."""

    def __init__(self) -> None:
        self._shown_s = time.monotonic()

    def show(self, done: int, total: int) -> None:
        if time.monotonic() - self._shown_s >= _INTERVAL_S:
            click.echo(f"looked at {done} of {total} requests", err=True)
            self._shown_s = time.monotonic()


def _document(done: Pruned, dry_run: bool, code: int) -> dict[str, object]:
    from bridge.protocol.sanitize import clean_line

    return {
        "dry_run": dry_run,
        "archived": list(done.archived),
        "deleted": list(done.deleted),
        "left": [{"nonce": x.nonce, "ref": x.ref, "reason": clean_line(x.reason)} for x in done.left],
        "unfinished": done.unfinished,
        "archive": done.archive,
        "refused": None if done.refused is None else clean_line(done.refused),
        "exit_code": code,
    }


def _show(done: Pruned, remote: str, dry_run: bool) -> None:
    from bridge.protocol.sanitize import clean_line

    verb = "would be archived" if dry_run else "archived"
    click.echo(f"{len(done.archived)} finished request(s) {verb}, {len(done.deleted)} ref(s) deleted")
    if dry_run:
        for nonce in done.archived:
            click.echo(f"  {nonce}")
    if done.unfinished:
        click.echo(f"{done.unfinished} of that age stay: they have no result yet, or one of the last hour")
    for left in done.left:
        click.echo(f"left: {clean_line(left.ref)}: {clean_line(left.reason)}")
    if done.refused is not None:
        click.echo(f"error: {clean_line(remote)} keeps the refs: {clean_line(done.refused)}", err=True)
        click.echo(
            "  the results are in the archive and on their branches, nothing is lost; allow deleting"
            " refs/heads/mac-bridge* and refs/mac-bridge/*, then prune again",
            err=True,
        )
