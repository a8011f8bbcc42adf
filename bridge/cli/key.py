"""``kakeya_mac key``: which key signs what this client sends, and the command for the Mac's owner."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bridge.cli import show
from bridge.cli.options import signing_key_option

if TYPE_CHECKING:
    from bridge.client.signing_key import SigningKey
    from bridge.settings import Settings

# Nothing else is ever signed as this: the trial below can be used for nothing.
_TRIAL = "kakeya-mac-trial"


@click.command(
    epilog="""\b
Examples:
  kakeya_mac key
  kakeya_mac key --make
  kakeya_mac key --signing-key ~/.ssh/id_ed25519 --json

Tried in this order: --signing-key, KAKEYA_SIGNING_KEY, signing_key in config.toml, the key that --make
made, git's user.signingkey where gpg.format is ssh, the SSH agent. Exit code 2 when there is none, or the one
there is cannot sign without a passphrase."""
)
@click.option("--make", "make_one", is_flag=True, help="Make a key for requests, unless it is there already.")
@signing_key_option
@click.option("--json", "as_json", is_flag=True, help="One JSON line instead of text.")
def key(make_one: bool, signing_key: str | None, as_json: bool) -> int:
    """Show which key signs your requests, and the command with which a Mac's owner lists it.

    A key made with --make is for this alone, has no passphrase and lies in the folder of your configuration.
    """
    from bridge import settings, signing
    from bridge.client.signing_key import choose
    from bridge.errors import SignatureError
    from bridge.git.repo import GitRepo

    config = settings.load(signing_key=signing_key)
    if make_one:
        there = config.own_key.is_file()
        signing.ensure_key(config.own_key, f"{_name(config)} on {platform.node().split('.')[0]}")
        click.echo(f"{'already there' if there else 'made'}: {config.own_key}", err=True)
    choice = choose(config, GitRepo(Path.cwd()))
    if choice.key is None:
        raise SignatureError(
            "; ".join(("no key was found to sign requests with", *choice.notes)),
            "make one: kakeya_mac key --make",
        )
    signing.sign(choice.key.material, _TRIAL, b"")
    return _show(config, choice.key, choice.notes, as_json=as_json)


def _show(config: Settings, chosen: SigningKey, notes: tuple[str, ...], *, as_json: bool) -> int:
    from bridge.protocol.sanitize import clean_line

    public = chosen.public()
    line = clean_line(f"{public.line} {public.comment}", limit=8192)
    command = f"kakeya_mac runner signers add {_name(config)} --key '{line.replace(chr(39), '')}'"
    document: dict[str, object] = {"status": "ok", "key": public.line, "fingerprint": public.fingerprint}
    document |= {"source": chosen.source, "command": command, "notes": list(notes)}
    for note in () if as_json else notes:
        click.echo(note, err=True)
    signed = f"requests are signed with {public.fingerprint} ({chosen.source})"
    return show(as_json, document, [signed, "a Mac's owner lists it with", f"  {command}"])


def _name(config: Settings) -> str:
    """The user's name as a list of signers takes it."""
    name = re.sub(r"[^A-Za-z0-9._@+-]+", "-", config.requested_by).strip("-._@+")
    return name[:64] or "me"
