"""``kakeya_mac runners``: which runners are there, and the keys whose results this client believes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from bridge.cli import echo_json, note_untrusted
from bridge.cli.keys import until_option, until_time, which_option

if TYPE_CHECKING:
    from bridge.bus.registry import Registration, Registry
    from bridge.client.remotes import Remote
    from bridge.settings import Settings

EPILOG = """\b
Examples:
  kakeya_mac runners
  kakeya_mac runners trust studio
  kakeya_mac runners trust studio --key "ssh-ed25519 AAAA… kakeya-mac runner studio"
  kakeya_mac runners trust --first
  kakeya_mac runners revoke studio --key SHA256:…
  kakeya_mac runners distrust studio

The runner prints its key when it starts; compare it over a channel you trust."""


@click.group(invoke_without_command=True, epilog=EPILOG)
@click.option("--remote", metavar="URL", help="Git remote that carries the bus (default: origin).")
@click.option("--json", "as_json", is_flag=True, help="One JSON line instead of text.")
@click.pass_context
def runners(context: click.Context, remote: str | None, as_json: bool) -> int:
    """List the runners seen on the remote and the keys this client trusts.

    `trust`, `revoke` and `distrust` change the list of keys. Without a remote only those keys are listed.
    """
    context.obj = remote
    if context.invoked_subcommand is not None:
        return 0
    from bridge import settings
    from bridge.errors import RemoteUnreachable

    config = settings.load(remote=remote)
    try:
        bus, registry, nothing = _seen(config, needed=remote is not None)
    except RemoteUnreachable:
        if not as_json:
            _show(config, None, None, as_json=False)
        raise
    if nothing is not None:
        click.echo(f"only the trusted keys are listed: {nothing}", err=True)
    _show(config, bus, registry, as_json=as_json)
    return 0


@runners.command(epilog=EPILOG)
@click.argument("name", required=False)
@click.option("--key", metavar="KEY", help="The runner's public key: 'ssh-ed25519 AAAA…', or a .pub file.")
@click.option("--first", is_flag=True, help="Trust on first use: pin the key that is published now.")
@until_option
@click.pass_context
def trust(
    context: click.Context, name: str | None, key: str | None, first: bool, valid_until: str | None
) -> int:
    """Believe results that the key of the runner NAME signed.

    From the first trusted key on, this client believes no result that none of its trusted keys signed. A
    runner may have several keys: to change one, trust the new one, then revoke the old one.
    Without --key: show the key that the runner publishes, to be compared with the one on its machine, and
    exit with code 2; nothing is trusted.
    With --first: pin that key without comparing it, as ssh does with a new host. Whoever may push could have
    published it; from then on another key is refused, and a pinned key is never replaced. NAME is needed
    where runners with several keys are seen. Repeating it changes nothing.
    """
    from bridge import settings
    from bridge.signing.trust import pin

    if first and key is not None:
        raise click.UsageError("--first takes the key that is published; leave out --key")
    config = settings.load(remote=context.obj)
    if first:
        return _pin_first(config, name, valid_until)
    if name is None:
        raise click.UsageError("Missing argument 'NAME', or --first.")
    if key is None:
        return _show_key(config, name)
    path = config.trusted_runners
    added = pin(path, name, key, valid_before=until_time(valid_until))
    click.echo(f"{'trusted' if added else 'already trusted'}: {name} ({path})")
    return 0


@runners.command(epilog=EPILOG)
@click.argument("name")
@which_option
@click.option("--all", "every", is_flag=True, help="All keys of NAME.")
def revoke(name: str, which: str | None, every: bool) -> int:
    """Let a key of the runner NAME count no more, for good: it was lost, stolen or renewed.

    What it signed, whenever that was, is refused with those words. Exit code 2 when there is no such key.
    """
    from bridge import settings
    from bridge.signing.trust import runner_keys

    keys = runner_keys(settings.load().trusted_runners)
    for key in keys.revoke(name, which, every=every):
        click.echo(f"revoked: {name} {key.fingerprint} ({keys.revoked})")
    return 0


@runners.command(epilog=EPILOG)
@click.argument("name")
@which_option
def distrust(name: str, which: str | None) -> int:
    """Take the keys of the runner NAME out of the list. Exit code 2 when none of its keys is trusted.

    A key that got into wrong hands is revoked, rather: a removed one can be trusted again by mistake.
    """
    from bridge import settings
    from bridge.signing.trust import runner_keys

    keys = runner_keys(settings.load().trusted_runners)
    gone = {line.key.text for line in keys.remove(name, which)}
    click.echo(f"{len(gone)} key(s) of {name} removed from {keys.allowed}")
    return 0


def _seen(config: Settings, *, needed: bool) -> tuple[Remote | None, Registry | None, str | None]:
    """The remote and who was seen there, or why there is no remote to look at.

    Raises:
        BusError: A remote was asked for and there is none.
        RemoteUnreachable: There is one, and it did not answer.
    """
    from pathlib import Path

    from bridge.client.remotes import resolve_remote
    from bridge.client.runners import read_runners
    from bridge.errors import NoRemote
    from bridge.git.repo import GitRepo

    git = GitRepo(Path.cwd())
    try:
        bus = resolve_remote(git, config.remote)
    except NoRemote as error:
        if needed:
            raise
        return None, None, error.message
    return bus, read_runners(config, git, bus), None


def _show(config: Settings, bus: Remote | None, registry: Registry | None, *, as_json: bool) -> None:
    from datetime import UTC, datetime

    from bridge.render.lists import key_json, key_line, runner_json, runner_lines
    from bridge.render.terminal import wrapped
    from bridge.signing.trust import pinned_keys

    now = datetime.now(UTC)
    path = config.trusted_runners
    seen = () if registry is None else registry.seen
    left_out = 0 if registry is None else registry.left_out
    shown = {entry.card.public_key for entry in seen if entry.trusted}
    entries = pinned_keys(path)
    absent = [entry for entry in entries if entry.listed.key.line not in shown]
    if as_json:
        documents = [runner_json(entry, now) for entry in seen]
        documents += [key_json(entry) for entry in absent]
        remote = None if bus is None else bus.shown
        document = {"file": str(path), "remote": remote, "runners": documents, "left_out": left_out}
        echo_json(document, untrusted=("runners",))
        return
    for runner in seen:
        for line in runner_lines(runner, now):
            click.echo(wrapped(line))
    if seen:
        note_untrusted()
    for entry in absent:
        click.echo(key_line(entry, looked=registry is not None))
    if bus is not None and not seen:
        click.echo(f"no runner has been seen on {bus.shown}")
    if left_out:
        click.echo(f"{left_out} card(s) that are none, or not what they say, were left out", err=True)
    if not entries:
        click.echo(f"no runner is trusted yet ({path})")
        click.echo("  kakeya_mac runners trust NAME, or kakeya_mac runners trust --first")


def _publishing(config: Settings, name: str | None) -> list[Registration]:
    """The runners, or those of a name, whose cards are signed by the key that they show.

    Raises:
        SignatureError: There is none.
    """
    from bridge.errors import SignatureError

    bus, registry, _ = _seen(config, needed=True)
    seen = () if registry is None else registry.seen
    found = [
        entry
        for entry in seen
        if entry.signer is not None
        and entry.card.public_key is not None
        and (name is None or name in (entry.name, entry.card.name))
    ]
    if not found:
        there = ", ".join(entry.name for entry in seen) or "none"
        where = "" if bus is None else f" on {bus.shown}"
        named = "" if name is None else f" named {ascii(name)[:80]}"
        raise SignatureError(
            f"no runner{named} publishes a signed card{where} (runners seen: {there})",
            f"it prints its key when it starts: kakeya_mac runners trust {name or 'NAME'}"
            " --key 'ssh-ed25519 …'",
        )
    return found


def _pin_first(config: Settings, name: str | None, valid_until: str | None) -> int:
    """Trust on first use.

    Raises:
        SignatureError: No key is published, or several are, or another one is pinned already.
    """
    from bridge.errors import SignatureError
    from bridge.signing import fingerprint
    from bridge.signing.keyfiles import KeyState
    from bridge.signing.trust import pin, pinned_keys

    keys = {entry.card.public_key or "": entry.card.name for entry in _publishing(config, name)}
    [(key, runner), *others] = keys.items()
    by_hand = f"compare it there, then: kakeya_mac runners trust {runner} --key '{key}'"
    if others:
        shown = ", ".join(f"{runner} {fingerprint(key)}" for key, runner in keys.items())
        raise SignatureError(
            f"{len(keys)} different keys are published: {shown}; nothing was pinned",
            "name one of them: kakeya_mac runners trust --first NAME" if name is None else by_hand,
        )
    path, print_ = config.trusted_runners, fingerprint(key)
    pinned = {entry.listed.key.fingerprint: entry for entry in pinned_keys(path)}
    known = pinned.get(print_)
    if known is not None and known.state is not KeyState.COUNTS:
        raise SignatureError(f"the key {print_} of {runner} is pinned, and {known.words}", by_hand)
    if known is not None:
        click.echo(f"already trusted: {known.listed.name} {print_} ({path})")
        return 0
    names = {each: entry.listed.name for each, entry in pinned.items()}
    if before := {each: owner for each, owner in names.items() if name is None or owner == runner}:
        old = ", ".join(f"{owner} {each}" for each, owner in before.items())
        another = (
            "" if runner in names.values() else f"another machine: runners trust --first {runner}; else "
        )
        raise SignatureError(
            f"the runner {runner} publishes the key {print_}, and pinned is {old}; nothing was pinned",
            another + by_hand,
        )
    pin(path, runner, key, valid_before=until_time(valid_until))
    click.echo(f"trusted: {runner} {print_} ({path})")
    click.echo(
        f"  nothing vouches for this key: compare it with what {runner} prints on its machine;"
        " from now on\n  only results that it signed are believed"
    )
    return 0


def _show_key(config: Settings, name: str) -> int:
    from bridge.render.lists import trust_lines

    for line in trust_lines(name, _publishing(config, name)):
        click.echo(line)
    click.echo("nothing was trusted", err=True)
    return 2
