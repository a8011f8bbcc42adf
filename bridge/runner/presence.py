"""Keeps this runner's card on the bus current: what it does, what it offers, what is missing here.

Owned by the serve loop, and callable from a thread beside it. One push an interval, or a few seconds after
something changed; no thread of its own. A remote that is away costs a sentence for the owner and a longer
pause, nothing else: a card is a hint, so nothing waits for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from bridge import __version__, signing
from bridge.bus.catalogue import Place, publish_card, ref_name
from bridge.bus.git import Git
from bridge.errors import BusError, MachineError, PolicyError, PushRejected, SignatureError, described
from bridge.presets import ModelNeed, Parameter, Preset
from bridge.protocol.manifest import format_time
from bridge.protocol.runner_info import (
    MAX_PRESETS,
    Limits,
    Load,
    Offer,
    Property,
    RunnerCard,
    State,
    Work,
)
from bridge.protocol.sanitize import clean_line
from bridge.runner import facts, models, private
from bridge.runner.durations import Durations
from bridge.runner.policy import Policy
from bridge.runner.policy.hours import shown
from bridge.runner.station import Station

INTERVAL_S = 60.0
SHORTEST_INTERVAL_S = 5.0
SETTLE_S = 10.0
# Until other machines are told of an answer that somebody could have given again by putting its request back.
ANSWERED_S = 2.0
OFFERS_S = 60.0
LONGEST_PAUSE_S = 600.0
DURATIONS_NAME = "durations.json"

_MISSING = "missing"


class Presence:
    """One runner's card.

    Args:
        station: The runner.
        git: Any repository of this machine; nothing is left in it.
        interval_s: How often the card is renewed.
        settle_s: Least seconds between two cards when something changes.
        answered: The signed requests answered here that have not expired.
        clock: Monotonic seconds.
        now: The time of day (aware).
    """

    def __init__(
        self,
        station: Station,
        git: Git,
        *,
        interval_s: float = INTERVAL_S,
        settle_s: float = SETTLE_S,
        answered: Callable[[], tuple[str, ...]] = lambda: (),
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._station = station
        self._git = git
        self._interval_s = max(SHORTEST_INTERVAL_S, interval_s)
        self._settle_s = min(settle_s, self._interval_s)
        self._answered = answered
        self._clock = clock
        self._now = now
        self._started_at = format_time(now())
        self._durations = Durations(station.folder / DURATIONS_NAME, station.presets)
        self._lock = threading.Lock()
        self._offers: tuple[float, tuple[Offer, ...], dict[str, str]] | None = None
        self._place: Place | None = None
        self._told: tuple[object, ...] | None = None
        self._told_answered: tuple[str, ...] = ()
        self._told_at = 0.0
        self._pause_s = 0.0
        self._said: str | None = None

    def card(self, state: State, job: Work | None = None, *, pending: int = 0, done: int = 0) -> RunnerCard:
        """The runner as it is now. What is available is looked at once a minute."""
        station = self._station
        offers, found = self._current_offers()
        secrets = private.secrets(station)

        def text(value: str, limit: int) -> str:
            return _text(secrets.cut_text(value), limit)

        return RunnerCard(
            name=station.identity.name,
            id=station.identity.id,
            session=station.identity.session,
            version=__version__[:64],
            audience=station.audience,
            public_key=self._public_key(),
            started_at=self._started_at,
            seen_at=format_time(self._now()),
            interval_s=self._interval_s,
            state=state,
            job=job,
            load=Load(pending=pending, done=done, load_1m=_load()),
            presets=offers,
            models={name: text(place, 1000) for name, place in list(found.items())[:256]},
            machine={
                name: text(value, 1000) if isinstance(value, str) else value
                for name, value in list(station.machine.items())[:64]
            },
            tools={name: text(value, 200) for name, value in list(station.tools.items())[:64]},
            limits=Limits(
                max_timeout_s=station.policy.max_timeout_s,
                require_signature=station.policy.require_signature,
                quotas={  # of everybody; those of single requesters would publish their names
                    "max_queued_per_requester": station.policy.max_queued_per_requester,
                    "max_running_per_requester": station.policy.max_running_per_requester,
                    "max_queued_unsigned": station.policy.max_queued(None),
                },
            ),
            answered=self._answered(),
        )

    def tell(
        self, state: State = State.IDLE, job: Work | None = None, *, pending: int = 0, done: int = 0
    ) -> str | None:
        """Publish the card if it is time; call it as often as you like, from any thread.

        Returns:
            A sentence for the owner: why it could not be published, or under which other name it stands. Each
            is returned once, not at every interval.
        """
        if not self._lock.acquire(blocking=False):
            return None  # another thread is at it
        try:
            since = self._clock() - self._told_at
            first = self._told is None and not self._pause_s
            answered = self._answered()
            settle_s = self._settle_s if answered == self._told_answered else min(ANSWERED_S, self._settle_s)
            if not first and since < max(settle_s, self._pause_s):
                return None
            offers, _ = self._current_offers()
            shown = (state, None if job is None else job.nonce, offers, answered)
            if shown == self._told and since < self._interval_s:
                return None
            return self._publish(state, job, pending, done, shown)
        finally:
            self._lock.release()

    def stopped(self, *, done: int = 0) -> str | None:
        """Say that this runner is gone; a sentence for the owner when that could not be published."""
        with self._lock:
            if self._place is None and not self._answered():
                return None  # nobody was told that it is there, and there is nothing to be known of it
            return self._publish(State.STOPPED, None, 0, done, (State.STOPPED,))

    def look_again(self) -> None:
        """The owner's files changed: what is offered is to be looked at before the next card."""
        self._offers = None

    def took(self, preset: str, seconds: float) -> None:
        """Note how long a finished job took; the card shows the median of the last few.

        Raises:
            OSError: The note cannot be kept on this disk; this process knows it all the same.
        """
        self._durations.add(preset, seconds)

    def _publish(
        self, state: State, job: Work | None, pending: int, done: int, shown: tuple[object, ...]
    ) -> str | None:
        said = None
        self._told_at = self._clock()
        try:
            card = self.card(state, job, pending=pending, done=done)
            self._told_answered = card.answered
            signature = self._signature(card)
            if signature is None and card.public_key is not None:
                card = card.model_copy(update={"public_key": None})
            self._place = publish_card(
                self._git, self._station.remote, card, signature, held=self._place, now=self._now()
            )
        except (BusError, MachineError, OSError) as error:
            self._told = None
            if isinstance(error, PushRejected):
                self._place = None  # the next attempt asks anew what this server takes
            self._pause_s = min(max(self._settle_s, 2 * self._pause_s), LONGEST_PAUSE_S)
            said = f"the card of this runner is not published: {described(error)}"
        except ValueError as error:  # an owner's preset that fits no card
            self._told, self._pause_s = None, LONGEST_PAUSE_S
            said = f"this runner fits no card and is not listed: {clean_line(str(error))}"
        else:
            self._told, self._pause_s = shown, 0.0
            if self._place.name != ref_name(card):
                said = (
                    f"another live runner is named {card.name}: this one is listed as {self._place.name};"
                    " give one of them another --name"
                )
        if said == self._said:
            return None
        self._said = said
        return said

    def _signature(self, card: RunnerCard) -> bytes | None:
        key = self._station.key
        if key is None or card.public_key is None:
            return None
        try:
            return signing.sign(key, signing.RUNNER_NAMESPACE, card.to_bytes())
        except (SignatureError, MachineError):  # as results do: unsigned, and shown so
            return None

    def _public_key(self) -> str | None:
        try:
            line = self._station.public_key
        except OSError:
            return None
        return None if line is None else " ".join(line.split()[:2])

    def _current_offers(self) -> tuple[tuple[Offer, ...], dict[str, str]]:
        if self._offers is None or self._clock() - self._offers[0] >= OFFERS_S:
            offers, found = self._look()
            self._offers = (self._clock(), offers, found)
        return self._offers[1], self._offers[2]

    def _look(self) -> tuple[tuple[Offer, ...], dict[str, str]]:
        """Every preset with whether it can run here, those that can first; and where each model lies."""
        station = self._station
        places = models.Places(
            configured=station.policy.models,
            environment=station.environment,
            home=station.home,
            metal=bool(station.machine["metal"]),
        )
        offers: list[Offer] = []
        found: dict[str, str] = {}
        for preset in station.presets.values():
            available, why, lies = self._judge(preset, places)
            found |= {name: place for name, place in lies.items() if place != _MISSING or name not in found}
            offers.append(self._offer(preset, available, why))
        offers.sort(key=lambda offer: (not offer.available, offer.name))
        return tuple(offers[:MAX_PRESETS]), found

    def _judge(self, preset: Preset, places: models.Places) -> tuple[bool, str | None, dict[str, str]]:
        """Whether a preset can run here, why not (a clause about this runner), and where its models lie."""
        lies, missing = _models(preset.models, places)
        if self._station.rulebook.fault is not None:
            return False, "its policy is broken, so it takes nothing", lies
        try:
            self._station.policy.check(preset)
        except PolicyError:
            return False, f"its policy does not allow {preset.name}", lies
        if lacking := facts.unfit(preset):
            return False, f"it cannot run {preset.name}: {lacking}", lies
        hours = _closed(self._station.policy, self._now())
        if hours is not None and self._station.policy.refuses_outside_hours:
            return False, hours, lies
        if missing and preset.runs_repo_code:
            return True, f"the commit must bring the models {', '.join(missing)}", lies
        if missing:
            return False, f"it lacks models of {preset.name}: {', '.join(missing)}", lies
        return True, hours, lies

    def _offer(self, preset: Preset, available: bool, why: str | None) -> Offer:
        return Offer(
            name=preset.name,
            aliases=preset.aliases[:32],
            summary=_text(preset.summary, 1000),
            digest=preset.digest,
            engine=preset.engine,
            evidence=preset.evidence_kind,
            timeout_s=preset.timeout_s,
            parameters={name: _property(parameter) for name, parameter in preset.params.items()},
            available=available,
            why=None if why is None else _text(why, 1000),
            typical_s=self._durations.typical(preset.name),
        )


def _closed(policy: Policy, now: datetime) -> str | None:
    """A clause about a runner outside its hours; None: jobs may begin there."""
    if policy.is_open(now):
        return None
    return f"it begins jobs only within {shown(policy.hours or ())} of its local time"


def _models(needs: tuple[ModelNeed, ...], places: models.Places) -> tuple[dict[str, str], list[str]]:
    """Where a preset's models lie, and which of them are missing."""
    try:
        return {name: str(found) for name, found in models.resolve(needs, places).items()}, []
    except models.ModelMissing:
        lies, missing = {}, []
    for need in needs:
        try:
            alone = models.resolve([ModelNeed(need.name, need.mac)], places)
            lies[need.name] = str(alone[need.name])
        except models.ModelMissing:
            lies[need.name] = _MISSING
            missing.append(need.name)
    return lies, missing or [need.name for need in needs]


def _property(parameter: Parameter) -> Property:
    """A parameter's schema in the size of a card."""
    schema = parameter.schema() | {"description": _text(parameter.description, 1000)}
    return Property.model_validate(schema | {"enum": parameter.enum or None})


def _text(text: str, limit: int) -> str:
    return clean_line(text, limit=limit)


def _load() -> float | None:
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None
