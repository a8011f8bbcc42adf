"""Is memory what was measured, and do the caches describe the KV policy that the arm declares?"""

from __future__ import annotations

from collections.abc import Iterator

from bridge.evidence.case import Case
from bridge.evidence.figures import paired
from bridge.evidence.policies import CODED, NATIVE, Policy, parse_policy
from bridge.evidence.report import Arm, KVUse, Sample
from bridge.evidence.shown import several, shown

WIDEST_BITS = 32  # of a value in native caches
LEAST_SHARE = 0.9  # what native caches held beside the codes' layers may differ a little
HALF = 0.5  # buffers may be up to twice as long as what they hold
STEP = 256  # positions by which mlx-lm's buffers grow
BATCHED = "RaggedKV"  # caches of a batch hold several sequences and count once
UNWRITTEN = 2  # the last token is in no cache, and mlx-lm's loop may stop one earlier
LEAST_DISTORTION = 0.25  # of the rate-distortion bound: real keys are easier to code than Gaussian noise


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
    claims = [claim for claim in case.report.claims if claim.name == "resident_bytes"]
    claimed = {arm.name for claim in claims if (arm := case.arm_of(claim)) is not None}
    native = _native_window(case)
    for arm in case.report.arms:
        policy = parse_policy(arm.system.kv)
        if policy is None:
            yield f"arm {shown(arm.name)} declares kv {shown(arm.system.kv)}, which is no policy"
            continue
        yield from (f"arm {shown(arm.name)}: {problem}" for problem in _class_problems(arm, policy))
        for sample in arm.samples:
            problem = (
                _use_problem(sample, policy)
                or _bound_problem(sample, policy, native)
                or _bytes_problem(sample, policy, case)
            )
            if problem:
                yield f"{shown(arm.name)}/{shown(sample.prompt_id)}: {problem}"
        if policy.coded:
            yield from _less_than_its_bits(arm, policy, case)
        elif policy != NATIVE or arm.name in claimed:
            yield from _less_than_it_keeps(arm, policy, case)
    yield from _layers_differ(case)
    yield from _distortions_differ(case)


def _class_problems(arm: Arm, policy: Policy) -> Iterator[str]:
    """Caches that the policy does not explain, or lacks."""
    held = {name for sample in arm.samples for name in sample.cache.classes}
    foreign = sorted(held - policy.classes)
    if foreign:
        yield f"declares kv {arm.system.kv}, but held {several(foreign)}"
    idle = sum(policy.needed.isdisjoint(sample.cache.classes) for sample in arm.samples)
    if policy.needed and idle:
        yield f"declares kv {arm.system.kv}, but {idle} rows held no {' or '.join(sorted(policy.needed))}"
    left = sorted(held & policy.replaced)
    if left:
        yield f"declares kv {arm.system.kv}, but held {several(left)} in such layers"
    empty = sum(sample.cache.measured and sample.cache.resident_bytes == 0 for sample in arm.samples)
    if empty:
        yield f"{empty} caches hold 0 bytes after a run"


def _use_problem(sample: Sample, policy: Policy) -> str | None:
    """What is wrong with a row's `kv`, or None: it must be there for a code, and fit the policy."""
    use = sample.kv
    if policy.kind == "native":
        return None if use is None else "native caches carry a kv block"
    if use is None:
        return (
            f"kv {policy.kind} keeps values in a code, but the row does not say how many"
            if policy.coded
            else None
        )
    least = LEAST_DISTORTION * 2 ** (-2 * policy.stored_bits[0])
    if policy.coded and any(found is not None and found < least for found in _distortions(use)):
        found = min(found for found in _distortions(use) if found is not None)
        return f"a distortion of {found:.3g}, but codes of kv {policy.kind} cannot be under {least:.3g}"
    return _layer_problem(sample, use, policy) or _bits_problem(sample, use, policy)


def _bytes_problem(sample: Sample, policy: Policy, case: Case) -> str | None:
    """Why no cache of the policy holds the row's positions in the row's bytes, or None.

    By the target's own caches: a layer that the policy may apply to needs what the policy keeps at its fewest
    bits; every other layer what the model keeps. Rows of a batch and unmeasured rows are left out.
    """
    target = case.report.environment.models.get("target")
    if target is None or target.cache_layers is None or _unmeasured(sample):
        return None
    length = max(_length(sample) - UNWRITTEN, 0)
    plain_bits = WIDEST_BITS if target.dtype == "float32" else WIDEST_BITS // 2
    bound = sum(map(int, policy.values)) if policy.bounds else None
    least = 0.0
    for index, layer in enumerate(target.cache_layers):
        positions = length if layer.window is None else min(length, layer.window - 1)
        bits: float = plain_bits
        if policy.may_apply(index, layer.kind):
            bits = min(bits, policy.stored_bits[0])
            positions = positions if bound is None else min(positions, max(bound - 1, 0))
        least += positions * layer.values * bits / 8
    if sample.cache.resident_bytes >= LEAST_SHARE * least:
        return None
    return (
        f"{sample.cache.resident_bytes} resident bytes, but kv {policy.kind} needs {least:.0f} for "
        f"{length} positions of this target"
    )


def _bound_problem(sample: Sample, policy: Policy, native: int | None) -> str | None:
    """What is wrong with the positions a bounding policy kept, or None.

    Where full layers alone are bounded, the model's own windows may be wider: `native`, what those kept,
    or None where no row says so.
    """
    if policy.bound is None:
        return None
    kept, most = sample.kept_positions, policy.bound
    if kept is None:
        return f"kv {policy.kind} bounds its layers, but the row does not say how many positions they kept"
    if policy.layers == "full":
        most = max(most, kept if native is None else native)
    return f"kv {policy.kind} keeps {most} positions, but {kept} were kept" if kept > most else None


def _native_window(case: Case) -> int | None:
    """The most positions that a window of the model's own kept in a native arm; None where no row says so."""
    native = [arm for arm in case.report.arms if parse_policy(arm.system.kv) == NATIVE]
    kept = [s.kept_positions for arm in native for s in arm.samples if s.kept_positions is not None]
    return max(kept, default=None)


def _less_than_its_bits(arm: Arm, policy: Policy, case: Case) -> Iterator[str]:
    """Caches that hold less than the codes of what the same loop's native caches held of the same prompt."""
    for native in case.report.with_role("baseline"):
        if parse_policy(native.system.kv) != NATIVE or native.system.loop != arm.system.loop:
            continue
        share = policy.stored_bits[0] / WIDEST_BITS
        for coded, plain in paired(arm, native):
            least = share * _share_of_rows(coded, plain) * plain.cache.resident_bytes
            bytes_ = coded.cache.resident_bytes
            if coded.cache.measured and plain.cache.measured and bytes_ < LEAST_SHARE * least:
                yield (
                    f"{shown(arm.name)}/{shown(coded.prompt_id)}: {bytes_} resident bytes cannot hold what "
                    f"{shown(native.name)} held in {plain.cache.resident_bytes}"
                )


def _less_than_it_keeps(arm: Arm, policy: Policy, case: Case) -> Iterator[str]:
    """Caches that hold less than the positions they keep took in another arm's native caches."""
    for native in case.report.arms:
        if native is arm or parse_policy(native.system.kv) != NATIVE or native.control == "no_needle":
            continue
        for ours, plain in paired(arm, native):
            if _unmeasured(ours) or _unmeasured(plain):
                continue
            length, seen = _length(ours), _length(plain)
            kept = min(length, sum(map(int, policy.values)) or length)
            least = HALF * plain.cache.resident_bytes * kept / (seen + STEP)
            if ours.cache.resident_bytes < least:
                yield (
                    f"{shown(arm.name)}/{shown(ours.prompt_id)}: {ours.cache.resident_bytes} resident bytes "
                    f"cannot hold {kept} positions, of {seen} that {shown(native.name)} held in "
                    f"{plain.cache.resident_bytes}"
                )


def _length(sample: Sample) -> int:
    return sample.prompt_tokens + len(sample.tokens)


def _share_of_rows(ours: Sample, plain: Sample) -> float:
    """The least share of plain's rows that ours has, where buffers grow by `STEP`s.

    The last tokens may not have come in yet, and a buffer may be one step longer than it has to be.
    """
    least, most = -(-(_length(ours) - 2) // STEP), -(-_length(plain) // STEP)
    return 1.0 if least >= most else max(least, 1) / (most + 1)


def _unmeasured(sample: Sample) -> bool:
    """Whether a row's bytes are no measurement of its own sequence."""
    return not sample.cache.measured or BATCHED in sample.cache.classes


def _layers_differ(case: Case) -> Iterator[str]:
    """One target has as many caches in every arm."""
    counts: dict[int, str] = {}
    for arm in case.report.arms:
        for sample in arm.samples:
            if BATCHED not in sample.cache.classes:
                counts.setdefault(sum(sample.cache.classes.values()), arm.name)
    if len(counts) > 1:
        held = [f"{count} in {name}" for count, name in sorted(counts.items())]
        yield f"the arms hold different numbers of caches: {several(held)}"


def _distortions_differ(case: Case) -> Iterator[str]:
    """The arms that measured a distortion measured it at the same prompts; coded arms of `eval kv` all do."""
    measured: dict[str, set[str]] = {}
    for arm in case.report.arms:
        found = {s.prompt_id for s in arm.samples if s.kv is not None and None not in _distortions(s.kv)}
        if found:
            measured[arm.name] = found
        policy = parse_policy(arm.system.kv)
        if case.report.kind == "kv" and policy is not None and policy.coded and not found:
            yield f"arm {shown(arm.name)} keeps values in a code, but no row says how exact it is"
    if len({frozenset(found) for found in measured.values()}) > 1:
        yield f"the distortions of {several(sorted(measured))} were measured at different prompts"


def _distortions(use: KVUse) -> tuple[float | None, float | None]:
    return use.key_distortion, use.value_distortion


def _layer_problem(sample: Sample, use: KVUse, policy: Policy) -> str | None:
    if policy.numbers is not None and set(use.layers) != policy.numbers:
        return f"kv.layers names {len(use.layers)} layers, others than {policy.layers}"
    coded = sample.cache.classes.get(CODED, 0)
    if policy.coded and coded != len(use.layers):
        return f"{coded} caches hold codes, but kv.layers names {len(use.layers)} layers"
    return None


def _bits_problem(sample: Sample, use: KVUse, policy: Policy) -> str | None:
    """Stored bits that the policy cannot give; each layer's bytes may have been rounded down."""
    fewest, most = policy.stored_bits
    bits = 8 * use.bytes / use.values
    if 8 * (use.bytes + len(use.layers)) < fewest * use.values or bits > most * (1 + 1e-9):
        return f"{bits:.4g} bits a value, but kv {policy.kind} stores {fewest:.4g} to {most:.4g}"
    if sample.cache.measured and use.bytes > sample.cache.resident_bytes:
        return f"{use.bytes} bytes of codes in {sample.cache.resident_bytes} resident bytes"
    return None
