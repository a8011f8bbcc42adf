"""``kakeya_mac runner signers``: who may sign requests for this Mac."""

from __future__ import annotations

import click

from bridge.cli.keys import add_list_commands, all_option, open_list, show_changed, which_option
from bridge.cli.options import json_option
from bridge.signing import CANCEL_NAMESPACE, REQUEST_NAMESPACE

_LIST = ("allowed_signers", (REQUEST_NAMESPACE, CANCEL_NAMESPACE))


@click.group()
def signers() -> None:
    """Whose signed requests this Mac accepts: the list allowed_signers in the configuration folder."""


add_list_commands(
    signers,
    *_LIST,
    owner="requester",
    state="listed",
    empty="no key is listed yet",
    texts={
        "add": "Accept requests and cancels that the key signed, as those of NAME.",
        "list": "Show every listed key, and whether it counts.",
        "remove": "Remove the keys of NAME from the list: requests that they sign then count as unsigned.\n\n"
        "Revoke a stolen key instead: a removed one can be added again by mistake.",
    },
    example="""\b
Examples:
  kakeya_mac runner signers add alice --key 'ssh-ed25519 AAAA… alice on laptop'
  kakeya_mac runner signers add ci@example.org --key ci.pub --valid-until 2027-01-31
  ssh-add -L | head -1 | kakeya_mac runner signers add alice --key -

The requester gets this command from `kakeya_mac key`. Compare the key over a channel you trust. A new key
under a name that has one already is added to it; then `revoke` the old one.""",
)


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
@all_option
@json_option
def revoke(name: str, which: str | None, every: bool, as_json: bool) -> int:
    """Stop a key of NAME from counting, for good."""
    keys = open_list(*_LIST)
    gone = keys.revoke(name, which, every=every)
    return show_changed(signers, keys, name, gone, "revoked", as_json=as_json)
