"""Is the machine described, was it fit to be timed, and is memory what was measured?"""

from __future__ import annotations

from collections.abc import Iterator

from bridge.evidence.case import Case
from bridge.evidence.report import Environment
from bridge.evidence.shown import several, shown

# Cache classes that a declared KV policy may hold. `native` are mlx-lm's own, and the engine's ring, which
# holds the same entries as mlx-lm's rotating cache but can be rolled back.
KV_CLASSES = {
    "native": frozenset(
        {
            "KVCache",
            "RotatingKVCache",
            "ChunkedKVCache",
            "ArraysCache",
            "CacheList",
            "SlidingRing",
            "RaggedKV",
        }
    ),
}
WEIGHTLESS_DRAFTERS = frozenset({"prompt-lookup"})
PLACEHOLDERS = frozenset({"unknown", "none", "null", "n/a", "na", "?", "-", "todo", "tbd"})


def memory_analytic_as_measured(case: Case) -> Iterator[str]:
    """Bytes from a formula stand where measured ones are meant."""
    for arm in case.report.arms:
        formulas = sum(not sample.cache.measured for sample in arm.samples)
        stated = case.report.summary.arms.get(arm.name)
        if formulas and stated is not None and stated.max_resident_bytes is not None:
            yield f"arm {shown(arm.name)} states resident bytes, but {formulas} rows carry a formula's"
    for claim in case.report.claims:
        of = case.arm_of(claim) if claim.name == "resident_bytes" else None
        if of is not None and any(not sample.cache.measured for sample in of.samples):
            yield f"resident_bytes is claimed of {shown(of.name)} from a formula"


def memory_claim_mismatch(case: Case) -> Iterator[str]:
    """The stated memory does not describe the caches that were used."""
    for arm in case.report.arms:
        known = KV_CLASSES.get(arm.system.kv)
        if known is None:
            yield f"arm {shown(arm.name)} declares kv {shown(arm.system.kv)}, none of {sorted(KV_CLASSES)}"
            continue
        foreign = sorted({name for sample in arm.samples for name in sample.cache.classes} - known)
        if foreign:
            yield f"arm {shown(arm.name)} declares kv {arm.system.kv}, but held {several(foreign)}"
        empty = sum(sample.cache.measured and sample.cache.resident_bytes == 0 for sample in arm.samples)
        if empty:
            yield f"arm {shown(arm.name)}: {empty} caches hold 0 bytes after a run"


def environment_incomplete(case: Case) -> Iterator[str]:
    """Machine, versions, source or weights are missing, or named by a placeholder or another's digest."""
    report = case.report
    yield from _placeholders(report.environment)
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
        yield "environment.models gives target and drafter one weight digest"
    if report.arms and "target" not in models:
        yield "environment.models names no target"
    drafters = {arm.system.drafter for arm in report.arms if arm.system.drafter is not None}
    if drafters - WEIGHTLESS_DRAFTERS and "drafter" not in models:
        yield "environment.models names no drafter, but an arm declares one"


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
