"""``kakeya_mac runner signers``: who may sign requests for this Mac."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from bridge.cli import echo_json
from bridge.cli.keys import (
    entry_json,
    entry_line,
    given_key,
    json_option,
    until_option,
    until_time,
    which_option,
)

if TYPE_CHECKING:
    from bridge.signing.keyring import Keyring
    from bridge.signing.keys import PublicKey


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
@until_option
@json_option
def add(name: str, given: str, valid_until: str | None, as_json: bool) -> int:
    """Take requests, and wishes to stop them, that the key signed as those of NAME."""
    key = given_key(given)
    lists = _lists()
    added = lists.add(name, key, valid_before=until_time(valid_until), now=datetime.now(UTC))
    if as_json:
        echo_json({**_document(lists, [key]), "added": added, "name": name})
        return 0
    click.echo(f"{'listed' if added else 'already listed'}: {name} {key.fingerprint} ({lists.allowed})")
    return 0


@signers.command(name="list")
@json_option
def list_(as_json: bool) -> int:
    """Show every listed key, and whether it counts."""
    lists = _lists()
    found = lists.all(datetime.now(UTC))
    if as_json:
        echo_json(
            {"file": str(lists.allowed), "signers": [entry_json(each) for each in found], "exit_code": 0}
        )
        return 0
    for each in found:
        click.echo(entry_line(each))
    if not found:
        click.echo(f"nobody is listed yet ({lists.allowed})")
        click.echo("  kakeya_mac runner signers add NAME --key 'ssh-ed25519 …'")
    return 0


@signers.command()
@click.argument("name")
@which_option
@json_option
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
@which_option
@click.option("--all", "every", is_flag=True, help="All keys of NAME.")
@json_option
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


def _lists() -> Keyring:
    from bridge import settings, signing
    from bridge.signing.keyring import Keyring

    config = settings.load()
    uses = (signing.REQUEST_NAMESPACE, signing.CANCEL_NAMESPACE)
    return Keyring(config.allowed_signers, config.revoked_keys, uses)


def _document(lists: Keyring, keys: list[PublicKey]) -> dict[str, object]:
    """What every command that changes a list says with ``--json``."""
    prints = list(dict.fromkeys(key.fingerprint for key in keys))
    return {"file": str(lists.allowed), "revoked_file": str(lists.revoked), "keys": prints, "exit_code": 0}
