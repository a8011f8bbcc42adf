"""Are the machine and the models described, and was the machine fit to be timed?"""

from __future__ import annotations

import re
from collections.abc import Iterator

from bridge.evidence.figures import Case
from bridge.evidence.model import Environment, Model
from bridge.evidence.text import faults, several, shown

WEIGHTLESS_DRAFTERS = frozenset({"prompt-lookup"})
DTYPE_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}
# The limits of a speed claim: CPU time of other processes as a share of all cores', of a service as a share
# of one core; and the share of the timed seconds for which both must be known.
MOST_OTHER_CPU, MOST_SERVICE_CPU, WATCHED = 0.10, 0.10, 0.9
PLACEHOLDERS = frozenset({"unknown", "none", "null", "n/a", "na", "?", "-", "todo", "tbd"})
SERVICES = frozenset({"spotlight", "time_machine", "photos"})  # watched on macOS
WIDTHS = frozenset({2, 3, 4, 5, 6, 8})  # bits that mlx packs to


def environment_incomplete(case: Case) -> Iterator[str]:
    """Machine, versions, source or weight digests are missing or placeholders, two models have one digest,
    Metal is said of a system that has none, or a target or drafter leaves out its vocab_size, cache_layers or
    largest_block.
    """
    report, environment = case.report, case.report.environment
    for field, value in _named(environment):
        if not value.strip() or value.strip().lower() in PLACEHOLDERS:
            yield f"environment.{field} is {shown(value)}"
    git, models, darwin = environment.git, environment.models, environment.system == "Darwin"
    target, drafter = models.get("target"), models.get("drafter")
    drafters = {arm.system.drafter for arm in report.arms} - WEIGHTLESS_DRAFTERS - {None}
    learned = any(arm.system.restoration == "learned" for arm in report.arms)
    digests = [model.weights_sha256 for model in models.values()]
    yield from faults(
        (environment.metal and not darwin, f"metal is true on {shown(environment.system)}, which has none"),
        (darwin and environment.thermal_state == "not_applicable", "Darwin has a thermal state"),
        (git.sha is None and git.dirty is not None, f"git says dirty {git.dirty} of no commit"),
        (_is_blank(git.source_sha256), "git.source_sha256 is no digest of any source"),
        (any(model.parameters == 0 for model in models.values()), "a model has no parameters"),
        (any(map(_is_blank, digests)), "a model has no weight digest"),
        (len(set(digests)) < len(digests), "two models have one weight digest"),
        (report.arms and target is None, "no target is named"),
        (drafters and drafter is None, "no drafter is named, but an arm declares one"),
        (learned and "projector" not in models, "no projector is named, but an arm restores from one"),
        (
            target and (target.vocab_size is None or not target.cache_layers),
            "the target states no vocab_size or no cache_layers",
        ),
        (drafter and drafter.largest_block is None, "the drafter states no largest_block"),
    )


def _named(environment: Environment) -> Iterator[tuple[str, str]]:
    """Every field that names something."""
    for field in ("machine", "system", "os_release", "chip", "device", "blas"):
        yield field, getattr(environment, field)
    for name, version in environment.versions:
        yield f"versions.{name}", version
    for role, model in environment.models.items():
        yield f"models.{role}.id", model.id
        yield f"models.{role}.dtype", model.dtype


def _is_blank(digest: str) -> bool:
    return len(set(digest)) == 1


def environment_impossible(case: Case) -> Iterator[str]:
    """Chip, system and device contradict each other, the models' parameters exceed the memory, or weights
    have a width that no quantization has.
    """
    environment = case.report.environment
    system, arm64 = environment.system, environment.machine == "arm64"
    chip, name = shown(environment.chip), environment.chip.casefold()
    apple = name.startswith("apple")
    silicon = apple or re.search(r"\bM[0-9]\b", environment.chip)
    odd = [width for model in environment.models.values() for width in _widths(model) if width not in WIDTHS]
    needed, memory = sum(map(_least_bytes, environment.models.values())), environment.memory_bytes
    yield from faults(
        (silicon and not (system == "Darwin" and arm64), f"the chip is {chip}, the system {shown(system)}"),
        (environment.metal and not apple, f"metal is true on {chip}"),
        (system == "Darwin" and not name.startswith(("apple", "intel")), f"Darwin does not run on {chip}"),
        (arm64 and "intel" in name, f"the machine is arm64, but the chip is {chip}"),
        (not environment.metal and environment.device in ("gpu", "metal"), "the device needs Metal"),
        (odd, f"a model is packed to {odd[:1]} bits, which no quantization does"),
        (needed > memory, f"the models' parameters take {needed} bytes, the machine has {memory}"),
    )


def _widths(model: Model) -> list[int]:
    """Bits that a model's matrices are packed to."""
    return [int(found) for found in re.findall("([0-9]+)-bit", model.quantization or "")]


def _least_bytes(model: Model) -> int:
    """The fewest bytes a model's parameters can take."""
    packed = [width for width in _widths(model) if width in WIDTHS]
    bits = min(packed, default=DTYPE_BITS.get(model.dtype, min(DTYPE_BITS.values())))
    return model.parameters * bits // 8


def machine_busy(case: Case) -> Iterator[str]:
    """A speed is claimed while other processes used more than 10 % of the CPU time, or Spotlight, Time
    Machine or Photos more than 10 % of a core, or while that was not watched.
    """
    if not any(case.speed_pairs()):
        return
    load = case.report.environment.load
    timed = sum((sample.prefill_s or 0) + (sample.decode_s or 0) for _, sample, _ in case.rows())
    if load.other_cpu_share is None or load.seconds < WATCHED * timed:
        yield f"the load was measured for {load.seconds:.3g} s of {timed:.3g} timed seconds"
    elif load.other_cpu_share > MOST_OTHER_CPU:
        share, most = f"{load.other_cpu_share:.1%}", f"{MOST_OTHER_CPU:.0%}"
        yield f"other processes used {share} of the CPU time (limit {most})"
    if case.report.environment.system == "Darwin" and (unwatched := sorted(SERVICES - load.services.keys())):
        yield f"the load of {several(unwatched)} was not measured"
    for service, seconds in load.services.items():
        if seconds > MOST_SERVICE_CPU * load.seconds:
            yield f"{service} used {seconds:.3g} s of CPU in {load.seconds:.3g} s"


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
