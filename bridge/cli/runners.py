"""``kakeya_mac runners``: which runners are there, and the keys whose results this client believes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import click

from bridge import settings
from bridge.bus.registry import Registration, Registry
from bridge.cli import show
from bridge.cli.options import all_option, json_option, keys_of_name, remote_option, until_option
from bridge.cli.output import connect
from bridge.client.runners import absence, read_runners
from bridge.errors import NoRemote, SignatureError
from bridge.protocol.manifest import parse_time, properties
from bridge.protocol.runner_info import is_live
from bridge.protocol.sanitize import clean_line
from bridge.render.outcome import TRUST_TEXTS
from bridge.signing.keyfiles import KeyState, ListedKey
from bridge.signing.ssh import fingerprint, read_key
from bridge.signing.trust import pin, pinned_keys, runner_keys

EPILOG = """\b
Examples:
  kakeya_mac runners
  kakeya_mac runners trust studio --key "ssh-ed25519 AAAA… kakeya-mac runner studio"
  kakeya_mac runners trust --first
  kakeya_mac runners revoke studio --key SHA256:…
  kakeya_mac runners distrust studio

The runner prints its key when it starts; compare it over a channel you trust."""

_INFO_FIELDS = {"seen_at", "state", "job", "load", "models", "machine", "tools", "limits", "version", "id"}


@click.group(invoke_without_command=True, epilog=EPILOG)
@remote_option
@json_option
@click.pass_context
def runners(context: click.Context, remote: str | None, as_json: bool) -> int:
    """List the runners seen on the remote and the keys this client trusts.

    `trust`, `revoke` and `distrust` change the list of keys. Without a remote only those keys are listed.
    """
    context.obj = remote
    if context.invoked_subcommand is not None:
        return 0
    config = settings.load(remote=remote)
    shown, registry = None, Registry((), 0, {})
    try:
        link = connect(config)
        shown, registry = link.bus.shown, read_runners(config, link.git, link.bus)
    except NoRemote as error:
        if remote is not None:
            raise
        click.echo(f"only the trusted keys are listed: {error.message}", err=True)
    now, path = datetime.now(UTC), config.trusted_runners
    seen, entries = registry.seen, pinned_keys(path)
    seen_keys = {entry.info.public_key for entry in seen if entry.trusted}
    absent = [entry for entry in entries if entry.listed.key.line not in seen_keys]
    rows = [*(_runner_json(entry, now) for entry in seen), *map(_key_json, absent)]
    document = {"file": str(path), "remote": shown, "runners": rows, "left_out": registry.left_out}
    lines = [line for entry in seen for line in _runner_lines(entry, now)]
    unseen = "" if shown is None else "not seen on this remote  "
    for entry in absent:
        lines.append(f"{entry.listed.name}  {unseen}({entry.words or 'trusted'})  {entry.listed.key.line}")
    if shown is not None and not seen:
        lines.append(f"no daemon is registered on {shown}; runners of GitHub Actions do not register")
    if not entries:
        lines.append(f"no runner is trusted yet ({path}): kakeya_mac runners trust --first")
    show(as_json, document, lines, untrusted=("runners",), note=bool(seen))
    if registry.left_out and not as_json:
        click.echo(f"{registry.left_out} invalid registration(s) were skipped", err=True)
    return 0


@runners.command(epilog=EPILOG)
@click.argument("name", required=False)
@click.option("--key", metavar="KEY", help="The runner's public key: 'ssh-ed25519 AAAA…', or a .pub file.")
@click.option("--first", is_flag=True, help="Trust on first use: pin the key that is published now.")
@until_option
@click.pass_context
def trust(
    context: click.Context, name: str | None, key: str | None, first: bool, valid_until: datetime | None
) -> int:
    """Believe results that the key of the runner NAME signed; from then on no others are believed.

    A runner may have several keys: to change one, trust the new one, then revoke the old one.
    Without --key: show the key that the runner publishes, and exit with code 2; nothing is trusted.
    With --first: pin that key without comparing it, as ssh does with a new host. Whoever may push could have
    published it; from then on another key is refused. NAME is needed where several keys are published.
    """
    config = settings.load(remote=context.obj)
    if first and key is not None:
        raise click.UsageError("--first takes the key that is published; leave out --key")
    if not first and name is None:
        raise click.UsageError("Missing argument 'NAME', or --first.")
    if name is not None and key is not None:
        return _pin(config, name, key, valid_until)
    published = _published_keys(config, name)
    if first:
        return _pin_first(config, published, name, valid_until)
    for line, runner in published.items():
        click.echo(f"{runner} publishes the key {fingerprint(line)}, as anyone with push rights could")
        click.echo(f"compare it with what it prints, then: kakeya_mac runners trust {runner} --key '{line}'")
    click.echo("nothing was trusted", err=True)
    return 2


@runners.command(epilog=EPILOG)
@keys_of_name
@all_option
def revoke(name: str, which: str | None, every: bool) -> int:
    """Let a key of the runner NAME count no more, for good: it was lost, stolen or renewed.

    What it signed, whenever that was, is refused with those words. Exit code 2 when there is no such key.
    """
    keys = runner_keys(settings.load().trusted_runners)
    for key in keys.revoke(name, which, every=every):
        click.echo(f"revoked: {name} {key.fingerprint} ({keys.revoked})")
    return 0


@runners.command(epilog=EPILOG)
@keys_of_name
def distrust(name: str, which: str | None) -> int:
    """Take the keys of the runner NAME out of the list. Exit code 2 when none of its keys is trusted.

    A key that got into wrong hands is revoked, rather: a removed one can be trusted again by mistake.
    """
    keys = runner_keys(settings.load().trusted_runners)
    gone = {line.key.text for line in keys.remove(name, which)}
    click.echo(f"{len(gone)} key(s) of {name} removed from {keys.allowed}")
    return 0


def _runner_json(seen: Registration, now: datetime) -> dict[str, Any]:
    info = seen.info
    known = properties(info.machine, info.name)
    return info.model_dump(mode="json", include=_INFO_FIELDS) | {
        "name": seen.name,
        "job": info.job and {"handle": info.job.nonce, **info.job.model_dump(mode="json")},
        "key": info.public_key,
        "fingerprint": None if info.public_key is None else fingerprint(info.public_key),
        "trusted": seen.trusted,
        "trusted_as": seen.signer if seen.trusted else None,
        "standing": seen.trust,
        "live": is_live(info, now),
        "presets": [offer.name for offer in info.presets if offer.available],
        "unavailable": {offer.name: offer.why for offer in info.presets if not offer.available},
        "properties": {name: next(iter(values), None) for name, values in known.items()}
        | {"label": known["label"]},
    }


def _key_json(entry: ListedKey) -> dict[str, Any]:
    """A listed key whose runner was not seen, with the keys of `_runner_json`."""
    line, counts = entry.listed, entry.state is KeyState.COUNTS
    return dict.fromkeys(_INFO_FIELDS) | {
        "name": line.name,
        "key": line.key.line,
        "fingerprint": line.key.fingerprint,
        "trusted": counts,
        "trusted_as": line.name if counts else None,
        "standing": None if counts else entry.state,
        "live": False,
        "presets": [],
        "unavailable": {},
        "properties": None,
    }


def _runner_lines(seen: Registration, now: datetime) -> Iterator[str]:
    info = seen.info
    is_renamed = seen.trusted and seen.signer != seen.name
    trust = f"trusted as {seen.signer}" if is_renamed else TRUST_TEXTS[seen.trust]
    job = "" if info.job is None else f" with {info.job.preset} for {info.job.elapsed_s:.0f} s"
    ago_s = max(0, round((now - parse_time(info.seen_at)).total_seconds()))
    yield f"{seen.name}  {absence(info, now) or f'{info.state}{job}, seen {ago_s} s ago'}  ({trust})"
    offers = ", ".join(offer.name for offer in info.presets if offer.available)
    reasons = {offer.why for offer in info.presets}
    if not offers and len(reasons) == 1:
        offers = f"nothing: {clean_line(reasons.pop() or 'it says not why', limit=200)}"
    yield f"    offers   {offers or 'nothing'}"
    known = properties(info.machine, info.name).items()  # as `run --on` names them
    facts = ", ".join(f"{name}={','.join(map(str, values))}" for name, values in known if values)
    yield f"    machine  {clean_line(facts, limit=200)}; kakeya-mac {clean_line(info.version)}"
    if info.limits.require_signature:
        yield "    takes    only requests signed by a requester it knows"


def _published_keys(config: settings.Settings, name: str | None) -> dict[str, str]:
    """The keys that sign the registrations that show them, with the runner's name: of all, or of one name."""
    link = connect(config)
    registry = read_runners(config, link.git, link.bus)
    found = {
        seen.info.public_key: seen.info.name
        for seen in registry.seen
        if seen.signer is not None and seen.info.public_key and name in (None, seen.name, seen.info.name)
    }
    if not found:
        there = ", ".join(seen.name for seen in registry.seen) or "none"
        named = "" if name is None else f" named {ascii(name)[:80]}"
        raise SignatureError(
            f"no runner{named} publishes a signed registration on {link.bus.shown} (runners seen: {there})",
            f"it prints its key when it starts: kakeya_mac runners trust {name or 'NAME'} --key KEY",
        )
    return found


def _pin(config: settings.Settings, name: str, key: str, valid_until: datetime | None) -> int:
    path = config.trusted_runners
    added = pin(path, name, key, valid_before=valid_until)
    click.echo(f"{'trusted' if added else 'already trusted'}: {name} {read_key(key).fingerprint} ({path})")
    return 0


def _pin_first(
    config: settings.Settings, published: dict[str, str], name: str | None, valid_until: datetime | None
) -> int:
    """Trust on first use: refuse where several keys are published, or another one is pinned."""
    if len(published) > 1:
        shown = ", ".join(f"{runner} {fingerprint(key)}" for key, runner in published.items())
        raise SignatureError(
            f"{len(published)} different keys are published: {shown}; nothing was pinned",
            "choose a runner: kakeya_mac runners trust --first NAME",
        )
    [(key, runner)] = published.items()
    pinned = pinned_keys(config.trusted_runners)
    if own := [entry for entry in pinned if entry.listed.key.line == key]:
        return _pin(config, own[0].listed.name, key, own[0].listed.valid_before)
    if others := [entry.listed for entry in pinned if name is None or entry.listed.name == runner]:
        before = ", ".join(f"{line.name} {line.key.fingerprint}" for line in others)
        raise SignatureError(
            f"the runner {runner} publishes the key {fingerprint(key)}, and pinned is {before};"
            " nothing was pinned",
            f"compare it there, then: kakeya_mac runners trust {runner} --key '{key}'",
        )
    _pin(config, runner, key, valid_until)
    click.echo(f"  nothing vouches for this key: compare it with what {runner} prints on its machine")
    return 0
