"""Are rows of a shipped prompt set rows of its prompts, and of just those that the switches select?

The sets are known by digest: ``prompt_sets.json`` is generated from the engine's files by ``make docs``. For
the shipped target it also holds the tokens' digests, so that there the tokens of a prompt are known, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from random import Random

from bridge.evidence.case import Case
from bridge.evidence.report import Report, Sample
from bridge.evidence.shown import several, shown

TEMPLATE_SWITCHES = {"chat": False, "thinking": "default", "system": None}
WITHOUT_NEEDLE = "no_needle"


@dataclass(frozen=True)
class KnownPrompt:
    """A shipped prompt: digests of its source and of its tokens for the shipped target, and its needle."""

    source_sha256: str
    tokens_sha256: str
    needle: tuple[str, str, float] | None  # sentence, answer, depth


@dataclass(frozen=True)
class KnownSets:
    """All shipped prompts by id, the ids of each set in their order, and the shipped target's weights."""

    prompts: dict[str, KnownPrompt]
    sets: dict[str, tuple[str, ...]]
    ids: dict[str, str]  # by the digest of the source
    target_sha256: str


@lru_cache(maxsize=1)
def known_sets() -> KnownSets:
    """The shipped sets, from the file beside the gate."""
    document = json.loads(files("bridge.evidence").joinpath("prompt_sets.json").read_text(encoding="utf-8"))
    prompts = {
        prompt: KnownPrompt(source, tokens, tuple(needle) if needle else None)
        for found in document["sets"].values()
        for prompt, (source, tokens, needle) in found.items()
    }
    sets = {name: tuple(found) for name, found in document["sets"].items()}
    ids = {known.source_sha256: prompt for prompt, known in prompts.items()}
    return KnownSets(prompts, sets, ids, document["target_sha256"])


def prompt_set_mismatch(case: Case) -> Iterator[str]:
    """Prompts of a shipped set are missing, were not selected, or others have their ids."""
    report, known = case.report, known_sets()
    selected = _selected(report, "prompts", "limit", report.configuration.get("seed", 0))
    longer = _selected(report, "speed_prompts", "speed_limit", 0)
    yield from (selection for selection in (selected, longer) if isinstance(selection, str))
    if isinstance(selected, str) or isinstance(longer, str):
        return
    wanted = selected | longer
    for arm in report.arms:
        if arm.control == WITHOUT_NEEDLE:
            continue
        if other := [sample.prompt_id for sample in arm.samples if _is_other(sample, report)]:
            yield f"arm {shown(arm.name)} ran other prompts than the shipped ones under {several(other)}"
        ran = {known.ids.get(sample.source_sha256, sample.prompt_id) for sample in arm.samples}
        if missing := sorted(wanted - ran):
            yield f"arm {shown(arm.name)} did not run {several(missing)}, which the configuration selects"
        if picked := sorted((ran & known.prompts.keys()) - wanted):
            yield f"arm {shown(arm.name)} ran {several(picked)}, which the configuration does not select"


def _selected(report: Report, switch: str, limit: str, seed: object) -> set[str] | str:
    """The shipped prompts that a switch and its limit select, drawn by a seed as the engine does; or what is
    wrong with the limit or the seed. Nothing for a file, generated prompts or an absent switch.
    """
    sets = known_sets().sets
    value = report.configuration.get(switch)
    names = tuple(sets) if value == "all" else tuple(value.split(",")) if isinstance(value, str) else ()
    if not names or any(name not in sets for name in names):
        return set()
    count = report.configuration.get(limit)
    if count is not None and (type(count) is not int or count < 1):
        return f"configuration.{limit} is {shown(count)}, not a number of prompts"
    if type(seed) is not int:
        return f"configuration.seed is {shown(seed)}, not a whole number"
    order = [(name, prompt) for name in names for prompt in sets[name]]
    if seed:
        Random(seed).shuffle(order)  # noqa: S311 - the engine's draw again
    return {prompt for name in names for prompt in [p for of, p in order if of == name][:count]}


def _is_other(sample: Sample, report: Report) -> bool:
    """Whether a row has a shipped prompt's id, but another source, needle or tokens; or its source alone."""
    known = known_sets()
    prompt = known.prompts.get(sample.prompt_id)
    if prompt is None:
        return sample.source_sha256 in known.ids
    needle = sample.needle
    if needle is not None and (needle.needle, needle.answer, needle.depth) != prompt.needle:
        return True
    if sample.source_sha256 != prompt.source_sha256:
        return True
    target = report.environment.models.get("target")
    shipped = target is not None and target.weights_sha256 == known.target_sha256
    stated = report.configuration
    by_default = all(stated.get(name, value) == value for name, value in TEMPLATE_SWITCHES.items())
    return shipped and by_default and sample.prompt_sha256 != prompt.tokens_sha256
