"""What commands about lists of keys share: options, and what `signers` and `peers` have in common."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, time, timedelta
from typing import Any

import click

from bridge import settings
from bridge.cli import show
from bridge.cli.options import json_option
from bridge.signing.keyfiles import KeyList, ListedKey
from bridge.signing.ssh import MAX_LINE, PublicKey, parse_key, read_key


def parse_until(text: str) -> datetime:
    """When a key stops to count: ``2027-01-31`` (its end, in local time) or ``2027-01-31T12:00[:00][Z]``."""
    if len(text) == len("2027-01-31"):
        day = datetime.fromisoformat(text).date() + timedelta(days=1)
        return datetime.combine(day, time()).astimezone()
    return datetime.fromisoformat(text).astimezone(UTC)


def _until(_context: click.Context, _parameter: click.Parameter, text: str | None) -> datetime | None:
    try:
        return None if text is None else parse_until(text)
    except (ValueError, OverflowError):
        raise click.UsageError(
            f"--valid-until takes 2027-01-31 or 2027-01-31T12:00Z, not {ascii(text)[:60]}."
        ) from None


until_option = click.option(
    "--valid-until",
    callback=_until,
    metavar="TIME",
    help="It counts until then: 2027-01-31 (all that day) or 2027-01-31T12:00Z.",
)
which_option = click.option(
    "--key",
    "which",
    metavar="KEY",
    help="Only this key of NAME: its fingerprint SHA256:…, the key itself, or a .pub file.",
)
all_option = click.option("--all", "every", is_flag=True, help="All keys of NAME.")


def open_list(file: str, namespaces: tuple[str, ...]) -> KeyList:
    """A list of keys in the configuration folder, and what its keys may sign."""
    folder = settings.load().config_dir
    return KeyList(folder / file, folder / "revoked_keys", namespaces)


def add_list_commands(
    group: click.Group,
    file: str,
    namespaces: tuple[str, ...],
    *,
    owner: str,
    state: str,
    empty: str,
    texts: dict[str, str],
    example: str,
) -> None:
    """Give a group the commands ``add``, ``list`` and ``remove`` of a list of keys.

    The group's name is the list's key in JSON. `state` is the word for a key in the list, `empty` the
    sentence of an empty one; `texts` has the help of each command, `example` is the epilog of ``add``.
    """

    @group.command(help=texts["add"], epilog=example)
    @click.argument("name")
    @click.option(
        "--key",
        "given",
        required=True,
        metavar="KEY",
        help=f"The {owner}'s public key: 'ssh-ed25519 AAAA…', a .pub file, or - for standard input.",
    )
    @until_option
    @json_option
    def add(name: str, given: str, valid_until: datetime | None, as_json: bool) -> int:
        keys = open_list(file, namespaces)
        key = parse_key(sys.stdin.read(MAX_LINE + 1)) if given == "-" else read_key(given)
        added = keys.add(name, key, valid_before=valid_until, now=datetime.now(UTC))
        word = state if added else f"already {state}"
        return show_changed(group, keys, name, [key], word, as_json=as_json, added=added)

    @group.command(name="list", help=texts["list"])
    @json_option
    def list_(as_json: bool) -> int:
        keys = open_list(file, namespaces)
        found = keys.all(datetime.now(UTC))
        rows = [entry_json(entry) for entry in found]
        document = {"file": str(keys.allowed), str(group.name): rows, "exit_code": 0}
        add_one = f"  kakeya_mac runner {group.name} add NAME --key 'ssh-ed25519 …'"
        none = [f"{empty} ({keys.allowed})", add_one]
        return show(as_json, document, map(entry_line, found) if found else none)

    @group.command(help=texts["remove"])
    @click.argument("name")
    @which_option
    @json_option
    def remove(name: str, which: str | None, as_json: bool) -> int:
        keys = open_list(file, namespaces)
        gone = [line.key for line in keys.remove(name, which)]
        return show_changed(group, keys, name, gone, "removed", as_json=as_json)


def show_changed(
    group: click.Group,
    keys: KeyList,
    name: str,
    changed: list[PublicKey],
    word: str,
    *,
    as_json: bool,
    **more: object,
) -> int:
    """Say which keys a command changed, and in which file."""
    prints = list(dict.fromkeys(key.fingerprint for key in changed))
    document = {"file": str(keys.allowed), "name": name, "keys": prints, **more, "exit_code": 0}
    if "revoke" in group.commands:
        document["revoked_file"] = str(keys.revoked)
    file = keys.revoked if word == "revoked" else keys.allowed
    return show(as_json, document, (f"{word}: {name} {key.fingerprint} ({file})" for key in changed))


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
