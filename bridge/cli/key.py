"""``kakeya_mac key``: which key signs what this client sends, and the command for the Mac's owner."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import click

from bridge import settings, signing
from bridge.cli import show
from bridge.cli.options import json_option, signing_key_option
from bridge.client.signing_key import choose
from bridge.errors import SignatureError
from bridge.git.repo import GitRepo
from bridge.protocol.sanitize import clean_line


@click.command(
    epilog="""\b
Examples:
  kakeya_mac key
  kakeya_mac key --make
  kakeya_mac key --signing-key ~/.ssh/id_ed25519 --json

Tried in this order: --signing-key, KAKEYA_SIGNING_KEY, signing_key in config.toml, the key of --make, git's
user.signingkey where gpg.format is ssh, the SSH agent. Exit code 2: none, or one that needs a passphrase."""
)
@click.option("--make", "make_one", is_flag=True, help="Make a key for requests, unless it is there already.")
@signing_key_option
@json_option
def key(make_one: bool, signing_key: str | None, as_json: bool) -> int:
    """Show which key signs your requests, and the command with which a Mac's owner lists it.

    A key made with --make is for this alone, has no passphrase and lies in the folder of your configuration.
    """
    config = settings.load(signing_key=signing_key)
    name = re.sub(r"[^A-Za-z0-9._@+-]+", "-", config.requested_by).strip("-._@+")[:64] or "me"
    if make_one:
        said = "already there" if config.own_key.is_file() else "made"
        signing.ensure_key(config.own_key, f"{name} on {platform.node().split('.')[0]}")
        click.echo(f"{said}: {config.own_key}", err=True)
    choice = choose(config, GitRepo(Path.cwd()))
    if choice.key is None:
        why = "; ".join(("no key was found to sign requests with", *choice.notes))
        raise SignatureError(why, "make one: kakeya_mac key --make")
    signing.sign(choice.key.material, "kakeya-mac-trial", b"")  # nothing else is ever signed as this
    public = signing.public_half(choice.key.material)
    line = clean_line(f"{public.line} {public.comment}", limit=8192).replace("'", "")
    document = {
        "status": "ok",
        "key": public.line,
        "fingerprint": public.fingerprint,
        "source": choice.key.source,
        "command": f"kakeya_mac runner signers add {name} --key '{line}'",
        "notes": list(choice.notes),
        "exit_code": 0,
    }
    signed = f"requests are signed with {public.fingerprint} ({choice.key.source})"
    lines = [*choice.notes, signed, "a Mac's owner lists it with", f"  {document['command']}"]
    return show(as_json, document, lines)
