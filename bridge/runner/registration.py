"""Keeps this runner's registration on the bus current: what it does, what it offers, what is missing here.

One push an interval, or a few seconds after something changed; no thread of its own. A remote that is away
costs a log line: a registration is a hint, so nothing waits for it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from typing import Any

from bridge import __version__, signing
from bridge.bus.registry import ref_name, register
from bridge.bus.requests import RefValue
from bridge.errors import PushRejected, describe
from bridge.git.cache import GitCache
from bridge.presets import ModelNeed, Preset
from bridge.protocol.manifest import format_time
from bridge.protocol.runner_info import (
    MAX_PRESETS,
    Limits,
    Offer,
    Property,
    RunnerInfo,
    RunnerLoad,
    State,
    Work,
)
from bridge.protocol.sanitize import clean_line
from bridge.runner import machine, models
from bridge.runner.config import RunnerConfig
from bridge.runner.machine import Fact
from bridge.runner.store import Store

log = logging.getLogger(__name__)

SETTLE_S = 10.0
OFFERS_S = 60.0
_MISSING = "missing"


@dataclass
class Registrar:
    """One runner's registration, renewed every `interval_s`, or `SETTLE_S` after something changed."""

    config: RunnerConfig
    cache: GitCache
    store: Store
    _: KW_ONLY
    interval_s: float = 60.0
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    _offers: tuple[float, tuple[Offer, ...], dict[str, str]] | None = field(default=None, init=False)
    _place: RefValue | None = field(default=None, init=False)
    _told: tuple[object, ...] | None = field(default=None, init=False)  # None: the last attempt failed
    _told_at: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._started_at = format_time(self.now())

    def info(self, state: State, job: Work | None = None, *, pending: int = 0, done: int = 0) -> RunnerInfo:
        """The runner as it is now. What is available is looked at once a minute."""
        config, policy, identity = self.config, self.config.policy, self.config.identity
        key = config.public_key
        offers, found = self._current_offers()
        secrets = config.secrets()

        def texts(values: Mapping[str, Fact], most: int, limit: int = 1000) -> dict[str, Any]:
            return {
                name: clean_line(secrets.cut_text(value), limit=limit) if isinstance(value, str) else value
                for name, value in list(values.items())[:most]
            }

        return RunnerInfo(
            name=identity.name,
            id=identity.id,
            session=identity.session,
            version=__version__[:64],
            audience=config.audience,
            public_key=key and " ".join(key.split()[:2]),
            started_at=self._started_at,
            seen_at=format_time(self.now()),
            interval_s=self.interval_s,
            state=state,
            job=job,
            load=RunnerLoad(pending=pending, done=done, load_1m=round(os.getloadavg()[0], 2)),
            presets=offers,
            models=texts(found, 256),
            machine=texts(config.facts(), 64),
            tools=texts(config.tools, 64, 200),
            limits=Limits(
                max_timeout_s=policy.max_timeout_s,
                require_signature=policy.require_signature,
                quotas={  # of everyone; those of single requesters would publish their names
                    "max_queued_per_requester": policy.max_queued_per_requester,
                    "max_running_per_requester": policy.max_running_per_requester,
                    "max_queued_unsigned": policy.max_queued(None),
                },
            ),
        )

    def tell(self, state: State, job: Work | None = None, *, pending: int = 0, done: int = 0) -> None:
        """Register if it is time; call it as often as you like."""
        since = float("inf") if self._told_at is None else self.clock() - self._told_at
        saves = self._told is None or self.config.timing.fast_s is None  # a public host counts pushes
        if since < (self.interval_s if saves else min(SETTLE_S, self.interval_s)):
            return
        try:
            shown = (state, None if job is None else job.nonce, self._current_offers()[0])
            if shown != self._told or since >= self.interval_s:
                self._publish(self.info(state, job, pending=pending, done=done))
                self._told = shown
        except Exception as error:  # a hint: whatever goes wrong with it, the jobs go on
            self._note_failure(error)

    def stopped(self, *, done: int = 0) -> None:
        """Say that this runner is gone, if it was registered."""
        if self._place is not None:
            try:
                self._publish(self.info(State.STOPPED, done=done))
            except Exception as error:
                self._note_failure(error)

    def refresh(self) -> None:
        """The owner's files changed: look again at what is offered."""
        self._offers = None

    def _publish(self, info: RunnerInfo) -> None:
        self._told_at = self.clock()
        signature = self.config.sign(info.to_bytes(), signing.RUNNER_NAMESPACE)
        if signature is None:  # unsigned, and shown so
            info = info.model_copy(update={"public_key": None})
        place = register(self.cache, info, signature, place=self._place, now=self.now())
        if place.name not in (ref_name(info), self._place and self._place.name):
            log.warning(
                "another live runner is named %s, so this one is listed as %s; give one a new --name",
                info.name,
                place.name,
            )
        self._place = place

    def _note_failure(self, error: Exception) -> None:
        if isinstance(error, PushRejected):
            self._place = None  # the next attempt finds out what this server takes
        self._told, self._told_at = None, self.clock()
        # A `ValueError` comes of an owner's preset that fits no registration.
        why = clean_line(str(error)) if isinstance(error, ValueError) else describe(error)
        log.warning("this runner is not registered: %s", why)

    def _current_offers(self) -> tuple[tuple[Offer, ...], dict[str, str]]:
        """Every preset with whether it can run here, those that can first; and where each model lies."""
        if self._offers is None or self.clock() - self._offers[0] >= OFFERS_S:
            offers: list[Offer] = []
            found: dict[str, str] = {}
            for preset in self.config.presets.values():
                lies = _models(preset.models, self.config.model_places())
                missing = [name for name, place in lies.items() if place == _MISSING]
                found |= {
                    name: place for name, place in lies.items() if name not in missing or name not in found
                }
                offers.append(self._offer(preset, *self._why_not(preset, missing)))
            offers.sort(key=lambda offer: (not offer.available, offer.name))
            self._offers = (self.clock(), tuple(offers[:MAX_PRESETS]), found)
        return self._offers[1:]

    def _why_not(self, preset: Preset, missing: list[str]) -> tuple[bool, str | None]:
        """Whether a preset can run here, and a clause about this runner that says why not."""
        policy = self.config.policy
        if self.config.rulebook.fault is not None:
            return False, "its policy is broken, so it takes no request"
        if not policy.allows(preset):
            return False, f"its policy does not allow {preset.name}"
        if lacking := machine.unfit(preset, allow_unsandboxed=policy.allow_unsandboxed):
            return False, f"it cannot run {preset.name}: {lacking}"
        hours = None
        if not policy.is_open(self.now()):
            hours = f"it begins jobs only within {policy.hours_text} of its local time"
            if policy.outside_hours == "refuse":
                return False, hours
        if missing and preset.runs_repo_code:
            return True, f"the commit must bring the models {', '.join(missing)}"
        if missing:
            return False, f"it lacks models of {preset.name}: {', '.join(missing)}"
        return True, hours

    def _offer(self, preset: Preset, available: bool, why: str | None) -> Offer:
        return Offer(
            name=preset.name,
            aliases=preset.aliases[:32],
            summary=preset.summary,
            digest=preset.digest,
            engine=preset.engine,
            evidence=preset.evidence_kind,
            timeout_s=preset.timeout_s,
            parameters={
                name: Property.model_validate(each.keywords() | {"enum": each.enum or None})
                for name, each in preset.params.items()
            },
            available=available,
            why=None if why is None else clean_line(why, limit=1000),
            typical_s=self.store.typical_seconds(preset.name),
        )


def _models(needs: tuple[ModelNeed, ...], places: models.Places) -> dict[str, str]:
    """Where a preset's models lie; where one is missing, each by itself, without a stand-in."""
    try:
        return {name: str(found) for name, found in models.resolve(needs, places).items()}
    except models.ModelMissing:
        if len(needs) == 1:
            return {needs[0].name: _MISSING}
    alone = [_models((ModelNeed(need.name, need.mac),), places) for need in needs]
    return {name: place for lies in alone for name, place in lies.items()}
