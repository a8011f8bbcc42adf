"""Is memory what was measured, and do the caches describe the KV policy that the arm declares?"""

from __future__ import annotations

from collections.abc import Iterator

from evidence_format.claims import SAMENESS
from evidence_format.figures import Case, faults, pair_samples
from evidence_format.model import Arm, Sample
from evidence_format.policies import CODED, NATIVE, SLIDING, PolicySpec
from evidence_format.text import several, shown

WIDEST_BITS = 32  # of a value in native caches
LEAST_SHARE = 0.9  # what native caches held outside the codes' layers may differ a little
HALF = 0.5  # buffers may be up to twice as long as what they hold
STEP = 256  # positions by which mlx-lm's buffers grow
BATCHED = "RaggedKV"  # caches of a batch hold several sequences and count once
UNWRITTEN = 2  # the last token is in no cache, and mlx-lm's loop may stop one earlier
LEAST_DISTORTION = 0.25  # of the rate-distortion bound: real keys are easier to code than Gaussian noise
RECURRENT = frozenset({"ArraysCache"})  # state, which no policy bounds


def memory_analytic_as_measured(case: Case) -> Iterator[str]:
    """Resident bytes are stated or claimed from a formula."""
    for arm in case.report.arms:
        formulas = sum(not sample.cache.measured for sample in arm.samples)
        stated = case.report.summary.arms.get(arm.name)
        is_stated = stated is not None and stated.max_resident_bytes is not None
        if formulas and (is_stated or "resident_bytes" in case.claimed(arm)):
            yield f"resident bytes of arm {arm.label} are stated, but {formulas} rows carry a formula's"


def memory_claim_mismatch(case: Case) -> Iterator[str]:
    """The caches held are not those of the declared KV policy, hold nothing, take bits a value that the
    policy cannot give, or fewer bytes than its codes or positions need of what native caches hold; the
    arms hold different numbers of caches; or fewer bytes than any cache of the policy needs for the
    target's layers; or a distortion is less than codes of so many bits can have, or was measured at other
    prompts than another arm's, or at none; or rows of a bounding policy do not say how many positions were
    kept, or kept more than it allows.
    """
    # The most positions that a window of the model's own kept, where a row says so.
    native = [row for arm in case.report.arms if arm.system.is_native for row in arm.samples]
    window = max((row.kept_positions for row in native if row.kept_positions is not None), default=None)
    for arm in case.report.arms:
        policy, samples, name = arm.system.policy, arm.samples, f"arm {arm.label}"
        declares = f"{name} declares kv {shown(arm.system.kv)}"
        if policy is None:
            yield f"{declares}, which is no policy"
            continue
        held = {name for sample in samples for name in sample.cache.classes}
        foreign = sorted(held - policy.classes | held & policy.replaced)
        idle = [s.prompt_id for s in samples if policy.needed and policy.needed.isdisjoint(s.cache.classes)]
        empty = [s.prompt_id for s in samples if s.cache.measured and not s.cache.resident_bytes]
        needed = " or ".join(sorted(policy.needed))
        yield from faults(
            (foreign, f"{declares}, but held {several(foreign)} in its layers"),
            (idle, f"{declares}, but held no {needed} at {several(idle)}"),
            (empty, f"{name} has caches that hold 0 bytes after a run at {several(empty)}"),
        )
        for sample in samples:
            for problem in _row_problems(case, sample, policy, window):
                yield f"{arm.label}/{shown(sample.prompt_id)}: kv {policy.kind} {problem}"
        if policy != NATIVE or "resident_bytes" in case.claimed(arm):
            yield from _less_than_native(arm, policy, case)
    yield from _arms_differ(case)


def _row_problems(case: Case, sample: Sample, policy: PolicySpec, window: int | None) -> Iterator[str]:
    resident, use, kept, most = sample.cache.resident_bytes, sample.kv, sample.kept_positions, policy.bound
    if most is not None and policy.layers == "full":  # the model's own windows may be wider
        most = max(most, (kept or 0) if window is None else window)
    unbounded = most is not None and (kept is None or kept > most)
    least = _least_bytes(case, sample, policy)
    yield from faults(
        (unbounded, f"keeps {most} positions, but the row says {kept}"),
        (resident < LEAST_SHARE * least, f"needs {least:.0f} bytes here, but {resident} were resident"),
        (use is None and policy.coded, "needs a kv block that says how many values it codes"),
        (use is not None and policy == NATIVE, "has no kv block"),
    )
    if use is None or policy == NATIVE:
        return
    fewest, widest = policy.stored_bits
    bits, layers, coded = 8 * use.bytes / use.values, len(use.layers), sample.cache.classes.get(CODED, 0)
    distortions = use.key_distortion, use.value_distortion
    exact = [LEAST_DISTORTION * 2 ** (-2 * bits) for bits in policy.most_exact]
    pairs = zip(distortions, exact, strict=True)
    too_exact = policy.coded and any(said is not None and said < least for said, least in pairs)
    # Each layer's bytes may have been rounded down.
    fits = 8 * (use.bytes + layers) >= fewest * use.values and bits <= widest * (1 + 1e-9)
    larger = sample.cache.measured and use.bytes > resident
    yield from faults(
        (too_exact, f"cannot distort so little as {distortions}, under {exact[0]:.3g}, {exact[1]:.3g}"),
        (policy.numbers not in (None, set(use.layers)), f"names other layers than the {layers} of kv.layers"),
        (policy.coded and coded != layers, f"has {coded} caches of codes for {layers} layers in kv.layers"),
        (not fits, f"stores {fewest:.4g} to {widest:.4g} bits a value, not {bits:.4g}"),
        (larger, f"codes {use.bytes} bytes, but {resident} are resident"),
    )


def _least_bytes(case: Case, sample: Sample, policy: PolicySpec) -> float:
    """The fewest bytes in which a cache of the policy holds the row's positions; 0 where that is not known.

    By the target's own caches: a layer that the policy may apply to needs what the policy keeps at its fewest
    bits; every other layer what the model keeps. Rows of a batch and unmeasured rows are left out.
    """
    target = case.target
    if target is None or target.cache_layers is None or _unmeasured(sample):
        return 0.0
    length = max(sample.positions - UNWRITTEN, 0)
    plain_bits = WIDEST_BITS if target.dtype == "float32" else WIDEST_BITS // 2
    least = 0.0
    for index, layer in enumerate(target.cache_layers):
        positions = length if layer.window is None else min(length, layer.window - 1)
        bits: float = plain_bits
        if policy.may_apply(index, layer.kind):
            bits = min(bits, policy.stored_bits[0])
            positions = policy.fewest_positions(length, positions)
        least += positions * layer.values * bits / 8
    return least


def _less_than_native(arm: Arm, policy: PolicySpec, case: Case) -> Iterator[str]:
    """Caches that hold less than their codes, or their positions, of what native caches held of a prompt."""
    for native in case.baselines if policy.coded else case.report.arms:
        comparable = native.system.loop == arm.system.loop if policy.coded else native.control != "no_needle"
        if native is arm or not native.system.is_native or not comparable:
            continue
        for ours, plain in pair_samples(arm, native):
            if policy.coded:
                is_known = ours.cache.measured and plain.cache.measured
                # Where buffers grow by steps the last tokens may not have come in yet, and one may be longer.
                least, most = -(-(ours.positions - 2) // STEP), -(-plain.positions // STEP)
                rows = 1.0 if least >= most else max(least, 1) / (most + 1)
                share = LEAST_SHARE * policy.stored_bits[0] / WIDEST_BITS * rows
            else:
                is_known = not _unmeasured(ours) and not _unmeasured(plain)
                share = HALF * min(ours.positions, policy.span or ours.positions) / (plain.positions + STEP)
            if is_known and ours.cache.resident_bytes < share * plain.cache.resident_bytes:
                held = f"{ours.cache.resident_bytes} resident bytes of {ours.positions} positions"
                reference = f"{native.label} held {plain.positions} in {plain.cache.resident_bytes}"
                yield f"{arm.label}/{shown(ours.prompt_id)}: {held} are too few, where {reference}"


def _unmeasured(sample: Sample) -> bool:  # as bytes of its own sequence
    return not sample.cache.measured or BATCHED in sample.cache.classes


def _arms_differ(case: Case) -> Iterator[str]:
    """One target has as many caches in every arm, and arms measure their distortion at the same prompts."""
    rows = [(arm, row.cache.classes) for arm, row, _ in case.rows if BATCHED not in row.cache.classes]
    counts = {sum(classes.values()): arm.name for arm, classes in rows}
    if len(counts) > 1:
        held = [f"{count} in {name}" for count, name in sorted(counts.items())]
        yield f"the arms hold different numbers of caches: {several(held)}"
    measured: set[frozenset[str]] = set()
    for arm in case.report.arms:
        found = frozenset(sample.prompt_id for sample in arm.samples if sample.is_distortion_known)
        measured |= {found} if found else set()
        if case.kind == "kv" and arm.system.policy and arm.system.policy.coded and not found:
            yield f"arm {arm.label} keeps values in a code, but no row says how exact it is"
    if len(measured) > 1:
        yield "the distortions of the arms were measured at different prompts"


def policy_no_effect(case: Case) -> Iterator[str]:
    """The bounding KV policy of an arm under test dropped no position of any row: the model's own windows are
    narrower, or every context fits (an arm that claims sameness alone may be such a one).
    """
    native: dict[str, Sample] = {}  # of every prompt; a row that says how far its windows reach, if any does
    for sample in (row for arm in case.references if arm.system.is_native for row in arm.samples):
        if sample.kept_positions is not None or sample.prompt_id not in native:
            native[sample.prompt_id] = sample
    for arm in case.tested:
        policy, claimed = arm.system.policy, case.claimed(arm)
        if policy is None or policy.bound is None or not arm.samples or (claimed and claimed <= SAMENESS):
            continue
        if not any(_drops(sample, policy, native.get(sample.prompt_id)) for sample in arm.samples):
            longest = max(sample.positions - 1 for sample in arm.samples)
            yield f"arm {arm.label} declares kv {arm.system.kv}, which drops none of {longest} positions"


def _drops(sample: Sample, policy: PolicySpec, native: Sample | None) -> bool:
    """Whether a query of this row misses what it would see in native caches.

    A full layer misses something once the context outgrows sink and window. A layer with a window of its own
    does so too, but only where that reaches further back than the policy's.
    """
    full = native is None or bool(native.cache.classes.keys() - SLIDING - RECURRENT)
    own = native.kept_positions if native else None
    narrowed = own is not None and own >= policy.window
    outgrown = sample.positions - 1 >= policy.span
    return outgrown and (policy.layers == "full" or (policy.layers == "all" and full) or narrowed)
