"""``kakeya_mac runner signers``: who may sign requests for this Mac."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from bridge.cli import show
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
    from bridge.signing.keyfiles import KeyList
    from bridge.signing.ssh import PublicKey


@click.group()
def signers() -> None:
    """Whose signed requests this Mac accepts: the list allowed_signers in the configuration folder."""


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
    """Accept requests and cancels that the key signed, as those of NAME."""
    key = given_key(given)
    lists = _lists()
    added = lists.add(name, key, valid_before=until_time(valid_until), now=datetime.now(UTC))
    document = _document(lists, name, [key]) | {"added": added}
    state = "listed" if added else "already listed"
    return show(as_json, document, [f"{state}: {name} {key.fingerprint} ({lists.allowed})"])


@signers.command(name="list")
@json_option
def list_(as_json: bool) -> int:
    """Show every listed key, and whether it counts."""
    lists = _lists()
    found = lists.all(datetime.now(UTC))
    none = (
        f"no key is listed yet ({lists.allowed})",
        "  kakeya_mac runner signers add NAME --key 'ssh-ed25519 …'",
    )
    document = {"file": str(lists.allowed), "signers": [entry_json(each) for each in found]}
    return show(as_json, document, map(entry_line, found) if found else none)


@signers.command()
@click.argument("name")
@which_option
@json_option
def remove(name: str, which: str | None, as_json: bool) -> int:
    """Remove the keys of NAME from the list: requests that they sign then count as unsigned.

    Revoke a stolen key instead: a removed one can be added again by mistake.
    """
    lists = _lists()
    keys = [entry.key for entry in lists.remove(name, which)]
    lines = (f"removed: {name} {key.fingerprint} ({lists.allowed})" for key in keys)
    return show(as_json, _document(lists, name, keys), lines)


@signers.command(
    epilog="""\b
Examples:
  kakeya_mac runner signers revoke alice
  kakeya_mac runner signers revoke alice --key SHA256:…
  kakeya_mac runner signers revoke alice --all

The key is added to revoked_keys in the same folder (a plain list, or a revocation list of ssh-keygen -k).
A runner applies it from the next request on."""
)
@click.argument("name")
@which_option
@click.option("--all", "every", is_flag=True, help="All keys of NAME.")
@json_option
def revoke(name: str, which: str | None, every: bool, as_json: bool) -> int:
    """Stop a key of NAME from counting, for good."""
    lists = _lists()
    keys = lists.revoke(name, which, every=every)
    lines = (f"revoked: {name} {key.fingerprint} ({lists.revoked})" for key in keys)
    return show(as_json, _document(lists, name, keys), lines)


def _lists() -> KeyList:
    from bridge import settings, signing
    from bridge.signing.keyfiles import KeyList

    config = settings.load()
    uses = (signing.REQUEST_NAMESPACE, signing.CANCEL_NAMESPACE)
    return KeyList(config.allowed_signers, config.revoked_keys, uses)


def _document(lists: KeyList, name: str, keys: list[PublicKey]) -> dict[str, object]:
    """What every command that changes a list says with ``--json``."""
    prints = list(dict.fromkeys(key.fingerprint for key in keys))
    return {"file": str(lists.allowed), "revoked_file": str(lists.revoked), "name": name, "keys": prints}
