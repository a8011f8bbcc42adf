"""Runners as lines and as JSON: those whose cards were seen, and trusted keys whose runners were not.

What a card says is text from the bus: it is cleaned here, and the reader is told whose words they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from bridge.bus.catalogue import Seen
from bridge.bus.results import Standing
from bridge.client.availability import absence
from bridge.protocol.manifest import parse_time
from bridge.protocol.runner_info import RunnerCard, is_live
from bridge.protocol.sanitize import clean_line
from bridge.signing import fingerprint
from bridge.signing.keyring import Entry
from bridge.signing.keyring import State as KeyState

_STANDINGS = {
    Standing.TRUSTED: "trusted",
    Standing.REVOKED: "its key was revoked here",
    Standing.UNTRUSTED_KEY: "its key is not trusted here",
    Standing.UNSIGNED: "unsigned",
    Standing.UNCHECKED: "signed, but not checked: ssh-keygen is not installed",
}
_PROGRAM = "kakeya_mac runners trust"


def runner_json(seen: Seen, now: datetime) -> dict[str, Any]:
    """A runner as an entry of `kakeya_mac runners --json`."""
    card = seen.card
    return {
        "name": seen.name,
        "key": card.public_key,
        "fingerprint": None if card.public_key is None else fingerprint(card.public_key),
        "trusted": seen.trusted,
        "trusted_as": seen.signer if seen.trusted else None,
        "standing": seen.standing,
        "live": is_live(card, now),
        "seen_at": card.seen_at,
        "state": card.state,
        "job": None if card.job is None else card.job.model_dump(mode="json"),
        "load": card.load.model_dump(mode="json"),
        "presets": [offer.name for offer in card.presets if offer.available],
        "unavailable": {offer.name: offer.why for offer in card.presets if not offer.available},
        "models": card.models,
        "machine": card.machine,
        "tools": card.tools,
        "limits": card.limits.model_dump(mode="json"),
        "version": card.version,
        "id": card.id,
    }


def key_json(entry: Entry) -> dict[str, Any]:
    """A listed key whose runner was not seen, with the keys of `runner_json`."""
    line, counts = entry.listed, entry.state is KeyState.COUNTS
    nothing = ("seen_at", "state", "job", "load", "models", "machine", "tools", "limits", "version", "id")
    return {
        "name": line.name,
        "key": line.key.line,
        "fingerprint": line.key.fingerprint,
        "trusted": counts,
        "trusted_as": line.name if counts else None,
        "standing": None if counts else entry.state,
        "live": False,
        "presets": [],
        "unavailable": {},
        **dict.fromkeys(nothing),
    }


def runner_lines(seen: Seen, now: datetime) -> Iterator[str]:
    """A runner for people."""
    card = seen.card
    gone = absence(card, now)
    standing = _STANDINGS[seen.standing]
    if seen.trusted and seen.signer != seen.name:
        standing = f"trusted as {seen.signer}"
    yield f"{seen.name}  {gone or f'{_doing(card)}, seen {_ago(card, now)}'}  ({standing})"
    available = [offer.name for offer in card.presets if offer.available]
    yield f"    offers   {', '.join(available) or 'nothing'}"
    lacking = [name for name, place in card.models.items() if place == "missing"]
    if lacking:
        yield f"    lacks    models {_line(', '.join(lacking))}"
    yield f"    machine  {_machine(card.machine)}; kakeya-mac {_line(card.version)}"
    if card.limits.require_signature:
        yield "    takes    only requests signed by a requester it knows"


def key_line(entry: Entry, *, looked: bool) -> str:
    """A listed key whose runner was not seen; `looked`: on a remote."""
    line, counts = entry.listed, entry.state is KeyState.COUNTS
    trust = ", ".join(filter(None, ("trusted" if counts else "", entry.words)))
    return "  ".join(
        [line.name, *(["not seen on this remote"] if looked else []), f"({trust})", line.key.line]
    )


def trust_lines(name: str, found: Sequence[Seen]) -> Iterator[str]:
    """What the runners of a name say their key is, and how to trust it after comparing.

    Args:
        name: As it was asked for.
        found: Runners of that name whose cards are signed by the key they show.
    """
    for seen in found:
        key = seen.card.public_key
        if key is None:
            continue
        yield f"{seen.name} publishes a key with the fingerprint {fingerprint(key)}"
        yield f"  anyone with push rights can publish one: compare it with what {name} prints on its machine"
        yield f"  when both are the same: {_PROGRAM} {seen.card.name} --key '{key}'"


def _doing(card: RunnerCard) -> str:
    if card.job is None:
        return str(card.state)
    return f"{card.state} with {card.job.preset} for {card.job.elapsed_s:.0f} s"


def _ago(card: RunnerCard, now: datetime) -> str:
    seconds = max(0, round((now - parse_time(card.seen_at)).total_seconds()))
    return f"{seconds} s ago"


def _machine(facts: Mapping[str, str | int | float | bool | None]) -> str:
    parts = [facts.get("chip"), facts.get("system")]
    memory = facts.get("memory_bytes")
    if isinstance(memory, (int, float)) and not isinstance(memory, bool) and 0 < memory < 1e18:
        parts.append(f"{memory / 1e9:.0f} GB")
    return _line(", ".join(str(part) for part in parts if part is not None)) or "unknown"


def _line(text: str) -> str:
    return clean_line(text, limit=200)
