"""``kakeya_mac runners``: the keys whose results this client believes."""

from __future__ import annotations

import click

from bridge.cli import echo_json

EPILOG = """\b
Examples:
  kakeya_mac runners
  kakeya_mac runners trust studio --key "ssh-ed25519 AAAA… kakeya-mac runner studio"
  kakeya_mac runners distrust studio

The runner prints its key when it starts; compare it over a channel you trust."""


@click.group(invoke_without_command=True, epilog=EPILOG)
@click.option("--json", "as_json", is_flag=True, help="One JSON line instead of text.")
@click.pass_context
def runners(context: click.Context, as_json: bool) -> int:
    """List the runner keys this client trusts; `trust` and `distrust` change the list."""
    if context.invoked_subcommand is not None:
        return 0
    from bridge import settings
    from bridge.client.trust import trusted

    path = settings.load().trusted_runners
    entries = trusted(path)
    if as_json:
        echo_json({"file": str(path), "runners": [{"name": e.name, "key": e.key} for e in entries]})
        return 0
    for entry in entries:
        click.echo(f"{entry.name}  {entry.key}")
    if not entries:
        click.echo(f"no runner is trusted yet ({path})")
        click.echo("  kakeya_mac runners trust NAME --key 'ssh-ed25519 …'")
    return 0


@runners.command(epilog=EPILOG)
@click.argument("name")
@click.option(
    "--key",
    required=True,
    metavar="KEY",
    help="The runner's public key: 'ssh-ed25519 AAAA…', or a .pub file.",
)
def trust(name: str, key: str) -> int:
    """Believe results that the key of the runner NAME signed.

    From the first trusted key on, this client believes no result that none of its trusted keys signed.
    """
    from bridge import settings
    from bridge.client.trust import add

    path = settings.load().trusted_runners
    added = add(path, name, key)
    click.echo(f"{'trusted' if added else 'already trusted'}: {name} ({path})")
    return 0


@runners.command(epilog=EPILOG)
@click.argument("name")
def distrust(name: str) -> int:
    """Stop believing the keys of the runner NAME."""
    from bridge import settings
    from bridge.client.trust import remove

    path = settings.load().trusted_runners
    click.echo(f"{remove(path, name)} key(s) of {name} removed from {path}")
    return 0
