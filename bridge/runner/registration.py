"""Keeps this runner's registration on the bus current: what it does, offers, and lacks."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from typing import Any

from bridge import __version__, signing
from bridge.bus.registry import ref_name, register
from bridge.bus.requests import RefValue
from bridge.errors import PushRejected, RequestRefused, describe
from bridge.git.cache import GitCache
from bridge.presets import ModelNeed, Parameter, Preset, model_needs, model_parameter
from bridge.protocol import runner_info
from bridge.protocol.manifest import format_time
from bridge.protocol.runner_info import Offer, RunnerInfo, State, Work
from bridge.protocol.sanitize import clean_line
from bridge.runner import models
from bridge.runner.admission import check_machine
from bridge.runner.config import RunnerConfig
from bridge.runner.control import DRAINS, is_draining
from bridge.runner.machine import Fact
from bridge.runner.store import Store

log = logging.getLogger(__name__)

SETTLE_S = 10.0


@dataclass
class Registrar:
    """One runner's registration, renewed at an interval, or `SETTLE_S` after something changed.

    It is a hint, so nothing waits for it, and a remote that is away costs a log line.
    """

    config: RunnerConfig
    cache: GitCache
    store: Store
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    _place: RefValue | None = field(default=None, init=False)
    _told: object = field(default=None, init=False)
    _look_at: float = field(default=float("-inf"), init=False)  # by `clock`
    _renew_at: float = field(default=float("-inf"), init=False)

    def __post_init__(self) -> None:
        self._interval_s = self.config.timing.registration_s
        self._started_at = format_time(self.now())

    def info(self, state: State, job: Work | None = None, *, pending: int = 0, done: int = 0) -> RunnerInfo:
        """The runner as it is now."""
        config, policy, identity = self.config, self.config.policy, self.config.identity
        key, secrets = config.public_key, config.secrets()
        # Those that can run first, because the number is limited.
        offers = sorted(map(self._offer, config.presets.values()), key=lambda offer: not offer.available)

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
            interval_s=self._interval_s,
            state=state,
            job=job,
            load=runner_info.RunnerLoad(pending=pending, done=done, load_1m=round(os.getloadavg()[0], 2)),
            presets=tuple(offers[: runner_info.MAX_PRESETS]),
            models=texts(self._models(), 256),
            machine=texts(config.facts(), 64),
            tools=texts(config.tools, 64, 200),
            limits=runner_info.Limits(
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
        now = self.clock()
        if now < self._look_at:
            return
        due, self._look_at = now >= self._renew_at, now + self._interval_s  # the latter if it fails
        try:
            info = self.info(state, job, pending=pending, done=done)
            shown = (state, None if job is None else job.nonce, info.presets)
            if due or shown != self._told:
                self._publish(info)
                self._told = shown
            # A public host counts pushes, so it hears of changes with the next renewal.
            settle_s = self._interval_s if self.config.timing.fast_s is None else SETTLE_S
            self._look_at = min(now + settle_s, self._renew_at)
        except Exception as error:  # a hint: whatever goes wrong with it, the jobs go on
            if isinstance(error, PushRejected):
                self._place = None  # the next attempt finds out what this server takes
            # A `ValueError` comes of an owner's preset that fits no registration.
            why = clean_line(str(error)) if isinstance(error, ValueError) else describe(error)
            log.warning("this runner is not registered: %s", why)

    def renew(self) -> None:
        """Register at the next `tell`, whenever the last one was."""
        self._look_at = self._renew_at = float("-inf")

    def stopped(self, *, done: int = 0) -> None:
        """Say that this runner is gone, if it was registered."""
        if self._place is not None:
            self.renew()
            self.tell(State.STOPPED, done=done)

    def _publish(self, info: RunnerInfo) -> None:
        signature = self.config.sign(info.to_bytes(), signing.RUNNER_NAMESPACE)
        if signature is None:  # unsigned, and shown so
            info = info.model_copy(update={"public_key": None})
        place = register(self.cache, info, signature, place=self._place, now=self.now())
        if place.name not in (ref_name(info), self._place and self._place.name):
            said = "another live runner is named %s, so this one is listed as %s; give one a new --name"
            log.warning(said, info.name, place.name)
        self._place, self._renew_at = place, self.clock() + self._interval_s

    def _models(self) -> dict[str, str]:
        """Where each model lies; where a preset lacks one, the others by themselves, without stand-ins."""
        places, found = self.config.model_places(), dict[str, str]()
        wanted = [preset.models for preset in self.config.presets.values()]
        alone = [{name: ModelNeed(mac=need.mac)} for needs in wanted for name, need in needs.items()]
        for needs in (*alone, *wanted):
            with contextlib.suppress(models.ModelMissing):
                found |= {name: str(model) for name, model in models.resolve(needs, places).items()}
        return {name: "missing" for needs in wanted for name in needs} | found

    def _usable_models(self, preset: Preset) -> list[str]:
        """The models that a request for a preset can choose and that are here, the preset's own first."""
        key, usable = model_parameter(preset), list[str]()
        for name in [] if key is None else preset.params[key].enum or ():
            with contextlib.suppress(models.ModelMissing):
                models.resolve(model_needs(preset, {key or "": name}), self.config.model_places())
                usable.append(str(name))
        return usable

    def _offer(self, preset: Preset) -> Offer:
        """A preset, and a clause about this runner that says why it cannot run here, or not yet."""
        policy, fault = self.config.policy, self.config.rulebook.fault
        why = None if fault is None else "its policy is broken, so it takes no request"
        if is_draining(self.config.folder):
            why = DRAINS
        usable, key = self._usable_models(preset), model_parameter(preset)
        try:
            policy.check(preset)
            check_machine(preset, self.config, {key: usable[0]} if key and usable else {})
            policy.check_hours(self.now())
        except RequestRefused as refusal:
            available, why = False, why or refusal.message
        else:
            available = why is None
            if available and not policy.is_open(self.now()):
                why = f"it begins jobs only within {policy.hours_text} of its local time"
        return Offer(
            name=preset.name,
            aliases=preset.aliases[:32],
            summary=preset.summary,
            digest=preset.digest,
            engine=preset.engine,
            evidence=preset.evidence_kind,
            timeout_s=preset.timeout_s,
            parameters={
                name: _property(each, usable if name == key else []) for name, each in preset.params.items()
            },
            available=available,
            why=None if why is None else clean_line(why, limit=1000),
            typical_s=self.store.typical_seconds(preset.name),
        )


def _property(parameter: Parameter, models: Sequence[str]) -> runner_info.Property:
    """A parameter as a registration shows it; `models` are those that it can choose, if it chooses one."""
    words = parameter.keywords() | {"enum": tuple(models) or parameter.enum}
    if parameter.format == "model":  # a choice like any other
        del words["format"]
        if parameter.default not in words["enum"]:
            del words["default"]
    return runner_info.Property.model_validate(words)
