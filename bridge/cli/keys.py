"""What commands about lists of keys share: options, and what they show."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, time, timedelta
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from bridge.signing.keyfiles import ListedKey
    from bridge.signing.ssh import PublicKey

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON line instead of text.")
which_option = click.option(
    "--key",
    "which",
    metavar="KEY",
    help="Only this key of NAME: its fingerprint SHA256:…, the key itself, or a .pub file.",
)
until_option = click.option(
    "--valid-until",
    metavar="TIME",
    help="It counts until then: 2027-01-31 (all that day) or 2027-01-31T12:00Z.",
)


def parse_until(text: str) -> datetime:
    """When a key stops to count: ``2027-01-31`` (its end, in local time) or ``2027-01-31T12:00[:00][Z]``.

    Raises:
        ValueError: It is neither.
    """
    if len(text) == len("2027-01-31"):
        day = datetime.fromisoformat(text).date() + timedelta(days=1)
        return datetime.combine(day, time()).astimezone()
    return datetime.fromisoformat(text).astimezone(UTC)


def until_time(text: str | None) -> datetime | None:
    """The value of `until_option`.

    Raises:
        click.UsageError: It is no time.
    """
    try:
        return None if text is None else parse_until(text)
    except (ValueError, OverflowError):
        raise click.UsageError(
            f"--valid-until takes 2027-01-31 or 2027-01-31T12:00Z, not {ascii(text)[:60]}."
        ) from None


def given_key(text: str) -> PublicKey:
    """The key that an argument names: the line itself, a file, or ``-`` for standard input.

    Raises:
        SignatureError: It is none.
    """
    from bridge.signing.ssh import MAX_LINE, parse_key, read_key

    return parse_key(sys.stdin.read(MAX_LINE + 1)) if text == "-" else read_key(text)


def entry_line(entry: ListedKey) -> str:
    """A listed key for people."""
    line = entry.listed
    return "  ".join(filter(None, (line.name, line.key.fingerprint, entry.words, line.key.comment)))


def entry_json(entry: ListedKey) -> dict[str, Any]:
    """A listed key as JSON."""
    line = entry.listed
    return {
        "name": line.name,
        "key": line.key.line,
        "fingerprint": line.key.fingerprint,
        "comment": line.key.comment,
        "state": entry.state,
        "namespaces": None if line.namespaces is None else list(line.namespaces),
        "valid_after": None if line.valid_after is None else line.valid_after.isoformat(),
        "valid_before": None if line.valid_before is None else line.valid_before.isoformat(),
    }
