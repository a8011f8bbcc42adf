"""Which live runners can take a request, and why the others cannot, from what they say of themselves.

Pure, and a hint: cards are up to a minute old and anyone with push rights can write one, so a request is
pushed whatever comes out here. A pattern that a card gives for a parameter is not tried, because matching a
stranger's pattern can take for ever; the runner does it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bridge.bus.catalogue import Seen
from bridge.protocol.manifest import ParamValue, parse_time
from bridge.protocol.runner_info import Offer, Property, RunnerCard, State, is_live
from bridge.protocol.sanitize import clean_line, quoted

_KINDS = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}
_NAMED = 5
_CLOSE_S = 0.005
_HALVINGS = 60  # of a wait of years, and less than a microsecond is left
# What a running job has left at least: a runner with a job is never free.
_LEAST_LEFT_S = 1.0


@dataclass(frozen=True)
class Outlook:
    """Who can take a request now.

    Attributes:
        preset: What is asked for.
        live: How many runners are there.
        able: Names of the live ones that can take it.
        unable: Every other runner seen, and why it cannot; reads on after its name.
        expected_s: Seconds until it is likely to start; None: not known.
        notes: What else the requester should know, one sentence each.
    """

    preset: str
    live: int
    able: tuple[str, ...]
    unable: Mapping[str, str]
    expected_s: float | None
    notes: tuple[str, ...] = ()

    @property
    def sentences(self) -> tuple[str, ...]:
        """For people: that nobody can take it and why, or what to know about those who can."""
        if self.able:
            return self.notes
        if not self.unable:
            return (
                f"no runner has been seen on this remote: {self.preset} waits until one comes",
                *self.notes,
            )
        named = [f"{name}: {why}" for name, why in list(self.unable.items())[:_NAMED]]
        more = len(self.unable) - len(named)
        rest = f"; and {more} more" if more else ""
        return (f"no live runner can take this request now: {'; '.join(named)}{rest}", *self.notes)

    def as_json(self) -> dict[str, Any]:
        """The same for a JSON line."""
        return {
            "live": self.live,
            "able": list(self.able),
            "unable": dict(self.unable),
            "expected_s": self.expected_s,
        }


def who_can(
    cards: Sequence[Seen],
    *,
    preset: str,
    params: Mapping[str, ParamValue],
    now: datetime,
    signed: bool,
    audience: str | None = None,
    timeout_s: int | None = None,
    ahead: int | None = None,
    running: int | None = None,
    pinned: bool = False,
) -> Outlook:
    """Hold a request against every card.

    Args:
        cards: What was seen on the remote.
        preset: Name or alias.
        params: Values with defaults.
        now: This reader's time (aware).
        signed: Whether the request carries a signature.
        audience: The remote it names; None: not compared.
        timeout_s: Seconds asked for; None: the preset's.
        ahead: Older requests that wait, too; None: as many as the runners' cards leave waiting.
        running: Requests that are claimed on the remote; None: as many as the cards show.
        pinned: Whether this client believes only runners whose keys it trusts.
    """
    able, unable = [], {}
    for seen in cards:
        why = _obstacle(seen.card, preset, params, now, signed=signed, audience=audience)
        if why is None:
            able.append(seen)
        else:
            unable[seen.name] = clean_line(why, limit=300)
    # Those who are there first: their reasons are the ones that can be acted on.
    absent = {seen.name for seen in cards if not is_live(seen.card, now)}
    unable = dict(sorted(unable.items(), key=lambda item: item[0] in absent))
    return Outlook(
        preset=preset,
        live=len(cards) - len(absent),
        able=tuple(seen.name for seen in able),
        unable=unable,
        expected_s=_forecast(able, preset, now, unseen=_unseen(cards, running, now)).wait_s(
            _waiting(cards, able, now) if ahead is None else ahead
        ),
        notes=_notes(able, preset, timeout_s, pinned=pinned),
    )


@dataclass(frozen=True)
class Forecast:
    """How soon requests of one preset start, when whoever is free takes the oldest.

    Attributes:
        free: When each runner that can take them is free, seconds from now; the soonest first.
        each_s: How long one takes; None: not known.
    """

    free: tuple[float, ...]
    each_s: float | None

    def wait_s(self, ahead: int) -> float | None:
        """Seconds until a request with so many older ones is likely to start; None: not known."""
        if ahead < self.free.count(0.0):
            return 0.0
        if not self.free or (ahead and self.each_s is None):
            return None
        return round(_start_s(self.free, self.each_s or 0.0, ahead), 1)


def forecast(cards: Sequence[Seen], *, preset: str, now: datetime, running: int | None = None) -> Forecast:
    """What the cards tell of how soon requests of one preset start.

    Args:
        cards: What was seen on the remote.
        preset: Name or alias.
        now: This reader's time (aware).
        running: Requests that are claimed on the remote; None: as many as the cards show.
    """
    able = [
        seen
        for seen in cards
        if absence(seen.card, now) is None
        and (offer := seen.card.offer(preset)) is not None
        and offer.available
    ]
    return _forecast(able, preset, now, unseen=_unseen(cards, running, now))


def signed_only(cards: Sequence[Seen], now: datetime) -> tuple[str, ...]:
    """Names of the live runners that heed nothing unsigned, neither requests nor wishes to stop one."""
    return tuple(
        seen.name for seen in cards if is_live(seen.card, now) and seen.card.limits.require_signature
    )


def absence(card: RunnerCard, now: datetime) -> str | None:
    """Why a runner is not there, as a clause about it; None: it is."""
    if is_live(card, now):
        return None
    if card.state is State.STOPPED:
        return f"stopped at {card.seen_at}"
    if parse_time(card.seen_at) > now:
        return f"its card is from the future ({card.seen_at})"
    return f"not seen since {card.seen_at}"


def _obstacle(
    card: RunnerCard,
    preset: str,
    params: Mapping[str, ParamValue],
    now: datetime,
    *,
    signed: bool,
    audience: str | None,
) -> str | None:
    if why := absence(card, now):
        return why
    if audience is not None and card.audience != audience:
        return f"it serves {card.audience}, and this request is meant for {audience}"
    offer = card.offer(preset)
    if offer is None:
        return f"it has no preset {preset}"
    if not offer.available:
        return offer.why or f"it cannot run {preset} now"
    if card.limits.require_signature and not signed:
        return "it takes only signed requests, and this one is unsigned"
    return _misfit(offer, params)


def _misfit(offer: Offer, params: Mapping[str, ParamValue]) -> str | None:
    """The first parameter that a runner's version of the preset does not take."""
    for name, value in params.items():
        known = offer.parameters.get(name)
        if known is None:
            return f"its {offer.name} has no parameter {name}"
        if (why := _refuses(known, value)) is not None:
            return f"its {offer.name} does not take {name} = {quoted(value, 80)}: {why}"
    lacking = [name for name, known in offer.parameters.items() if known.default is None]
    missing = next((name for name in lacking if name not in params), None)
    return None if missing is None else f"its {offer.name} needs the parameter {missing}"


def _refuses(known: Property, value: ParamValue) -> str | None:
    if type(value) not in _KINDS[known.type]:
        return f"it must be of type {known.type}"
    if known.enum is not None and value not in known.enum:
        return f"it must be one of {', '.join(str(choice)[:40] for choice in known.enum[:20])}"
    if isinstance(value, str):
        if known.maxLength is not None and len(value) > known.maxLength:
            return f"it may have {known.maxLength} characters"
        if not value.startswith(known.prefix or ""):
            return f"it must begin with {known.prefix}"
        return None if value.endswith(known.suffix or "") else f"it must end in {known.suffix}"
    if known.minimum is not None and value < known.minimum:
        return f"the minimum is {known.minimum:g}"
    if known.maximum is not None and value > known.maximum:
        return f"the maximum is {known.maximum:g}"
    return None


def _notes(able: Sequence[Seen], preset: str, timeout_s: int | None, *, pinned: bool) -> tuple[str, ...]:
    notes = []
    if pinned and able and not any(seen.trusted for seen in able):
        names = ", ".join(seen.name for seen in able[:_NAMED])
        notes.append(
            f"only runners whose keys are not trusted here can take this request ({names}):"
            " their results will not be believed"
        )
    if timeout_s is not None and able:
        allowed = {seen.name: _allowed_s(seen.card, preset) for seen in able}
        most = max(allowed.values())
        if most < timeout_s:
            notes.append(f"the live runners allow it at most {most} s; {timeout_s} s were asked for")
    return tuple(notes)


def _allowed_s(card: RunnerCard, preset: str) -> int:
    offer = card.offer(preset)
    most = card.limits.max_timeout_s
    return most if offer is None else min(most, offer.timeout_s)


def _waiting(cards: Sequence[Seen], able: Sequence[Seen], now: datetime) -> int:
    """How many requests wait, by the cards alone.

    A card counts every request without a result, what runs included, on that runner or on another one.
    """
    unanswered = max((seen.card.load.pending for seen in able), default=0)
    running = sum(seen.card.job is not None and is_live(seen.card, now) for seen in cards)
    return max(0, unanswered - running)


def _unseen(cards: Sequence[Seen], running: int | None, now: datetime) -> int:
    """How many requests run, by the claims, that no live card shows (yet): cards lag behind claims."""
    busy = sum(_is_busy(seen.card) and is_live(seen.card, now) for seen in cards)
    return max(0, (running or 0) - busy)


def _is_busy(card: RunnerCard) -> bool:
    return card.job is not None or card.state is State.BUSY


def _forecast(able: Sequence[Seen], preset: str, now: datetime, *, unseen: int) -> Forecast:
    """What the cards of runners that can take a preset tell.

    Each request is taken to be as long as this preset is on the runners that know. Runners of which nobody
    knows when they are free are left out, and for each `unseen` job one that looks idle.
    """
    known = sorted(left for seen in able if (left := _left_s(seen.card, now)) is not None)
    typical = [
        offer.typical_s
        for seen in able
        if (offer := seen.card.offer(preset)) is not None and offer.typical_s is not None
    ]
    free = tuple(known[min(unseen, known.count(0.0)) :])
    return Forecast(free, statistics.median(typical) if typical else None)


def _start_s(free: Sequence[float], each_s: float, ahead: int) -> float:
    """When the request with `ahead` others in front of it starts.

    Args:
        free: When each runner is free, seconds from now.
        each_s: How long a request takes; so far apart are starts on one runner.
        ahead: Requests taken to start before; a hostile card may say any number: they are not gone through.
    """
    early, late = min(free), min(free) + ahead * each_s
    if each_s <= 0:
        return early
    for _ in range(_HALVINGS):
        if late - early < _CLOSE_S:
            break
        middle = (early + late) / 2
        started = sum(int((middle - time) / each_s) + 1 for time in free if time <= middle)
        early, late = (early, middle) if started > ahead else (middle, late)
    return late


def _left_s(card: RunnerCard, now: datetime) -> float | None:
    """What a runner's job has left; 0 when it has none, None when nobody knows.

    A job past its typical time is taken to have left half of what it has run so far: half of all jobs are
    longer than the median, and the longer one runs the longer it is likely to go on.
    """
    if card.job is None:
        return None if _is_busy(card) else 0.0
    offer = card.offer(card.job.preset)
    if offer is None or offer.typical_s is None:
        return None
    age_s = max(0.0, (now - parse_time(card.seen_at)).total_seconds())
    ran_s = card.job.elapsed_s + age_s
    left_s = offer.typical_s - ran_s
    return max(_LEAST_LEFT_S, left_s if left_s > 0 else ran_s / 2)
