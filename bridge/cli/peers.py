"""``kakeya_mac runner peers`` and ``runner key``: which runners know each other, and by which keys."""

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


@click.group()
def peers() -> None:
    """Runners of other Macs that this one knows: the list known_runners of the configuration folder.

    It matters where the policy requires signatures: there only claims of known runners hold a request, and
    what they answered is not done again.
    """


@peers.command(
    epilog="""\b
Examples:
  kakeya_mac runner peers add studio --key 'ssh-ed25519 AAAA… kakeya-mac runner studio'

The other Mac's owner gets this command from `kakeya_mac runner key`. Macs of one bus list each other."""
)
@click.argument("name")
@click.option(
    "--key",
    "given",
    required=True,
    metavar="KEY",
    help="The runner's public key: 'ssh-ed25519 AAAA…', a .pub file, or - for standard input.",
)
@until_option
@json_option
def add(name: str, given: str, valid_until: str | None, as_json: bool) -> int:
    """Respect the claims, and believe the cards, that the key signed as those of the runner NAME."""
    ring, key = _ring(), given_key(given)
    added = ring.add(name, key, valid_before=until_time(valid_until), now=datetime.now(UTC))
    document = {"file": str(ring.allowed), "name": name, "keys": [key.fingerprint], "added": added}
    state = "known" if added else "already known"
    return show(as_json, document, [f"{state}: {name} {key.fingerprint} ({ring.allowed})"])


@peers.command(name="list")
@json_option
def list_(as_json: bool) -> int:
    """Show every known runner, and whether its key counts."""
    ring = _ring()
    found = ring.all(datetime.now(UTC))
    none = (
        f"no runner of another Mac is known here ({ring.allowed})",
        "  kakeya_mac runner peers add NAME --key 'ssh-ed25519 …'",
    )
    document = {"file": str(ring.allowed), "peers": [entry_json(entry) for entry in found]}
    return show(as_json, document, map(entry_line, found) if found else none)


@peers.command()
@click.argument("name")
@which_option
@json_option
def remove(name: str, which: str | None, as_json: bool) -> int:
    """Take the keys of the runner NAME out of the list. What it answered before stays known."""
    ring = _ring()
    gone = [line.key.fingerprint for line in ring.remove(name, which)]
    document = {"file": str(ring.allowed), "name": name, "keys": gone}
    return show(as_json, document, (f"removed: {name} {print_} ({ring.allowed})" for print_ in gone))


@click.command(
    epilog="""\b
Examples:
  kakeya_mac runner key
  kakeya_mac runner key --name studio --renew

--renew makes a new key in place of the old one, which is deleted; a serving runner uses it from its next
signature on. Give the printed commands to everybody who trusts the old one, and have them revoke that."""
)
@click.option("--name", metavar="NAME", help="The runner's name (default: the host's).")
@click.option("--renew", is_flag=True, help="Make a new key, for good.")
@json_option
def key(name: str | None, renew: bool, as_json: bool) -> int:
    """Show the key with which this runner signs, and the commands that make others believe it."""
    from bridge import settings
    from bridge.runner.config import checked_name, ensure_key, host_name, renew_key
    from bridge.signing import public_key
    from bridge.signing.ssh import read_key

    runner, state = checked_name(name or host_name()), settings.load().state_dir
    path = ensure_key(state, runner)
    old = read_key(str(public_key(path))) if renew else None
    if renew:
        renew_key(state, runner)
    public = read_key(str(public_key(path)))
    line = f"{public.line} {public.comment}".strip()
    commands = {
        "clients": f"kakeya_mac runners trust {runner} --key '{line}'",
        "macs": f"kakeya_mac runner peers add {runner} --key '{line}'",
    }
    replaced = None if old is None else old.fingerprint
    lines = [
        f"{runner}  {public.fingerprint}",
        f"clients trust its results with\n  {commands['clients']}",
        f"other Macs on the bus know it with\n  {commands['macs']}",
    ]
    if replaced is not None:
        command = f"kakeya_mac runners revoke {runner} --key {replaced}"
        lines.append(f"those who trust the old one revoke it with\n  {command}")
    document = {"name": runner, "key": public.line, "fingerprint": public.fingerprint, **commands}
    return show(as_json, document | {"replaced": replaced}, lines)


def _ring() -> KeyList:
    from bridge import settings
    from bridge.signing.keyfiles import KeyList
    from bridge.signing.trust import CLAIM_NAMESPACE, RUNNER_NAMESPACE

    config = settings.load()
    return KeyList(
        config.config_dir / "known_runners",
        config.config_dir / "revoked_keys",
        (CLAIM_NAMESPACE, RUNNER_NAMESPACE),
    )
