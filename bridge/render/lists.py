"""Requests and runners in lists: as lines, rich tables and JSON. Nothing here prints.

Names and texts come from the bus: each is cleaned, and shown as plain text, never as markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from bridge.bus.registry import Registration
from bridge.client.runners import absence
from bridge.protocol.manifest import parse_time
from bridge.protocol.result import Phase
from bridge.protocol.runner_info import RunnerCard, is_live
from bridge.protocol.sanitize import clean_line
from bridge.protocol.target import properties
from bridge.render.outcome import age_text, claim_text, older_text, run_text, start_text
from bridge.render.terminal import WIDE, Column, plain, table
from bridge.signing import fingerprint
from bridge.signing.keyfiles import KeyState, ListedKey
from bridge.signing.trust import TrustLevel

if TYPE_CHECKING:
    from rich.table import Table

    from bridge.client.history import Row
    from bridge.github.dispatch import RunView

_TRUST = {
    TrustLevel.TRUSTED: "trusted",
    TrustLevel.REVOKED: "its key was revoked here",
    TrustLevel.UNTRUSTED_KEY: "its key is not trusted here",
    TrustLevel.UNSIGNED: "unsigned",
    TrustLevel.UNCHECKED: "signed, but not checked: ssh-keygen is not installed",
}
_CARD_FIELDS = {"seen_at", "state", "job", "load", "models", "machine", "tools", "limits", "version", "id"}


def request_table(
    rows: Sequence[Row], now: float, width: int = WIDE, runs: Mapping[str, RunView] | None = None
) -> Table:
    """Requests that wait and run, or that ran, one row each.

    Args:
        rows: From `bridge.client.history`.
        now: Seconds since the epoch, for ages.
        width: Characters to a line.
        runs: The workflow runs of those that have one, by nonce.
    """
    short, name = Column.SHORT, Column.NAME
    shown = table(width, request=short, preset=name, asked=short, runner=name, state=Column.TEXT)
    for row in rows:
        run = (runs or {}).get(row.nonce)
        state = _state(row) if run is None else f"{_state(row)}, {run_text(run)}"
        machine = row.runner or (run and run.machine) or ""
        shown.add_row(*plain(row.nonce, row.preset or "?", age_text(_age_s(row, now)), machine, state))
    return shown


def row_json(row: Row, now: float) -> dict[str, Any]:
    """One request of a list as JSON; keys that do not apply are null."""
    return {
        "nonce": row.nonce,
        "preset": _text(row.preset),
        "state": "finished" if row.phase is Phase.DONE else row.phase.value,
        "status": row.status,
        "reason": row.reason,
        "runner": _text(row.runner),
        "claim": None if row.claim is None else row.claim.to_json(),
        "attempt": row.attempt,
        "ahead": row.ahead,
        "expected_s": _rounded(row.expected_s),
        "requested_at": row.requested_at,
        "age_s": _rounded(_age_s(row, now)),
        "elapsed_s": _rounded(row.elapsed_s),
        "beat_age_s": _rounded(row.beat_age_s),
        "progress": None
        if row.progress is None
        else {"done": row.progress.done, "total": row.progress.total, "step": _text(row.progress.step)},
        "cancelling": row.cancelling,
        "finished_at": row.finished_at,
        "archived": row.archived,
    }


def _age_s(row: Row, now: float) -> float | None:
    """Seconds since a request was made, by its nonce; None: that names no moment."""
    if row.requested_at is None:
        return None
    return now - parse_time(row.requested_at).timestamp()


def _state(row: Row) -> str:
    """Where a request is and how far, or how it ended, and what else there is to know about it."""
    if row.phase is Phase.DONE:
        status = "unreadable" if row.status is None else str(row.status)
        said = [status if row.reason is None or row.reason == "ok" else f"{status} ({row.reason})"]
        said += [f"took {age_text(row.elapsed_s)}"] if row.elapsed_s is not None else []
        return ", ".join([*said, *(["archived"] if row.archived else [])])
    said = [f"{row.phase} for {age_text(row.elapsed_s)}" if row.elapsed_s else str(row.phase)]
    said += [f"no sign for {age_text(row.silent_s)}"] if row.silent_s is not None else []
    said += [older_text(row.ahead)] if row.ahead else []
    said += [start_text(row.expected_s)] if row.expected_s else []
    said += [f"attempt {row.attempt}"] if row.attempt is not None and row.attempt > 1 else []
    said += [claim_text(row.claim)] if row.claim is not None else []
    said += ["to be cancelled"] if row.cancelling else []
    if row.progress is not None and row.progress.total:
        said.append(f"{row.progress.done}/{row.progress.total} {row.progress.step}".rstrip())
    return ", ".join(said)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def _text(text: str | None) -> str | None:
    return None if text is None else clean_line(text)


def runner_json(seen: Registration, now: datetime) -> dict[str, Any]:
    """A runner as an entry of `kakeya_mac runners --json`."""
    card = seen.card
    return card.model_dump(mode="json", include=_CARD_FIELDS) | {
        "name": seen.name,
        "key": card.public_key,
        "fingerprint": None if card.public_key is None else fingerprint(card.public_key),
        "trusted": seen.trusted,
        "trusted_as": seen.signer if seen.trusted else None,
        "standing": seen.trust,
        "live": is_live(card, now),
        "presets": [offer.name for offer in card.presets if offer.available],
        "unavailable": {offer.name: offer.why for offer in card.presets if not offer.available},
        "properties": _properties(card),
    }


def key_json(entry: ListedKey) -> dict[str, Any]:
    """A listed key whose runner was not seen, with the keys of `runner_json`."""
    line, counts = entry.listed, entry.state is KeyState.COUNTS
    return dict.fromkeys(_CARD_FIELDS) | {
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


def runner_lines(seen: Registration, now: datetime) -> Iterator[str]:
    """A runner for people."""
    card = seen.card
    gone = absence(card, now)
    trust = _TRUST[seen.trust]
    if seen.trusted and seen.signer != seen.name:
        trust = f"trusted as {seen.signer}"
    job = "" if card.job is None else f" with {card.job.preset} for {card.job.elapsed_s:.0f} s"
    ago_s = max(0, round((now - parse_time(card.seen_at)).total_seconds()))
    yield f"{seen.name}  {gone or f'{card.state}{job}, seen {ago_s} s ago'}  ({trust})"
    available = [offer.name for offer in card.presets if offer.available]
    yield f"    offers   {', '.join(available) or 'nothing'}"
    lacking = [name for name, place in card.models.items() if place == "missing"]
    if lacking:
        yield f"    lacks    models {_line(', '.join(lacking))}"
    yield f"    machine  {_machine(card)}; kakeya-mac {_line(card.version)}"
    if labels := _properties(card)["label"]:
        yield f"    labels   {_line(', '.join(labels))}"
    if card.limits.require_signature:
        yield "    takes    only requests signed by a requester it knows"


def key_line(entry: ListedKey, *, looked: bool) -> str:
    """A listed key whose runner was not seen; `looked`: on a remote."""
    line, counts = entry.listed, entry.state is KeyState.COUNTS
    trust = ", ".join(filter(None, ("trusted" if counts else "", entry.words)))
    return "  ".join(
        [line.name, *(["not seen on this remote"] if looked else []), f"({trust})", line.key.line]
    )


def trust_lines(name: str, found: Sequence[Registration]) -> Iterator[str]:
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
        yield f"  when both are the same: kakeya_mac runners trust {seen.card.name} --key '{key}'"


def _properties(card: RunnerCard) -> dict[str, Any]:
    """What `run --on` can name of a runner, and its values; null where they are not known."""
    found = properties(card.machine, card.name)
    return {name: next(iter(values), None) for name, values in found.items()} | {"label": found["label"]}


def _machine(card: RunnerCard) -> str:
    known = _properties(card)
    parts = [known["chip"], f"{known['cores']} cores" if known["cores"] else None]
    parts += [f"{known['memory']:g} GB" if known["memory"] else None, known["system"], known["os"]]
    parts += [known["machine"], "Metal" if known["metal"] is True else None]
    return _line(", ".join(str(part) for part in parts if part is not None)) or "unknown"


def _line(text: str) -> str:
    return clean_line(text, limit=200)
