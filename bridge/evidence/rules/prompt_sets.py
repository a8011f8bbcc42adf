"""Are rows of a shipped prompt set rows of its prompts, and of as many as the switches ask?

The sets are known by digest: ``prompt_sets.json`` is generated from the engine's files by ``make docs``. For
the shipped target it also holds the tokens' digests, so that there the tokens of a prompt are known, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from bridge.evidence.case import Case
from bridge.evidence.report import Arm, Report, Sample
from bridge.evidence.shown import several, shown

# The switches that name sets, and those that say how many prompts of each are run.
SWITCHES = (("prompts", "limit"), ("speed_prompts", "speed_limit"))
TEMPLATE_SWITCHES = {"chat": False, "thinking": "default", "system": None}
WITHOUT_NEEDLE = "no_needle"


@dataclass(frozen=True)
class KnownPrompt:
    """A shipped prompt: its set, and the digests of its source and of its tokens for the shipped target."""

    set: str
    source_sha256: str
    tokens_sha256: str


@dataclass(frozen=True)
class KnownSets:
    """All shipped prompts by id, the ids of each set in their order, and the shipped target's weights."""

    prompts: dict[str, KnownPrompt]
    sets: dict[str, tuple[str, ...]]
    target_sha256: str


@lru_cache(maxsize=1)
def known_sets() -> KnownSets:
    """The shipped sets, from the file beside the gate."""
    document = json.loads(files("bridge.evidence").joinpath("prompt_sets.json").read_text(encoding="utf-8"))
    prompts = {
        prompt: KnownPrompt(name, *digests)
        for name, found in document["sets"].items()
        for prompt, digests in found.items()
    }
    sets = {name: tuple(found) for name, found in document["sets"].items()}
    return KnownSets(prompts, sets, document["target_sha256"])


def prompt_set_mismatch(case: Case) -> Iterator[str]:
    """Prompts of a shipped set are missing, or others stand under its ids."""
    report = case.report
    arms = [arm for arm in report.arms if arm.control != WITHOUT_NEEDLE]
    for arm in arms:
        wrong = [sample.prompt_id for sample in arm.samples if _is_other(sample, report)]
        if wrong:
            yield f"arm {shown(arm.name)} ran other prompts than the shipped ones under {several(wrong)}"
    for names, limit in SWITCHES:
        for name in _named_sets(report.configuration.get(names)):
            wanted = known_sets().sets[name]
            count = report.configuration.get(limit)
            if count is not None and (type(count) is not int or count < 1):
                yield f"configuration.{limit} is {shown(count)}, not a number of prompts"
            elif count is not None:
                wanted = wanted[:count]
            for arm in arms:
                yield from _missing(arm, name, wanted, drawn=bool(report.configuration.get("seed")))


def _named_sets(switch: object) -> tuple[str, ...]:
    """The shipped sets that a switch names; none for a file, generated prompts or nothing."""
    sets = known_sets().sets
    if switch == "all":
        return tuple(sets)
    names = switch.split(",") if isinstance(switch, str) else []
    return tuple(names) if names and all(name in sets for name in names) else ()


def _is_other(sample: Sample, report: Report) -> bool:
    known = known_sets()
    prompt = known.prompts.get(sample.prompt_id)
    if prompt is None:
        return False
    if sample.source_sha256 != prompt.source_sha256:
        return True
    target = report.environment.models.get("target")
    shipped = target is not None and target.weights_sha256 == known.target_sha256
    stated = report.configuration
    by_default = all(stated.get(name, value) == value for name, value in TEMPLATE_SWITCHES.items())
    return shipped and by_default and sample.prompt_sha256 != prompt.tokens_sha256


def _missing(arm: Arm, name: str, wanted: tuple[str, ...], *, drawn: bool) -> Iterator[str]:
    """Prompts that a set and its limit ask for; drawn ones may be any of the set."""
    ran = {sample.prompt_id for sample in arm.samples}
    if drawn:
        count = len(ran & set(known_sets().sets[name]))
        if count < len(wanted):
            yield f"arm {shown(arm.name)} ran {count} prompts of the set {name}, of {len(wanted)} asked for"
        return
    missing = [prompt for prompt in wanted if prompt not in ran]
    if missing:
        yield f"arm {shown(arm.name)} did not run {several(missing)} of the set {name}"
