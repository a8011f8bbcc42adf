"""``kakeya_mac runner signers``: who may sign requests for this Mac."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from bridge.cli import echo_json

if TYPE_CHECKING:
    from bridge.runner.signers import Signer, Signers
    from bridge.signing.keys import PublicKey

_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON line instead of text.")
_WHICH = click.option(
    "--key",
    "which",
    metavar="KEY",
    help="Only this key of NAME: its fingerprint SHA256:…, the key itself, or a .pub file.",
)


@click.group()
def signers() -> None:
    """Whose signed requests this Mac takes: the list allowed_signers of the configuration folder."""


@signers.command(
    epilog="""\b
Examples:
  kakeya_mac runner signers add alice --key 'ssh-ed25519 AAAA… alice on laptop'
  kakeya_mac runner signers add ci@example.org --key ci.pub --valid-until 2027-01-31
  ssh-add -L | head -1 | kakeya_mac runner signers add alice --key -

The requester gets this command from `kakeya_mac key`. Compare the key over a channel you trust. A new key
under a name that has one already is added to it; then `revoke` the old one."""
)
@click.argument("name")
@click.option(
    "--key",
    "given",
    required=True,
    metavar="KEY",
    help="The requester's public key: 'ssh-ed25519 AAAA…', a .pub file, or - for standard input.",
)
@click.option(
    "--valid-until",
    metavar="TIME",
    help="It counts until then: 2027-01-31 (all that day) or 2027-01-31T12:00Z.",
)
@_JSON
def add(name: str, given: str, valid_until: str | None, as_json: bool) -> int:
    """Take requests, and wishes to stop them, that the key signed as those of NAME."""
    from bridge.runner.signers import parse_until
    from bridge.signing.keys import MAX_LINE, parse_key, read_key

    try:
        until = None if valid_until is None else parse_until(valid_until)
    except (ValueError, OverflowError):
        raise click.UsageError(
            f"--valid-until takes 2027-01-31 or 2027-01-31T12:00Z, not {ascii(valid_until)[:60]}."
        ) from None
    from_input = given == "-"
    key = parse_key(sys.stdin.read(MAX_LINE + 1)) if from_input else read_key(given)
    lists = _lists()
    added = lists.add(name, key, valid_before=until, now=datetime.now(UTC))
    if as_json:
        echo_json({**_document(lists, [key]), "added": added, "name": name})
        return 0
    click.echo(f"{'listed' if added else 'already listed'}: {name} {key.fingerprint} ({lists.allowed})")
    return 0


@signers.command(name="list")
@_JSON
def list_(as_json: bool) -> int:
    """Show every listed key, and whether it counts."""
    lists = _lists()
    found = lists.all(datetime.now(UTC))
    if as_json:
        echo_json({"file": str(lists.allowed), "signers": [_row(each) for each in found], "exit_code": 0})
        return 0
    for each in found:
        click.echo(_line(each))
    if not found:
        click.echo(f"nobody is listed yet ({lists.allowed})")
        click.echo("  kakeya_mac runner signers add NAME --key 'ssh-ed25519 …'")
    return 0


@signers.command()
@click.argument("name")
@_WHICH
@_JSON
def remove(name: str, which: str | None, as_json: bool) -> int:
    """Take the keys of NAME out of the list: what they sign is then signed by nobody known.

    A key that got into wrong hands is revoked, rather: a removed one can be added again by mistake.
    """
    lists = _lists()
    gone = lists.remove(name, which)
    if as_json:
        echo_json({**_document(lists, [entry.key for entry in gone]), "name": name})
        return 0
    for entry in gone:
        click.echo(f"removed: {name} {entry.key.fingerprint} ({lists.allowed})")
    return 0


@signers.command(
    epilog="""\b
Examples:
  kakeya_mac runner signers revoke alice
  kakeya_mac runner signers revoke alice --key SHA256:…
  kakeya_mac runner signers revoke alice --all

The key goes into revoked_keys beside the list (a plain list of keys, or a revocation list of ssh-keygen -k).
A runner heeds it from the next request on."""
)
@click.argument("name")
@_WHICH
@click.option("--all", "every", is_flag=True, help="All keys of NAME.")
@_JSON
def revoke(name: str, which: str | None, every: bool, as_json: bool) -> int:
    """Let a key of NAME count no more, for good."""
    lists = _lists()
    keys = lists.revoke(name, which, every=every)
    if as_json:
        echo_json({**_document(lists, keys), "name": name})
        return 0
    for key in keys:
        click.echo(f"revoked: {name} {key.fingerprint} ({lists.revoked})")
    return 0


def _lists() -> Signers:
    from bridge import settings
    from bridge.runner.signers import Signers

    config = settings.load()
    return Signers(config.allowed_signers, config.revoked_keys)


def _document(lists: Signers, keys: list[PublicKey]) -> dict[str, object]:
    """What every command that changes a list says with ``--json``."""
    prints = list(dict.fromkeys(key.fingerprint for key in keys))
    return {"file": str(lists.allowed), "revoked_file": str(lists.revoked), "keys": prints, "exit_code": 0}


def _row(signer: Signer) -> dict[str, object]:
    entry = signer.entry
    return {
        "name": entry.name,
        "key": entry.key.line,
        "comment": entry.key.comment,
        "fingerprint": entry.key.fingerprint,
        "state": signer.state,
        "namespaces": None if entry.namespaces is None else list(entry.namespaces),
        "valid_after": None if entry.valid_after is None else entry.valid_after.isoformat(),
        "valid_before": None if entry.valid_before is None else entry.valid_before.isoformat(),
    }


def _line(signer: Signer) -> str:
    from bridge.runner.signers import State

    entry = signer.entry
    said = {
        State.COUNTS: "" if entry.valid_before is None else f"until {entry.valid_before:%Y-%m-%d %H:%M %Z}",
        State.REVOKED: "revoked",
        State.NOT_YET: f"from {entry.valid_after:%Y-%m-%d %H:%M %Z} on" if entry.valid_after else "",
        State.EXPIRED: f"expired {entry.valid_before:%Y-%m-%d %H:%M %Z}" if entry.valid_before else "",
        State.OTHER_USE: f"not for requests: {','.join(entry.namespaces or ())}",
    }[signer.state]
    return "  ".join(filter(None, (entry.name, entry.key.fingerprint, said, entry.key.comment)))
