"""``kakeya_mac runner signers``: whose requests a Mac accepts, and the commands of any list of keys."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

import click

from bridge import settings
from bridge.cli import show
from bridge.cli.options import all_option, json_option, keys_of_name, until_option
from bridge.signing import keyfiles, ssh, trust


def key_group(kind: str, file: str, namespaces: tuple[str, ...], *, about: str, examples: str) -> click.Group:
    """The group of commands for one list of keys; `kind` is its name, and the key of the list in JSON."""
    group = click.Group(kind, help=about, epilog=f"\b\nExamples:\n{examples}")
    own = f"kakeya_mac runner {kind}"

    def open_list() -> keyfiles.KeyList:
        return keyfiles.KeyList(settings.load().config_dir / file, namespaces)

    def show_changed(
        keys: keyfiles.KeyList, who: str, changed: list[ssh.PublicKey], word: str, as_json: bool, **more: Any
    ) -> int:
        prints = list(dict.fromkeys(key.fingerprint for key in changed))
        document = {"file": str(keys.allowed), "name": who, "keys": prints, **more, "exit_code": 0}
        if kind == "signers":
            document["revoked_file"] = str(keys.revoked)
        changed_file = keys.revoked if word == "revoked" else keys.allowed
        return show(as_json, document, (f"{word}: {who} {each} ({changed_file})" for each in prints))

    @group.command(help="Let the key speak for NAME.", epilog=f"\b\nExamples:\n{examples}")
    @click.argument("name")
    @click.option(
        "--key", "given", required=True, metavar="KEY", help="The public key, a .pub file, or - (stdin)."
    )
    @until_option
    @json_option
    def add(name: str, given: str, valid_until: datetime | None, as_json: bool) -> int:
        keys = open_list()
        key = ssh.parse_key(sys.stdin.read(ssh.MAX_LINE + 1)) if given == "-" else ssh.read_key(given)
        added = keys.add(name, key, valid_before=valid_until, now=datetime.now(UTC))
        word = "listed" if added else "already listed"
        return show_changed(keys, name, [key], word, as_json, added=added)

    @group.command(
        name="list",
        help="Show every key of the list, and whether it counts.",
        epilog=f"\b\nExamples:\n  {own} list\n  {own} list --json",
    )
    @json_option
    def list_(as_json: bool) -> int:
        keys = open_list()
        found = keys.all(datetime.now(UTC))
        document = {"file": str(keys.allowed), kind: [_entry_json(entry) for entry in found], "exit_code": 0}
        lines = [
            f"{entry.listed.name}  {entry.listed.key.fingerprint}  {entry.words}  {entry.listed.key.comment}"
            for entry in found
        ]
        return show(as_json, document, lines or [f"no key is listed yet ({keys.allowed})"])

    @group.command(
        help="Remove the keys of NAME from the list. Revoke a stolen key instead.",
        epilog=f"\b\nExamples:\n  {own} remove studio\n  {own} remove studio --key SHA256:…",
    )
    @keys_of_name
    @json_option
    def remove(name: str, which: str | None, as_json: bool) -> int:
        keys = open_list()
        gone = [line.key for line in keys.remove(name, which)]
        return show_changed(keys, name, gone, "removed", as_json)

    if kind != "signers":
        return group

    @group.command(
        epilog="""\b
Examples:
  kakeya_mac runner signers revoke alice --all
  kakeya_mac runner signers revoke alice --key SHA256:…

The key is added to revoked_keys in the same folder. A runner applies it from the next request on."""
    )
    @keys_of_name
    @all_option
    @json_option
    def revoke(name: str, which: str | None, every: bool, as_json: bool) -> int:
        """Stop a key of NAME from counting, for good."""
        keys = open_list()
        return show_changed(keys, name, keys.revoke(name, which, every=every), "revoked", as_json)

    return group


def _entry_json(entry: keyfiles.ListedKey) -> dict[str, Any]:
    line = entry.listed
    return {
        "name": line.name,
        "key": line.key.line,
        "fingerprint": line.key.fingerprint,
        "comment": line.key.comment,
        "state": entry.state,
        "namespaces": line.namespaces,
        "valid_after": line.valid_after and line.valid_after.isoformat(),
        "valid_before": line.valid_before and line.valid_before.isoformat(),
    }


signers = key_group(
    "signers",
    "allowed_signers",
    (trust.REQUEST_NAMESPACE, trust.CANCEL_NAMESPACE),
    about="Whose signed requests this Mac accepts: the list allowed_signers in the configuration folder.",
    examples="""\
  kakeya_mac runner signers add alice --key 'ssh-ed25519 AAAA… alice on laptop'
  kakeya_mac runner signers add ci@example.org --key ci.pub --valid-until 2027-01-31
  ssh-add -L | head -1 | kakeya_mac runner signers add alice --key -

The requester gets this command from `kakeya_mac key`. Compare the key over a channel you trust. A new key
under a name that has one already is added to it; then `revoke` the old one.""",
)
