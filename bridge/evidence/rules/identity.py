"""Is the report that of the job: request, times, kind, switches, prompts; and is the machine described?"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from functools import lru_cache
from importlib.resources import files
from itertools import product
from random import Random
from typing import NamedTuple

from bridge.evidence.figures import Case
from bridge.evidence.model import Model, Report, Sample
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
WEIGHTLESS_DRAFTERS = frozenset({"prompt-lookup"})
DTYPE_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}
# The limits of a speed claim: CPU time of other processes as a share of all cores', of a service as a share
# of one core; and the share of the timed seconds for which both must be known.
MOST_OTHER_CPU, MOST_SERVICE_CPU, WATCHED = 0.10, 0.10, 0.9
PLACEHOLDERS = frozenset({"unknown", "none", "null", "n/a", "na", "?", "-", "todo", "tbd"})
SERVICES = frozenset({"spotlight", "time_machine", "photos"})  # watched on macOS
WIDTHS = frozenset({2, 3, 4, 5, 6, 8})  # bits that mlx packs to
NAMED = ("machine", "system", "os_release", "chip", "device", "blas")
TEMPLATE_SWITCHES = {"chat": False, "thinking": "default", "system": None}


def stale_report(case: Case) -> Iterator[str]:
    """The report's times are out of order or outside the job's."""
    started, finished, job = case.report.started_at, case.report.finished_at, case.binding
    earliest = job.started_at - CLOCK_SLACK if job and job.started_at else started
    latest = job.finished_at + CLOCK_SLACK if job and job.finished_at else finished
    if not earliest <= started <= finished <= latest:
        yield f"the report ran from {started} to {finished}, the job between {earliest} and {latest}"


def wrong_request(case: Case) -> Iterator[str]:
    """Nonce, workload commit, preset digest or engine source are another request's, or missing."""
    request, binding = case.report.request, case.binding
    if binding is None:
        return
    if request is None:
        yield f"the report names no request, but is to answer {binding.nonce}"
    for field, stated in request or ():
        expected = getattr(binding, field)
        if expected not in (None, stated):
            yield f"request.{field} is {shown(stated)}, but this job's is {shown(expected)}"


def kind_mismatch(case: Case) -> Iterator[str]:
    """The arms are not those of the report's kind: none, doubled names, two baselines, a probe or parity
    report with rows, a comparison with a reference anywhere else, a kv report whose arms differ in more than
    their KV policies.
    """
    report, kind, live = case.report, case.report.kind, case.report.liveness
    doubled = [name for name, count in Counter(arm.name for arm in report.arms).items() if count > 1]
    of_arms = report.arms or report.order or report.divergences or report.restarts or report.rounding
    counted = live.rounds or live.drafter_forwards
    has_rows, armless = any(arm.samples for arm in report.arms), kind in ARMLESS
    yield from faults(
        (doubled, f"several arms are called {several(doubled)}"),
        (len(case.baselines) > 1, "more than one arm is the baseline"),
        (len(report.with_role("oracle")) > 1, "more than one arm is the oracle"),
        ((report.parity is None) == (kind == "parity"), f"a {kind} report has parity: {bool(report.parity)}"),
        (armless and (of_arms or counted), f"a {kind} report carries arms, or counts what arms do"),
        (not armless and not has_rows, f"a {kind} report carries no rows"),
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
    for arm in (*case.baselines, *case.tested):
        if arm.system.is_native != (arm.role == "baseline"):
            yield f"{arm.label} has the role {arm.role} in a kv report, and kv {shown(arm.system.kv)}"
    for native, arm in product(case.baselines, case.tested):
        ours, theirs = arm.system, native.system
        if (ours.loop, ours.drafter, ours.block) != (theirs.loop, theirs.drafter, theirs.block):
            yield f"{arm.label} and {native.label} differ in more than their KV policies"


def configuration_unknown(case: Case) -> Iterator[str]:
    """The configuration holds a switch that the gate does not know, or that its command does not have."""
    stated = case.report.configuration
    allowed = SWITCHES if stated.get("command") == "generate" else SWITCHES - OF_GENERATE
    if unknown := sorted(stated.keys() - allowed):
        yield f"configuration holds unknown switches: {several(unknown)}"


class KnownPrompt(NamedTuple):
    """A shipped prompt: digests of its source and of its tokens for the shipped target, and its needle."""

    source_sha256: str
    tokens_sha256: str
    needle: list[str | float] | None  # sentence, answer, depth


class KnownSets(NamedTuple):
    """All shipped prompts by id, the ids of each set in their order, and the shipped target's weights."""

    prompts: dict[str, KnownPrompt]
    sets: dict[str, tuple[str, ...]]
    ids: dict[str, str]  # by the digest of the source
    target_sha256: str


@lru_cache(maxsize=1)
def known_sets() -> KnownSets:
    """The shipped sets, from ``prompt_sets.json``, which ``make docs`` generates from the engine's files."""
    document = json.loads(files("bridge.evidence").joinpath("prompt_sets.json").read_text(encoding="utf-8"))
    sets = {name: tuple(rows) for name, rows in document["sets"].items()}
    prompts = {
        prompt: KnownPrompt(*row) for rows in document["sets"].values() for prompt, row in rows.items()
    }
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
        if arm.control == "no_needle":
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
    if needle is not None and [needle.needle, needle.answer, needle.depth] != prompt.needle:
        return True
    target, stated = report.environment.models.get("target"), report.configuration
    by_default = all(stated.get(name, value) == value for name, value in TEMPLATE_SWITCHES.items())
    is_shipped = by_default and target is not None and target.weights_sha256 == known.target_sha256
    same_tokens = not is_shipped or sample.prompt_sha256 == prompt.tokens_sha256
    return sample.source_sha256 != prompt.source_sha256 or not same_tokens


def environment_incomplete(case: Case) -> Iterator[str]:
    """Machine, versions, source or weight digests are missing or placeholders, two models have one digest,
    Metal is said of a system that has none, or a target or drafter leaves out its vocab_size, cache_layers or
    largest_block.
    """
    report, environment = case.report, case.report.environment
    git, models, darwin = environment.git, environment.models, environment.system == "Darwin"
    named = {name: getattr(environment, name) for name in NAMED} | dict(environment.versions)
    named |= {
        f"{role}.{name}": getattr(model, name) for role, model in models.items() for name in ("id", "dtype")
    }
    blank = [name for name, value in named.items() if value.strip().lower() in {"", *PLACEHOLDERS}]
    target, drafter = case.target, case.drafter
    digests = [model.weights_sha256 for model in models.values()]
    no_digest = any(len(set(digest)) == 1 for digest in (git.source_sha256, *digests))
    needed = {
        "target": bool(report.arms),
        "drafter": any(arm.system.drafter not in {None, *WEIGHTLESS_DRAFTERS} for arm in report.arms),
        "projector": any(arm.system.restoration == "learned" for arm in report.arms),
    }
    lacking = [role for role, is_needed in needed.items() if is_needed and role not in models]
    yield from faults(
        (blank, f"environment lacks {several(blank)}, or names them by placeholders"),
        (environment.metal and not darwin, f"metal is true on {shown(environment.system)}, which has none"),
        (darwin and environment.thermal_state == "not_applicable", "Darwin has a thermal state"),
        (git.sha is None and git.dirty is not None, f"git says dirty {git.dirty} of no commit"),
        (any(model.parameters == 0 for model in models.values()), "a model has no parameters"),
        (no_digest, "git.source_sha256 or a model's weights_sha256 is no digest of anything"),
        (len(set(digests)) < len(digests), "two models have one weight digest"),
        (lacking, f"environment.models lacks what the arms use: {several(lacking)}"),
        (target and not (target.vocab_size and target.cache_layers), "vocab_size or cache_layers is missing"),
        (drafter and drafter.largest_block is None, "the drafter states no largest_block"),
    )


def environment_impossible(case: Case) -> Iterator[str]:
    """Chip, system and device contradict each other, the models' parameters exceed the memory, or weights
    have a width that no quantization has.
    """
    environment = case.report.environment
    models, memory = environment.models.values(), environment.memory_bytes
    system, arm64 = environment.system, environment.machine == "arm64"
    chip = environment.chip.casefold()
    apple = chip.startswith("apple")
    silicon = apple or re.search(r"\bM[0-9]\b", environment.chip)
    contradicts = (
        (silicon and not (system == "Darwin" and arm64))
        or (environment.metal and not apple)
        or (system == "Darwin" and not chip.startswith(("apple", "intel")))
        or (arm64 and "intel" in chip)
        or (not environment.metal and environment.device in ("gpu", "metal"))
    )
    what = f"chip {shown(environment.chip)}, {shown(system)}, {shown(environment.machine)}"
    odd, needed = (
        [width for model in models for width in _widths(model) - WIDTHS],
        sum(map(_least_bytes, models)),
    )
    yield from faults(
        (contradicts, f"{what}, device {shown(environment.device)} and metal {environment.metal} contradict"),
        (odd, f"a model is packed to {odd[:1]} bits, which no quantization does"),
        (needed > memory, f"the models' parameters take {needed} bytes, the machine has {memory}"),
    )


def _widths(model: Model) -> set[int]:
    return {int(found) for found in re.findall("([0-9]+)-bit", model.quantization or "")}


def _least_bytes(model: Model) -> int:
    unpacked = DTYPE_BITS.get(model.dtype, min(DTYPE_BITS.values()))
    return model.parameters * min(_widths(model) & WIDTHS, default=unpacked) // 8


def machine_busy(case: Case) -> Iterator[str]:
    """A speed is claimed while other processes used more than 10 % of the CPU time, or Spotlight, Time
    Machine or Photos more than 10 % of a core, or while that was not watched.
    """
    if not any(case.speed_pairs()):
        return
    load, is_mac = case.report.environment.load, case.report.environment.system == "Darwin"
    timed = sum(sample.seconds for _, sample, _ in case.rows())
    unwatched = sorted(SERVICES - load.services.keys()) if is_mac else []
    busy = [name for name, seconds in load.services.items() if seconds > MOST_SERVICE_CPU * load.seconds]
    if load.other_cpu_share is None or load.seconds < WATCHED * timed:
        yield f"the load was measured for {load.seconds:.3g} s of {timed:.3g} timed seconds"
    elif load.other_cpu_share > MOST_OTHER_CPU:
        yield f"other processes used {load.other_cpu_share:.1%} of the CPU time"
    yield from faults(
        (unwatched, f"the load of {several(unwatched)} was not measured"),
        (busy, f"{several(busy)} used more than {MOST_SERVICE_CPU:.0%} of a core"),
    )


def thermal_or_power(case: Case) -> Iterator[str]:
    """A speed is claimed of a machine that was throttled, on battery or swapping."""
    if not any(case.speed_pairs()):
        return
    environment = case.report.environment
    hot = environment.thermal_state in ("serious", "critical")
    yield from faults(
        (environment.power_source == "battery", "the machine ran on battery"),
        (hot, f"the machine's thermal state was {environment.thermal_state}"),
        (environment.swapping, "the machine was swapping"),
    )
