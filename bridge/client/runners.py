"""Which live runners can take a request, and why the others cannot.

A hint: anyone with push rights can write a registration, so a request is pushed whatever comes out here.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bridge.bus.registry import TIMEOUT_S, Registration, Registry, read_registry
from bridge.bus.results import pins_keys
from bridge.client.recent import remember_presets
from bridge.client.remotes import Remote, open_cache
from bridge.errors import ParameterError, PresetError
from bridge.git.repo import GitRepo
from bridge.presets import Parameter, Preset, validate
from bridge.protocol.manifest import Manifest, parse_time, properties, unmet
from bridge.protocol.result import Progress
from bridge.protocol.runner_info import Offer, Property, RunnerInfo, State, is_live
from bridge.protocol.sanitize import clean_line
from bridge.settings import Settings
from bridge.signing import RESULT_NAMESPACE
from bridge.signing.trust import names_that_count

_NAMED = 5


@dataclass(frozen=True)
class Availability:
    """Which runners can take a request now."""

    live: int  # how many runners are there
    able: tuple[str, ...]  # names of the live ones that can take it
    unable: Mapping[str, str]  # every other runner seen, the live ones first, and why it cannot
    typical_s: float | None  # median duration of its preset there; None: not known
    expected_s: float | None  # that times the older requests; None: not known
    warnings: tuple[str, ...]  # that none can take it and why, or what to know about those that can

    @property
    def sentence(self) -> str:
        """How many runners are there, and which can take the request."""
        runners = "1 runner is" if self.live == 1 else f"{self.live} runners are"
        names = ", ".join(clean_line(name) for name in self.able[:_NAMED])
        more = len(self.able) - _NAMED
        return f"{runners} live; {names}{f' and {more} more' if more > 0 else ''} can take it"

    def to_json(self) -> dict[str, Any]:
        """The key ``runners`` of a command's JSON line."""
        return {name: value for name, value in vars(self).items() if name != "warnings"}


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
    trusted = names_that_count(settings.trusted_runners, RESULT_NAMESPACE)
    registry = cache.recover(lambda: read_registry(cache, found=found, trusted=trusted, timeout_s=timeout_s))
    remember_presets(settings.state_dir, (offer for seen in registry.seen for offer in seen.info.presets))
    return registry


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
        if (why := absence(seen.info, now)) is not None:
            absent[seen.name] = clean_line(why, limit=300)
        elif (why := _obstacle(seen, manifest, signed=signed)) is not None:
            live[seen.name] = clean_line(why, limit=300)
        else:
            able.append(seen)
    names, unable = tuple(seen.name for seen in able), {**live, **absent}
    warnings = []
    if not names and not unable:
        warnings.append(f"no runner has been seen on this remote: {manifest.preset} waits until one comes")
    elif not names:
        named = [f"{name}: {why}" for name, why in list(unable.items())[:_NAMED]]
        rest = f"; and {len(unable) - _NAMED} more" if len(unable) > _NAMED else ""
        warnings.append(f"no live runner can take this request now: {'; '.join(named)}{rest}")
    elif pins_keys(settings.trusted_runners) and not any(seen.trusted for seen in able):
        warnings.append(
            "only runners whose keys are not trusted here can take this request"
            f" ({', '.join(names[:_NAMED])}): their results will not be believed"
        )
    typical_s = typical_duration_s(able, manifest.preset)
    expected_s = expected_wait_s(typical_s, ahead)
    return Availability(len(able) + len(live), names, unable, typical_s, expected_s, tuple(warnings))


def published_preset(registry: Registry, name: str, now: datetime) -> Preset | None:
    """A preset that is not installed here, as a live runner publishes it; None: none offers it.

    Of several versions that of a trusted runner counts, then of one that can run it. What a client needs is
    there: names, parameters, limits. What it runs, and reads of the commit, its runner alone knows.
    """
    found = [(seen, offer) for seen in registry.live(now) if (offer := seen.info.offer(name)) is not None]
    if not found:
        return None
    seen, offer = max(found, key=lambda pair: (pair[0].trusted, pair[1].available))
    try:
        return _offered_preset(seen, offer)
    except ValueError as error:
        message = f"cannot read the parameters of {name} that the runner {clean_line(seen.name)} publishes"
        remedy = "put the preset's file into presets/ of KAKEYA_CONFIG"
        raise PresetError(f"{message}: {clean_line(str(error), limit=300)}", remedy) from None


def _offered_preset(seen: Registration, offer: Offer) -> Preset:
    """A preset as a runner publishes it; a `ValueError` where its parameters make no sense."""
    params = {key: _parameter(each, seen.trusted) for key, each in offer.parameters.items()}
    return Preset.model_construct(
        name=offer.name,
        aliases=offer.aliases,
        summary=offer.summary,
        argv=(),
        timeout_s=offer.timeout_s,
        engine=offer.engine,
        workspace="full",
        params=params,
    )


def _parameter(published: Property, trusted: bool) -> Parameter:
    """A published parameter; patterns of strangers, which could take forever, are left to the runner."""
    words = published.model_dump(mode="json", exclude_none=True)
    if "pattern" in words and not trusted:
        words["pattern"] = r"(?s:.*)"
    return Parameter.model_validate_json(json.dumps(words | {"description": words["description"] or "-"}))


def typical_duration_s(runners: Sequence[Registration], preset: str | None) -> float | None:
    """The median duration of a preset on some runners; None: not known."""
    offers = [seen.info.offer(preset) for seen in runners] if preset is not None else []
    typical = [offer.typical_s for offer in offers if offer is not None and offer.typical_s is not None]
    return statistics.median(typical) if typical else None


def expected_wait_s(typical_s: float | None, ahead: int | None) -> float | None:
    """How long a request is likely to wait behind the older ones; None: not known."""
    return None if ahead is None or typical_s is None else round(typical_s * ahead, 1)


def eta_s(
    typical_s: float | None,
    *,
    ahead: int | None = None,
    elapsed_s: float | None = None,
    progress: Progress | None = None,
) -> float | None:
    """Seconds until a request is likely to end; None: not known.

    By the share of its job that is done, else by how long its preset usually takes.
    """
    if progress is not None and elapsed_s and 0 < progress.done < progress.total:
        return round(elapsed_s * (progress.total - progress.done) / progress.done, 1)
    if typical_s is None:
        return None
    if ahead is not None:
        return round(typical_s * (ahead + 1), 1)
    return None if elapsed_s is None else round(max(0.0, typical_s - elapsed_s), 1)


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


def _obstacle(seen: Registration, manifest: Manifest, *, signed: bool) -> str | None:
    info = seen.info
    if info.audience != manifest.audience:
        return f"it serves {info.audience}, and this request is meant for {manifest.audience}"
    if lacking := [] if manifest.on is None else unmet(manifest.on, info.machine, info.name):
        found = properties(info.machine, info.name)
        own = [
            f"its {name} is {', '.join(map(str, found[name])) or 'not known'}"
            for name in dict.fromkeys(condition.name for condition in lacking)
        ]
        return f"the request is for machines with {', '.join(map(str, lacking))}; {', '.join(own)}"
    offer = info.offer(manifest.preset)
    if offer is None:
        return f"it has no preset {manifest.preset}"
    if not offer.available:
        return offer.why or f"it cannot run {manifest.preset} now"
    try:
        preset = _offered_preset(seen, offer)
        for params in (manifest.params, *([manifest.against.params] if manifest.against else [])):
            validate(preset, params)
    except ParameterError as error:
        return error.message
    except ValueError:  # only a hint
        pass
    if info.limits.require_signature and not signed:
        return "it takes only signed requests, and this one is unsigned"
    return None
