"""``kakeya_mac runners``: which runners are there, and the keys whose results this client believes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from bridge import settings
from bridge.bus.registry import Registration, Registry
from bridge.cli import show
from bridge.cli.keys import all_option, until_option, which_option
from bridge.cli.options import json_option, remote_option
from bridge.client.remotes import resolve_remote
from bridge.client.runners import absence, read_runners
from bridge.errors import NoRemote, RemoteUnreachable, SignatureError
from bridge.git.repo import GitRepo
from bridge.protocol.manifest import parse_time, properties
from bridge.protocol.runner_info import RunnerInfo, is_live
from bridge.protocol.sanitize import clean_line
from bridge.settings import Settings
from bridge.signing import fingerprint
from bridge.signing.keyfiles import KeyState, ListedKey
from bridge.signing.trust import TrustLevel, pin, pinned_keys, runner_keys

EPILOG = """\b
Examples:
  kakeya_mac runners
  kakeya_mac runners trust studio
  kakeya_mac runners trust studio --key "ssh-ed25519 AAAA… kakeya-mac runner studio"
  kakeya_mac runners trust --first
  kakeya_mac runners revoke studio --key SHA256:…
  kakeya_mac runners distrust studio

The runner prints its key when it starts; compare it over a channel you trust."""

_TRUST = {
    TrustLevel.TRUSTED: "trusted",
    TrustLevel.REVOKED: "its key was revoked here",
    TrustLevel.UNTRUSTED_KEY: "its key is not trusted here",
    TrustLevel.UNSIGNED: "unsigned",
    TrustLevel.UNCHECKED: "signed, but not checked: ssh-keygen is not installed",
}
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
    try:
        shown, registry = _look(config)
    except NoRemote as error:
        if remote is not None:
            raise
        click.echo(f"only the trusted keys are listed: {error.message}", err=True)
        return _show(config, None, None, as_json=as_json)
    except RemoteUnreachable:
        if not as_json:
            _show(config, None, None, as_json=False)
        raise
    return _show(config, shown, registry, as_json=as_json)


@runners.command(epilog=EPILOG)
@click.argument("name", required=False)
@click.option("--key", metavar="KEY", help="The runner's public key: 'ssh-ed25519 AAAA…', or a .pub file.")
@click.option("--first", is_flag=True, help="Trust on first use: pin the key that is published now.")
@until_option
@click.pass_context
def trust(
    context: click.Context, name: str | None, key: str | None, first: bool, valid_until: datetime | None
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
    added = pin(path, name, key, valid_before=valid_until)
    click.echo(f"{'trusted' if added else 'already trusted'}: {name} ({path})")
    return 0


@runners.command(epilog=EPILOG)
@click.argument("name")
@which_option
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
@click.argument("name")
@which_option
def distrust(name: str, which: str | None) -> int:
    """Take the keys of the runner NAME out of the list. Exit code 2 when none of its keys is trusted.

    A key that got into wrong hands is revoked, rather: a removed one can be trusted again by mistake.
    """
    keys = runner_keys(settings.load().trusted_runners)
    gone = {line.key.text for line in keys.remove(name, which)}
    click.echo(f"{len(gone)} key(s) of {name} removed from {keys.allowed}")
    return 0


def _look(config: Settings) -> tuple[str, Registry]:
    """The remote, as it is shown, and who was seen there."""
    git = GitRepo(Path.cwd())
    bus = resolve_remote(git, config.remote)
    return bus.shown, read_runners(config, git, bus)


def _show(config: Settings, remote: str | None, registry: Registry | None, *, as_json: bool) -> int:
    now, path = datetime.now(UTC), config.trusted_runners
    seen = () if registry is None else registry.seen
    left_out = 0 if registry is None else registry.left_out
    entries = pinned_keys(path)
    seen_keys = {entry.info.public_key for entry in seen if entry.trusted}
    absent = [entry for entry in entries if entry.listed.key.line not in seen_keys]
    rows = [*(_runner_json(entry, now) for entry in seen), *map(_key_json, absent)]
    document = {"file": str(path), "remote": remote, "runners": rows, "left_out": left_out}
    lines = [line for entry in seen for line in _runner_lines(entry, now)]
    lines += [_key_line(entry, looked=registry is not None) for entry in absent]
    if remote is not None and not seen:
        lines.append(f"no runner has been seen on {remote}")
    if not entries:
        lines.append(f"no runner is trusted yet ({path})")
        lines.append("  kakeya_mac runners trust NAME, or kakeya_mac runners trust --first")
    show(as_json, document, lines, untrusted=("runners",), note=bool(seen))
    if left_out and not as_json:
        click.echo(f"{left_out} invalid registration(s) were skipped", err=True)
    return 0


def _runner_json(seen: Registration, now: datetime) -> dict[str, Any]:
    info = seen.info
    return info.model_dump(mode="json", include=_INFO_FIELDS) | {
        "name": seen.name,
        "key": info.public_key,
        "fingerprint": None if info.public_key is None else fingerprint(info.public_key),
        "trusted": seen.trusted,
        "trusted_as": seen.signer if seen.trusted else None,
        "standing": seen.trust,
        "live": is_live(info, now),
        "presets": [offer.name for offer in info.presets if offer.available],
        "unavailable": {offer.name: offer.why for offer in info.presets if not offer.available},
        "properties": _properties(info),
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
    trust = _TRUST[seen.trust]
    if seen.trusted and seen.signer != seen.name:
        trust = f"trusted as {seen.signer}"
    job = "" if info.job is None else f" with {info.job.preset} for {info.job.elapsed_s:.0f} s"
    ago_s = max(0, round((now - parse_time(info.seen_at)).total_seconds()))
    yield f"{seen.name}  {absence(info, now) or f'{info.state}{job}, seen {ago_s} s ago'}  ({trust})"
    available = [offer.name for offer in info.presets if offer.available]
    yield f"    offers   {', '.join(available) or 'nothing'}"
    if lacking := [name for name, place in info.models.items() if place == "missing"]:
        yield f"    lacks    models {_line(', '.join(lacking))}"
    known = _properties(info)
    parts = [known["chip"], f"{known['cores']} cores" if known["cores"] else None]
    parts += [f"{known['memory']:g} GB" if known["memory"] else None, known["system"], known["os"]]
    parts += [known["machine"], "Metal" if known["metal"] is True else None]
    machine = _line(", ".join(str(part) for part in parts if part is not None)) or "unknown"
    yield f"    machine  {machine}; kakeya-mac {_line(info.version)}"
    if known["label"]:
        yield f"    labels   {_line(', '.join(known['label']))}"
    if info.limits.require_signature:
        yield "    takes    only requests signed by a requester it knows"


def _key_line(entry: ListedKey, *, looked: bool) -> str:
    """A listed key whose runner was not seen; `looked`: on a remote."""
    line, counts = entry.listed, entry.state is KeyState.COUNTS
    trust = ", ".join(filter(None, ("trusted" if counts else "", entry.words)))
    unseen = "not seen on this remote  " if looked else ""
    return f"{line.name}  {unseen}({trust})  {line.key.line}"


def _properties(info: RunnerInfo) -> dict[str, Any]:
    """What `run --on` can name of a runner, and its values; null where they are not known."""
    found = properties(info.machine, info.name)
    return {name: next(iter(values), None) for name, values in found.items()} | {"label": found["label"]}


def _line(text: str) -> str:
    return clean_line(text, limit=200)


def _published_keys(config: Settings, name: str | None) -> dict[str, Registration]:
    """The keys that sign the registrations that show them, of all runners or those of a name."""
    remote, registry = _look(config)
    found = {
        entry.info.public_key: entry
        for entry in registry.seen
        if entry.signer is not None
        and entry.info.public_key is not None
        and (name is None or name in (entry.name, entry.info.name))
    }
    if not found:
        there = ", ".join(entry.name for entry in registry.seen) or "none"
        named = "" if name is None else f" named {ascii(name)[:80]}"
        raise SignatureError(
            f"no runner{named} publishes a signed registration on {remote} (runners seen: {there})",
            f"it prints its key when it starts: kakeya_mac runners trust {name or 'NAME'}"
            " --key 'ssh-ed25519 …'",
        )
    return found


def _show_key(config: Settings, name: str) -> int:
    for key, seen in _published_keys(config, name).items():
        click.echo(f"{seen.name} publishes a key with the fingerprint {fingerprint(key)}")
        click.echo(
            f"  anyone with push rights can publish one: compare it with what {name} prints on its machine"
        )
        click.echo(f"  when both are the same: kakeya_mac runners trust {seen.info.name} --key '{key}'")
    click.echo("nothing was trusted", err=True)
    return 2


def _pin_first(config: Settings, name: str | None, valid_until: datetime | None) -> int:
    """Trust on first use: refuse where no key is published, or several are, or another one is pinned."""
    keys = {key: seen.info.name for key, seen in _published_keys(config, name).items()}
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
    if (known := pinned.get(print_)) is not None:
        if known.state is not KeyState.COUNTS:
            raise SignatureError(f"the key {print_} of {runner} is pinned, and {known.words}", by_hand)
        click.echo(f"already trusted: {known.listed.name} {print_} ({path})")
        return 0
    owners = {each: entry.listed.name for each, entry in pinned.items()}
    if before := [f"{owner} {each}" for each, owner in owners.items() if name is None or owner == runner]:
        is_other = runner not in owners.values()
        another = f"another machine: runners trust --first {runner}; else " if is_other else ""
        raise SignatureError(
            f"the runner {runner} publishes the key {print_}, and pinned is {', '.join(before)};"
            " nothing was pinned",
            another + by_hand,
        )
    pin(path, runner, key, valid_before=valid_until)
    click.echo(f"trusted: {runner} {print_} ({path})")
    click.echo(
        f"  nothing vouches for this key: compare it with what {runner} prints on its machine;"
        " from now on\n  only results that it signed are believed"
    )
    return 0
