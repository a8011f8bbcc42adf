"""Are the machine and the models described, and was the machine fit to be timed?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from bridge.evidence.case import Case
from bridge.evidence.report import Environment, Model
from bridge.evidence.shown import several, shown

WEIGHTLESS_DRAFTERS = frozenset({"prompt-lookup"})
DTYPE_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}
# The limits of a speed claim: CPU time of other processes as a share of all cores', of a service as a share
# of one core; and the share of the timed seconds for which both must be known.
MOST_OTHER_CPU, MOST_SERVICE_CPU, WATCHED = 0.10, 0.10, 0.9
PLACEHOLDERS = frozenset({"unknown", "none", "null", "n/a", "na", "?", "-", "todo", "tbd"})
SERVICES = frozenset({"spotlight", "time_machine", "photos"})  # watched on macOS
WIDTHS = frozenset({2, 3, 4, 5, 6, 8})  # bits that mlx packs to


def environment_incomplete(case: Case) -> Iterator[str]:
    """Machine, versions, source or weights are missing, impossible, or named by a placeholder."""
    report = case.report
    yield from _placeholders(report.environment)
    if report.environment.metal and report.environment.system != "Darwin":
        yield f"environment.metal is true on {shown(report.environment.system)}, which has no Metal"
    if report.environment.system == "Darwin" and report.environment.thermal_state == "not_applicable":
        yield "environment.thermal_state is not_applicable on Darwin, which has one"
    git = report.environment.git
    if git.sha is None and git.dirty is not None:
        yield f"environment.git says dirty {git.dirty} of no commit"
    if _is_blank(git.source_sha256):
        yield "environment.git.source_sha256 is no digest of any source"
    models = report.environment.models
    for name, model in models.items():
        if model.parameters == 0 or _is_blank(model.weights_sha256):
            yield f"the {name} has no parameters or no weight digest"
    if len({model.weights_sha256 for model in models.values()}) < len(models):
        yield "environment.models gives two models one weight digest"
    if report.arms and "target" not in models:
        yield "environment.models names no target"
    drafters = {arm.system.drafter for arm in report.arms if arm.system.drafter is not None}
    if drafters - WEIGHTLESS_DRAFTERS and "drafter" not in models:
        yield "environment.models names no drafter, but an arm declares one"
    if "projector" not in models and any(arm.system.restoration == "learned" for arm in report.arms):
        yield "environment.models names no projector, but an arm restores from one"
    yield from _unstated(models)


def _unstated(models: Mapping[str, Model]) -> Iterator[str]:
    """What a target or drafter leaves out that other rules compute with."""
    target, drafter = models.get("target"), models.get("drafter")
    if target is not None and (target.vocab_size is None or not target.cache_layers):
        yield "the target states no vocab_size or no cache_layers"
    if drafter is not None and drafter.largest_block is None:
        yield "the drafter states no largest_block"


def _placeholders(environment: Environment) -> Iterator[str]:
    named = {
        field: getattr(environment, field)
        for field in ("machine", "system", "os_release", "chip", "device", "blas")
    }
    named |= {f"versions.{name}": version for name, version in environment.versions}
    for model in environment.models.items():
        named |= {f"models.{model[0]}.id": model[1].id, f"models.{model[0]}.dtype": model[1].dtype}
    for field, value in named.items():
        if not value.strip() or value.strip().lower() in PLACEHOLDERS:
            yield f"environment.{field} is {shown(value)}"


def _is_blank(digest: str) -> bool:
    return len(set(digest)) == 1


def environment_impossible(case: Case) -> Iterator[str]:
    """Chip, system and device contradict each other, or the models do not fit the memory."""
    environment = case.report.environment
    apple = environment.chip.casefold().startswith("apple")
    named_so = apple or re.search(r"\bM[0-9]\b", environment.chip)
    if named_so and (environment.system != "Darwin" or environment.machine != "arm64"):
        where = f"{shown(environment.system)} on {shown(environment.machine)}"
        yield f"the chip is {shown(environment.chip)}, but the system is {where}"
    if environment.metal and not apple:
        yield f"environment.metal is true on {shown(environment.chip)}"
    if environment.system == "Darwin" and not environment.chip.casefold().startswith(("apple", "intel")):
        yield f"the system is Darwin, but the chip is {shown(environment.chip)}"
    if environment.machine == "arm64" and "intel" in environment.chip.casefold():
        yield f"the machine is arm64, but the chip is {shown(environment.chip)}"
    if not environment.metal and environment.device in ("gpu", "metal"):
        yield f"environment.device is {shown(environment.device)} without Metal"
    for name, model in environment.models.items():
        if odd := [width for width in _widths(model) if width not in WIDTHS]:
            yield f"the {name} is packed to {odd[0]} bits, which no quantization does"
    needed = sum(_least_bytes(model) for model in environment.models.values())
    if needed > environment.memory_bytes:
        yield f"the models' parameters take {needed} bytes, the machine has {environment.memory_bytes}"


def _widths(model: Model) -> list[int]:
    """Bits that a model's matrices are packed to."""
    return [int(found) for found in re.findall("([0-9]+)-bit", model.quantization or "")]


def _least_bytes(model: Model) -> int:
    """The fewest bytes a model's parameters can take."""
    bits = [width for width in _widths(model) if width in WIDTHS]
    smallest = min(bits) if bits else DTYPE_BITS.get(model.dtype, min(DTYPE_BITS.values()))
    return model.parameters * smallest // 8


def machine_busy(case: Case) -> Iterator[str]:
    """A speed is claimed of a machine that did other work, or of which that is not known."""
    if not any(case.speed_pairs()):
        return
    load = case.report.environment.load
    timed = sum((s.prefill_s or 0) + (s.decode_s or 0) for arm in case.report.arms for s in arm.samples)
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
    if environment.power_source == "battery":
        yield "the machine ran on battery"
    if environment.thermal_state in ("serious", "critical"):
        yield f"the machine's thermal state was {environment.thermal_state}"
    if environment.swapping:
        yield "the machine was swapping"
