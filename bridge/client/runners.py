"""Which live runners can take a request, and why the others cannot, by their registrations.

A hint: registrations are up to a minute old and anyone with push rights can write one, so a request is pushed
whatever comes out here. A pattern in a registration is not tried, because matching a stranger's pattern can
take for ever; the runner does it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bridge.bus.registry import TIMEOUT_S, Registration, Registry, read_registry
from bridge.bus.results import pins_keys
from bridge.client.remotes import Remote, open_cache
from bridge.git.repo import GitRepo
from bridge.presets import Parameter
from bridge.protocol.manifest import Manifest, ParamValue, parse_time, properties, unmet
from bridge.protocol.runner_info import Offer, RunnerInfo, State, is_live
from bridge.protocol.sanitize import clean_line
from bridge.settings import Settings
from bridge.signing import RESULT_NAMESPACE
from bridge.signing.trust import Trust

_NAMED = 5


@dataclass(frozen=True)
class Availability:
    """Which runners can take a request now."""

    preset: str
    live: int  # how many runners are there
    able: tuple[str, ...]  # names of the live ones that can take it
    unable: Mapping[str, str]  # every other runner seen, the live ones first, and why it cannot
    expected_s: float | None  # median duration there times the older requests; None: not known
    notes: tuple[str, ...] = ()  # what else the requester should know

    @property
    def warnings(self) -> tuple[str, ...]:
        """For people: that no runner can take it and why, or what to know about those that can."""
        if self.able:
            return self.notes
        if not self.unable:
            return (f"no runner has been seen on this remote: {self.preset} waits until one comes",)
        named = [f"{name}: {why}" for name, why in list(self.unable.items())[:_NAMED]]
        more = len(self.unable) - len(named)
        rest = f"; and {more} more" if more else ""
        return (f"no live runner can take this request now: {'; '.join(named)}{rest}",)

    @property
    def sentence(self) -> str:
        """How many runners are there, and which can take the request."""
        runners = "1 runner is" if self.live == 1 else f"{self.live} runners are"
        names = ", ".join(clean_line(name) for name in self.able[:_NAMED])
        more = len(self.able) - _NAMED
        return f"{runners} live; {names}{f' and {more} more' if more > 0 else ''} can take it"

    def to_json(self) -> dict[str, Any]:
        """The key ``runners`` of a command's JSON line."""
        return {
            "live": self.live,
            "able": list(self.able),
            "unable": dict(self.unable),
            "expected_s": self.expected_s,
        }


def read_runners(
    settings: Settings,
    git: GitRepo,
    remote: Remote,
    *,
    found: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Registry:
    """The registrations on a remote, judged by the runner keys that this client trusts.

    `found` are the remote's refs, where those of runners were listed just now.
    """
    cache = open_cache(settings.state_dir, remote, git, timeout_s=timeout_s)
    trusted = Trust.by(settings.trusted_runners).names(RESULT_NAMESPACE)
    return cache.recover(lambda: read_registry(cache, found=found, trusted=trusted, timeout_s=timeout_s))


def check_availability(
    registry: Registry,
    manifest: Manifest,
    *,
    signed: bool,
    settings: Settings,
    now: datetime,
    ahead: int | None = None,
) -> Availability:
    """Compare a request with every registration; `ahead`: older requests that wait, too, if known."""
    able, live, absent = [], dict[str, str](), dict[str, str]()
    for seen in registry.seen:
        why = absence(seen.info, now)
        if why is not None:
            absent[seen.name] = clean_line(why, limit=300)
        elif (why := _obstacle(seen.info, manifest, signed=signed)) is not None:
            live[seen.name] = clean_line(why, limit=300)
        else:
            able.append(seen)
    return Availability(
        preset=manifest.preset,
        live=len(able) + len(live),
        able=tuple(seen.name for seen in able),
        unable={**live, **absent},
        expected_s=expected_wait_s(able, manifest.preset, ahead),
        notes=_notes(able, manifest, pinned=pins_keys(settings.trusted_runners)),
    )


def expected_wait_s(runners: Sequence[Registration], preset: str, ahead: int | None) -> float | None:
    """The median duration of a preset on some runners times the older requests; None: not known."""
    offers = [seen.info.offer(preset) for seen in runners]
    typical = [offer.typical_s for offer in offers if offer is not None and offer.typical_s is not None]
    return None if ahead is None or not typical else round(statistics.median(typical) * ahead, 1)


def require_signatures(registry: Registry, now: datetime) -> list[str]:
    """Names of the live runners that ignore unsigned requests and cancel requests."""
    return [seen.name for seen in registry.live(now) if seen.info.limits.require_signature]


def absence(info: RunnerInfo, now: datetime) -> str | None:
    """Why a runner is not there, as a clause about it; None: it is."""
    if is_live(info, now):
        return None
    if info.state is State.STOPPED:
        return f"stopped at {info.seen_at}"
    if parse_time(info.seen_at) > now:
        return f"its registration is from the future ({info.seen_at})"
    return f"not seen since {info.seen_at}"


def _obstacle(info: RunnerInfo, manifest: Manifest, *, signed: bool) -> str | None:
    if info.audience != manifest.audience:
        return f"it serves {info.audience}, and this request is meant for {manifest.audience}"
    if manifest.on is not None and (why := _target_fault(info, manifest.on)) is not None:
        return why
    offer = info.offer(manifest.preset)
    if offer is None:
        return f"it has no preset {manifest.preset}"
    if not offer.available:
        return offer.why or f"it cannot run {manifest.preset} now"
    if info.limits.require_signature and not signed:
        return "it takes only signed requests, and this one is unsigned"
    return _parameter_fault(offer, manifest.params)


def _target_fault(info: RunnerInfo, target: str) -> str | None:
    """What a machine lacks of those that a request is for."""
    lacking = unmet(target, info.machine, info.name)
    if not lacking:
        return None
    found = properties(info.machine, info.name)
    own = []
    for name in dict.fromkeys(condition.name for condition in lacking):
        values = ", ".join(map(str, found[name]))
        own.append(f"its {name} is {values}" if values else f"no {name} of it is known")
    return f"the request is for machines with {', '.join(map(str, lacking))}; {', '.join(own)}"


def _parameter_fault(offer: Offer, params: Mapping[str, ParamValue]) -> str | None:
    """The first parameter that a runner's version of the preset does not take."""
    for name, value in params.items():
        known = offer.parameters.get(name)
        if known is None:
            return f"its {offer.name} has no parameter {name}"
        bounds = known.model_dump(exclude={"pattern"}) | {"max_length": known.maxLength}
        if (fault := Parameter.model_construct(**bounds).fault(value)) is not None:
            return f"its {offer.name} does not take {name}: {fault}"
    required = (name for name, known in offer.parameters.items() if known.default is None)
    missing = next((name for name in required if name not in params), None)
    return None if missing is None else f"its {offer.name} needs the parameter {missing}"


def _notes(able: Sequence[Registration], manifest: Manifest, *, pinned: bool) -> tuple[str, ...]:
    notes = []
    if pinned and able and not any(seen.trusted for seen in able):
        names = ", ".join(seen.name for seen in able[:_NAMED])
        notes.append(
            f"only runners whose keys are not trusted here can take this request ({names}):"
            " their results will not be believed"
        )
    longest = [
        min(offer.timeout_s, seen.info.limits.max_timeout_s)
        for seen in able
        if (offer := seen.info.offer(manifest.preset)) is not None
    ]
    asked = manifest.timeout_s
    if asked is not None and longest and max(longest) < asked:
        notes.append(f"the live runners allow it at most {max(longest)} s; {asked} s were asked for")
    return tuple(notes)
