"""Is the report that of the job: request, times, kind, switches, prompts; and is the machine described?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from itertools import product
from random import Random

from evidence_format.claims import MOST_OTHER_CPU, MOST_SERVICE_CPU, WATCHED
from evidence_format.figures import Case, faults
from evidence_format.model import OF_GENERATE, SWITCHES, Sample
from evidence_format.policies import AFFINE_BITS
from evidence_format.prompt_sets import IN_ALL, known_sets
from evidence_format.text import several, shown

CLOCK_SLACK = timedelta(seconds=2)  # reports and runners may write whole seconds
DTYPE_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}
PLACEHOLDERS = frozenset({"unknown", "none", "null", "n/a", "na", "?", "-", "todo", "tbd"})
SERVICES = frozenset({"spotlight", "time_machine", "photos"})  # watched on macOS
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
    """The arms are not those of the report's kind: none, doubled names, two baselines, a probe, parity or
    perplexity report with rows, a comparison with a reference or scored chunks anywhere else, a kv report
    whose arms differ in more than their KV policies.
    """
    report, kind, live = case.report, case.kind, case.report.liveness
    doubled = [name for name, count in Counter(arm.name for arm in report.arms).items() if count > 1]
    of_arms = report.arms or report.order or report.divergences or report.restarts or report.rounding
    scored, armless = report.perplexity is not None, kind in ("probe", "parity", "perplexity")
    is_carried = of_arms or live.rounds or live.drafter_forwards
    yield from faults(
        (doubled, f"several arms are called {several(doubled)}"),
        (len(case.baselines) > 1, "more than one arm is the baseline"),
        (len(report.with_role("oracle")) > 1, "more than one arm is the oracle"),
        ((report.parity is None) == (kind == "parity"), f"a {kind} report has parity: {bool(report.parity)}"),
        (scored != (kind == "perplexity"), f"a {kind} report has perplexity: {scored}"),
        (armless and is_carried, f"a {kind} report carries arms, or counts what arms do"),
        (not armless and not case.rows, f"a {kind} report carries no rows"),
        (kind in ("recall", "quality", "kv") and not case.tested, f"a {kind} report has no arm under test"),
        (kind in ("quality", "kv") and not case.baselines, f"a {kind} report has no baseline"),
    )
    for arm in report.arms:
        if (arm.control is not None) != (arm.role == "control"):
            yield f"arm {arm.label} of role {arm.role} has control {arm.control}"
    # Policies are held against the native caches of the same system, or other things make the difference.
    for arm in (*case.baselines, *case.tested) if kind == "kv" else ():
        if arm.system.is_native != (arm.role == "baseline"):
            yield f"{arm.label} has the role {arm.role} in a kv report, and kv {shown(arm.system.kv)}"
    for native, arm in product(case.baselines, case.tested) if kind == "kv" else ():
        ours, theirs = arm.system, native.system
        if (ours.loop, ours.drafter, ours.block) != (theirs.loop, theirs.drafter, theirs.block):
            yield f"{arm.label} and {native.label} differ in more than their KV policies"


def configuration_unknown(case: Case) -> Iterator[str]:
    """The configuration holds a switch that the gate does not know, or that its command does not have."""
    stated = case.configuration
    allowed = SWITCHES if stated.get("command") == "generate" else SWITCHES - OF_GENERATE
    if unknown := sorted(stated.keys() - allowed):
        yield f"configuration holds unknown switches: {several(unknown)}"


def prompt_set_mismatch(case: Case) -> Iterator[str]:
    """The prompts of a shipped set are not just those that the set, its limit and the seed select, or other
    prompts, needles or answers have their ids.
    """
    known, seed = known_sets(), case.configuration.get("seed", 0)
    try:
        wanted = _selected(case, "prompts", "limit", seed) | _selected(case, "speed_prompts", "speed_limit")
    except ValueError as fault:
        yield str(fault)
        return
    for arm in (arm for arm in case.report.arms if arm.control != "no_needle"):
        other = [sample.prompt_id for sample in arm.samples if _is_other(sample, case)]
        ran = {known.ids.get(sample.source_sha256, sample.prompt_id) for sample in arm.samples}
        missing, picked = sorted(wanted - ran), sorted((ran & known.prompts.keys()) - wanted)
        yield from faults(
            (other, f"arm {arm.label} ran other prompts than the shipped ones under {several(other)}"),
            (missing, f"arm {arm.label} did not run {several(missing)}, which the configuration selects"),
            (picked, f"arm {arm.label} ran {several(picked)}, which the configuration does not select"),
        )


def _selected(case: Case, switch: str, limit: str, seed: object = 0) -> set[str]:
    """The shipped prompts that a switch selects, drawn as the engine does; ValueError for another value."""
    sets, value, count = known_sets().sets, case.configuration.get(switch), case.configuration.get(limit)
    names = IN_ALL if value == "all" else tuple(value.split(",")) if isinstance(value, str) else ()
    if not names or any(name not in sets for name in names):
        return set()  # a file, or generated prompts
    if count is not None and (type(count) is not int or count < 1):
        raise ValueError(f"configuration.{limit} is {shown(count)}, not a number of prompts")
    if type(seed) is not int:
        raise ValueError(f"configuration.seed is {shown(seed)}, not a whole number")
    order = [(name, prompt) for name in names for prompt in sets[name]]
    if seed:
        Random(seed).shuffle(order)  # noqa: S311 - the engine's draw again
    return {prompt for name in names for prompt in [p for of, p in order if of == name][:count]}


def _is_other(sample: Sample, case: Case) -> bool:
    """Whether a row has a shipped prompt's id, but another source, needle or tokens; or its source alone."""
    known = known_sets()
    prompt, needle = known.prompts.get(sample.prompt_id), sample.needle
    if prompt is None:
        return sample.source_sha256 in known.ids
    if needle is not None and [needle.needle, needle.answer, needle.depth] != prompt.needle:
        return True
    target, stated = case.target, case.configuration
    by_default = all(stated.get(name, value) == value for name, value in TEMPLATE_SWITCHES.items())
    is_shipped = by_default and target is not None and target.weights_sha256 == known.target_sha256
    same_tokens = not is_shipped or sample.prompt_sha256 == prompt.tokens_sha256
    return sample.source_sha256 != prompt.source_sha256 or not same_tokens


def environment_incomplete(case: Case) -> Iterator[str]:
    """Machine, versions, source or weight digests are missing or placeholders, two models have one digest,
    Metal is said of a system that has none, or a target or drafter leaves out its vocab_size, cache_layers or
    largest_block.
    """
    environment, systems = case.report.environment, [arm.system for arm in case.report.arms]
    git, models, darwin = environment.git, environment.models, environment.system == "Darwin"
    named = {name: getattr(environment, name) for name in NAMED} | dict(environment.versions)
    for role, model in models.items():
        named |= {f"{role}.id": model.id, f"{role}.dtype": model.dtype}
    blank = [name for name, value in named.items() if value.strip().lower() in {"", *PLACEHOLDERS}]
    target, drafter = case.target, case.drafter
    digests = [model.weights_sha256 for model in models.values()]
    no_digest = any(len(set(digest)) == 1 for digest in (git.source_sha256, *digests))
    needed = {
        "target": bool(systems) or case.kind == "perplexity",
        "drafter": any(system.has_network for system in systems),
        "projector": any(system.restoration == "learned" for system in systems),
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
    system, metal, memory = environment.system, environment.metal, environment.memory_bytes
    chip, arm64 = environment.chip.casefold(), environment.machine == "arm64"
    apple = chip.startswith("apple")
    silicon = apple or re.search(r"\bM[0-9]\b", environment.chip)
    contradicts = (
        (silicon and not (system == "Darwin" and arm64))
        or (metal and not apple)
        or (system == "Darwin" and not chip.startswith(("apple", "intel")))
        or (arm64 and "intel" in chip)
        or (not metal and environment.device in ("gpu", "metal"))
    )
    odd: set[int] = set()
    needed = 0
    for model in environment.models.values():
        widths = {int(found) for found in re.findall("([0-9]+)-bit", model.quantization or "")}
        odd |= widths - {*AFFINE_BITS}
        unpacked = DTYPE_BITS.get(model.dtype, min(DTYPE_BITS.values()))
        needed += model.parameters * min(widths & {*AFFINE_BITS}, default=unpacked) // 8
    what = f"chip {shown(environment.chip)}, {shown(system)}, {shown(environment.machine)}"
    yield from faults(
        (contradicts, f"{what}, device {shown(environment.device)} and metal {metal} contradict"),
        (odd, f"a model is packed to {sorted(odd)[:1]} bits, which no quantization does"),
        (needed > memory, f"the models' parameters take {needed} bytes, the machine has {memory}"),
    )


def machine_busy(case: Case) -> Iterator[str]:
    """A speed is claimed while other processes used more than 10 % of the CPU time, or Spotlight, Time
    Machine or Photos more than 10 % of a core, or while that was not watched.
    """
    load, is_mac = case.report.environment.load, case.report.environment.system == "Darwin"
    timed, share = sum(sample.seconds for _, sample, _ in case.rows), load.other_cpu_share or 0.0
    unwatched = sorted(SERVICES - load.services.keys()) if is_mac else []
    busy = [name for name, seconds in load.services.items() if seconds > MOST_SERVICE_CPU * load.seconds]
    short = load.other_cpu_share is None or load.seconds < WATCHED * timed
    found = faults(
        (short, f"the load was measured for {load.seconds:.3g} s of {timed:.3g} timed seconds"),
        (not short and share > MOST_OTHER_CPU, f"other processes used {share:.1%} of the CPU time"),
        (unwatched, f"the load of {several(unwatched)} was not measured"),
        (busy, f"{several(busy)} used more than {MOST_SERVICE_CPU:.0%} of a core"),
    )
    return found if case.speed_pairs else iter(())


def thermal_or_power(case: Case) -> Iterator[str]:
    """A speed is claimed of a machine that was throttled, on battery or swapping."""
    environment = case.report.environment
    hot = environment.thermal_state in ("serious", "critical")
    found = faults(
        (environment.power_source == "battery", "the machine ran on battery"),
        (hot, f"the machine's thermal state was {environment.thermal_state}"),
        (environment.swapping, "the machine was swapping"),
    )
    return found if case.speed_pairs else iter(())
