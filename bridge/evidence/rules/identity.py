"""Is the report that of the job: its request, its times, its kind, its switches, its prompts?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from importlib.resources import files
from random import Random

from bridge.evidence.figures import Case
from bridge.evidence.model import Report, Sample
from bridge.evidence.policies import NATIVE, parse_policy
from bridge.evidence.text import faults, several, shown

CLOCK_SLACK = timedelta(seconds=2)  # reports and runners may write whole seconds
ARMLESS = frozenset({"probe", "parity"})  # kinds that say nothing of any prompt
COMPARING = frozenset({"recall", "quality", "kv"})  # kinds that are about an arm under test
# Every switch that a command of the engine writes; tests hold both sides together. Those of `generate` alone
# are apart: evaluations decode greedily, and a replay refuses what is said to be drawn.
_OF_GENERATE = "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty stop"
_OF_ALL = """
command model_id quantize dtype drafter drafter_settings projector block kv compiled fused_kernels
single_graph prefill_chunk blas_threads resumed prompts limit max_tokens seed chat thinking channel_prefix
system batch context depths per_depth policies answer_tokens speed_prompts speed_limit ignore_stops
claim claim_parity claim_bytes min_stops min_speedup min_match min_recall speed_not_claimed golden tolerance
product_gflop_per_s blas_fast blas_how ring_rollback_exact peak_memory_bytes clients transport
checks checks_failed
"""
OF_GENERATE = frozenset(_OF_GENERATE.split())
SWITCHES = OF_GENERATE | frozenset(_OF_ALL.split())
TEMPLATE_SWITCHES = {"chat": False, "thinking": "default", "system": None}
WITHOUT_NEEDLE = "no_needle"


def stale_report(case: Case) -> Iterator[str]:
    """The report's times are out of order or outside the job's."""
    report, binding = case.report, case.binding
    if report.finished_at < report.started_at:
        yield f"the report finished at {report.finished_at} before it started at {report.started_at}"
    if binding is None:
        return
    if binding.started_at is not None and report.started_at < binding.started_at - CLOCK_SLACK:
        yield f"the report started at {report.started_at}, before this job's start {binding.started_at}"
    if binding.finished_at is not None and report.finished_at > binding.finished_at + CLOCK_SLACK:
        yield f"the report finished at {report.finished_at}, after this job's end {binding.finished_at}"


def wrong_request(case: Case) -> Iterator[str]:
    """Nonce, workload commit, preset digest or engine source are another request's, or missing."""
    request, binding = case.report.request, case.binding
    if binding is None:
        return
    if request is None:
        yield f"the report names no request, but is to answer {binding.nonce}"
        return
    for field in ("nonce", "workload_sha", "preset_digest", "engine_source"):
        expected, stated = getattr(binding, field), getattr(request, field)
        if expected is not None and stated != expected:
            yield f"request.{field} is {shown(stated)}, but this job's is {shown(expected)}"


def kind_mismatch(case: Case) -> Iterator[str]:
    """The arms are not those of the report's kind: none, doubled names, two baselines, a probe or parity
    report with rows, a comparison with a reference anywhere else, a kv report whose arms differ in more than
    their KV policies.
    """
    report, kind, live = case.report, case.report.kind, case.report.liveness
    names = Counter(arm.name for arm in report.arms)
    doubled = [name for name, count in names.items() if count > 1]
    armless = kind in ARMLESS
    counted = live.rounds or live.drafter_forwards or report.restarts or report.rounding is not None
    yield from faults(
        (doubled, f"several arms are called {several(doubled)}"),
        (len(case.baselines) > 1, "more than one arm is the baseline"),
        (len(report.with_role("oracle")) > 1, "more than one arm is the oracle"),
        ((report.parity is None) == (kind == "parity"), f"a {kind} report has parity: {bool(report.parity)}"),
        (armless and (report.arms or report.order or report.divergences), f"a {kind} report carries arms"),
        (armless and counted, f"a {kind} report counts rounds, restarts or a rounding error of no arm"),
        (not armless and not any(arm.samples for arm in report.arms), f"a {kind} report carries no rows"),
        (kind in COMPARING and not case.tested, f"a {kind} report has no arm under test"),
        (kind in ("quality", "kv") and not case.baselines, f"a {kind} report has no baseline"),
    )
    for arm in report.arms:
        if (arm.control is not None) != (arm.role == "control"):
            yield f"arm {arm.label} of role {arm.role} has control {arm.control}"
    if kind == "kv":
        yield from _more_than_policies(case)


def _more_than_policies(case: Case) -> Iterator[str]:
    """Policies are held against the native caches of the same system, or other things make the difference."""
    for native in case.baselines:
        if parse_policy(native.system.kv) != NATIVE:
            yield f"the baseline {native.label} of a kv report declares kv {shown(native.system.kv)}"
        for arm in case.tested:
            ours, theirs = arm.system, native.system
            if (ours.loop, ours.drafter, ours.block) != (theirs.loop, theirs.drafter, theirs.block):
                yield f"{arm.label} and {native.label} differ in more than their KV policies"
    for arm in case.tested:
        if parse_policy(arm.system.kv) == NATIVE:
            yield f"arm {arm.label} is under test in a kv report, but its caches are native"


def configuration_unknown(case: Case) -> Iterator[str]:
    """The configuration holds a switch that the gate does not know, or that its command does not have."""
    stated = case.report.configuration
    allowed = SWITCHES if stated.get("command") == "generate" else SWITCHES - OF_GENERATE
    if unknown := sorted(stated.keys() - allowed):
        yield f"configuration holds unknown switches: {several(unknown)}"


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
    """The shipped sets, from ``prompt_sets.json``, which ``make docs`` generates from the engine's files."""
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
    """The prompts of a shipped set are not just those that the set, its limit and the seed select, or other
    prompts, needles or answers have their ids.
    """
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
            yield f"arm {arm.label} ran other prompts than the shipped ones under {several(other)}"
        ran = {known.ids.get(sample.source_sha256, sample.prompt_id) for sample in arm.samples}
        if missing := sorted(wanted - ran):
            yield f"arm {arm.label} did not run {several(missing)}, which the configuration selects"
        if picked := sorted((ran & known.prompts.keys()) - wanted):
            yield f"arm {arm.label} ran {several(picked)}, which the configuration does not select"


def _selected(report: Report, switch: str, limit: str, seed: object) -> set[str] | str:
    """The shipped prompts that a switch selects, drawn as the engine does; or what is wrong with a switch."""
    sets = known_sets().sets
    value = report.configuration.get(switch)
    names = tuple(sets) if value == "all" else tuple(value.split(",")) if isinstance(value, str) else ()
    if not names or any(name not in sets for name in names):
        return set()  # a file, or generated prompts
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
    prompt, needle = known.prompts.get(sample.prompt_id), sample.needle
    if prompt is None:
        return sample.source_sha256 in known.ids
    if needle is not None and (needle.needle, needle.answer, needle.depth) != prompt.needle:
        return True
    if sample.source_sha256 != prompt.source_sha256:
        return True
    target = report.environment.models.get("target")
    if target is None or target.weights_sha256 != known.target_sha256:
        return False
    stated = report.configuration
    by_default = all(stated.get(name, value) == value for name, value in TEMPLATE_SWITCHES.items())
    return by_default and sample.prompt_sha256 != prompt.tokens_sha256
