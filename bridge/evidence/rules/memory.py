"""Is memory what was measured, and do the caches describe the KV policy that the arm declares?"""

from __future__ import annotations

from collections.abc import Iterator

from bridge.evidence.figures import Case, paired
from bridge.evidence.model import Arm, KVUse, Sample
from bridge.evidence.policies import CODED, NATIVE, SLIDING, KVPolicy, parse_policy
from bridge.evidence.rules.claims import SAMENESS
from bridge.evidence.text import several, shown

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
        if not formulas:
            continue
        if stated is not None and stated.max_resident_bytes is not None:
            yield f"arm {arm.label} states resident bytes, but {formulas} rows carry a formula's"
        if any(claim.name == "resident_bytes" for claim in case.claims_of(arm)):
            yield f"resident_bytes is claimed of {arm.label} from a formula"


def memory_claim_mismatch(case: Case) -> Iterator[str]:
    """The caches held are not those of the declared KV policy, hold nothing, take bits a value that the
    policy cannot give, or fewer bytes than its codes or positions need of what native caches hold; the
    arms hold different numbers of caches; or fewer bytes than any cache of the policy needs for the
    target's layers; or a distortion is less than codes of so many bits can have, or was measured at other
    prompts than another arm's, or at none; or rows of a bounding policy do not say how many positions were
    kept, or kept more than it allows.
    """
    native = _native_window(case)
    for arm in case.report.arms:
        policy = parse_policy(arm.system.kv)
        if policy is None:
            yield f"arm {arm.label} declares kv {shown(arm.system.kv)}, which is no policy"
            continue
        yield from (f"arm {arm.label} {problem}" for problem in _class_problems(arm, policy))
        for sample in arm.samples:
            problem = (
                _use_problem(sample, policy)
                or _bound_problem(sample, policy, native)
                or _bytes_problem(sample, policy, case)
            )
            if problem:
                yield f"{arm.label}/{shown(sample.prompt_id)}: {problem}"
        if policy.coded:
            yield from _less_than_its_bits(arm, policy, case)
        elif policy != NATIVE or any(claim.name == "resident_bytes" for claim in case.claims_of(arm)):
            yield from _less_than_it_keeps(arm, policy, case)
    yield from _layers_differ(case)
    yield from _distortions_differ(case)


def _class_problems(arm: Arm, policy: KVPolicy) -> Iterator[str]:
    """Caches that the policy does not explain, or lacks."""
    held = {name for sample in arm.samples for name in sample.cache.classes}
    declares = f"declares kv {arm.system.kv}, but"
    if foreign := sorted(held - policy.classes):
        yield f"{declares} held {several(foreign)}"
    idle = sum(policy.needed.isdisjoint(sample.cache.classes) for sample in arm.samples)
    if policy.needed and idle:
        yield f"{declares} {idle} rows held no {' or '.join(sorted(policy.needed))}"
    if left := sorted(held & policy.replaced):
        yield f"{declares} held {several(left)} in such layers"
    if empty := sum(sample.cache.measured and not sample.cache.resident_bytes for sample in arm.samples):
        yield f"has {empty} caches that hold 0 bytes after a run"


def _use_problem(sample: Sample, policy: KVPolicy) -> str | None:
    """What is wrong with a row's `kv`, or None: it must be there for a code, and fit the policy."""
    use = sample.kv
    if policy == NATIVE:
        return None if use is None else "native caches carry a kv block"
    if use is None:
        return f"kv {policy.kind} codes values, but the row does not say how many" if policy.coded else None
    least = LEAST_DISTORTION * 2 ** (-2 * policy.stored_bits[0])
    found = min((each for each in _distortions(use) if each is not None), default=least)
    if policy.coded and found < least:
        return f"a distortion of {found:.3g}, but codes of kv {policy.kind} cannot be under {least:.3g}"
    if policy.numbers is not None and set(use.layers) != policy.numbers:
        return f"kv.layers names {len(use.layers)} layers, others than {policy.layers}"
    coded = sample.cache.classes.get(CODED, 0)
    if policy.coded and coded != len(use.layers):
        return f"{coded} caches hold codes, but kv.layers names {len(use.layers)} layers"
    fewest, most = policy.stored_bits
    bits = 8 * use.bytes / use.values
    # Each layer's bytes may have been rounded down.
    if 8 * (use.bytes + len(use.layers)) < fewest * use.values or bits > most * (1 + 1e-9):
        return f"{bits:.4g} bits a value, but kv {policy.kind} stores {fewest:.4g} to {most:.4g}"
    if sample.cache.measured and use.bytes > sample.cache.resident_bytes:
        return f"{use.bytes} bytes of codes in {sample.cache.resident_bytes} resident bytes"
    return None


def _distortions(use: KVUse) -> tuple[float | None, float | None]:
    return use.key_distortion, use.value_distortion


def _bound_problem(sample: Sample, policy: KVPolicy, native: int | None) -> str | None:
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


def _bytes_problem(sample: Sample, policy: KVPolicy, case: Case) -> str | None:
    """Why no cache of the policy holds the row's positions in the row's bytes, or None.

    By the target's own caches: a layer that the policy may apply to needs what the policy keeps at its fewest
    bits; every other layer what the model keeps. Rows of a batch and unmeasured rows are left out.
    """
    target = case.report.environment.models.get("target")
    if target is None or target.cache_layers is None or _unmeasured(sample):
        return None
    length = max(sample.positions - UNWRITTEN, 0)
    plain_bits = WIDEST_BITS if target.dtype == "float32" else WIDEST_BITS // 2
    least = 0.0
    for index, layer in enumerate(target.cache_layers):
        positions = length if layer.window is None else min(length, layer.window - 1)
        bits: float = plain_bits
        if policy.may_apply(index, layer.kind):
            bits = min(bits, policy.stored_bits[0])
            positions = min(positions, max(policy.span - 1, 0)) if policy.bounds else positions
        least += positions * layer.values * bits / 8
    resident = sample.cache.resident_bytes
    if resident >= LEAST_SHARE * least:
        return None
    return f"{resident} resident bytes, but kv {policy.kind} needs {least:.0f} for {length} positions"


def _less_than_its_bits(arm: Arm, policy: KVPolicy, case: Case) -> Iterator[str]:
    """Caches that hold less than the codes of what the same loop's native caches held of the same prompt."""
    for native in case.baselines:
        if parse_policy(native.system.kv) != NATIVE or native.system.loop != arm.system.loop:
            continue
        share = LEAST_SHARE * policy.stored_bits[0] / WIDEST_BITS
        for coded, plain in paired(arm, native):
            least = share * _share_of_rows(coded, plain) * plain.cache.resident_bytes
            if coded.cache.measured and plain.cache.measured and coded.cache.resident_bytes < least:
                yield _cannot_hold(arm, coded, native, plain)


def _less_than_it_keeps(arm: Arm, policy: KVPolicy, case: Case) -> Iterator[str]:
    """Caches that hold less than the positions they keep took in another arm's native caches."""
    for native in case.report.arms:
        if native is arm or parse_policy(native.system.kv) != NATIVE or native.control == "no_needle":
            continue
        for ours, plain in paired(arm, native):
            kept = min(ours.positions, policy.span or ours.positions)
            least = HALF * plain.cache.resident_bytes * kept / (plain.positions + STEP)
            if not _unmeasured(ours) and not _unmeasured(plain) and ours.cache.resident_bytes < least:
                yield _cannot_hold(arm, ours, native, plain)


def _cannot_hold(arm: Arm, ours: Sample, native: Arm, plain: Sample) -> str:
    held = f"{ours.cache.resident_bytes} resident bytes of {ours.positions} positions"
    reference = f"{native.label} held {plain.positions} in {plain.cache.resident_bytes}"
    return f"{arm.label}/{shown(ours.prompt_id)}: {held} are too few, where {reference}"


def _share_of_rows(ours: Sample, plain: Sample) -> float:
    """The least share of plain's rows that ours has, where buffers grow by `STEP`s.

    The last tokens may not have come in yet, and a buffer may be one step longer than it has to be.
    """
    least, most = -(-(ours.positions - 2) // STEP), -(-plain.positions // STEP)
    return 1.0 if least >= most else max(least, 1) / (most + 1)


def _unmeasured(sample: Sample) -> bool:
    """Whether a row's bytes are no measurement of its own sequence."""
    return not sample.cache.measured or BATCHED in sample.cache.classes


def _layers_differ(case: Case) -> Iterator[str]:
    """One target has as many caches in every arm."""
    counts: dict[int, str] = {}
    for arm, sample, _ in case.rows():
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
            yield f"arm {arm.label} keeps values in a code, but no row says how exact it is"
    if len({frozenset(found) for found in measured.values()}) > 1:
        yield f"the distortions of {several(sorted(measured))} were measured at different prompts"


def policy_no_effect(case: Case) -> Iterator[str]:
    """The bounding KV policy of an arm under test dropped no position of any row: the model's own windows are
    narrower, or every context fits (an arm that claims sameness alone may be such a one).
    """
    native: dict[
        str, Sample
    ] = {}  # of every prompt a row that says how far its windows reach, if there is one
    for arm in case.references:
        for sample in arm.samples if parse_policy(arm.system.kv) == NATIVE else ():
            if sample.kept_positions is not None or sample.prompt_id not in native:
                native[sample.prompt_id] = sample
    for arm in case.tested:
        policy = parse_policy(arm.system.kv)
        claimed = {claim.name for claim in case.claims_of(arm)}
        if policy is None or policy.bound is None or not arm.samples or (claimed and claimed <= SAMENESS):
            continue
        if not any(_drops(sample, policy, native.get(sample.prompt_id)) for sample in arm.samples):
            longest = max(sample.positions - 1 for sample in arm.samples)
            windows = [row.kept_positions for row in native.values() if row.kept_positions is not None]
            reach = f"windows of {max(windows)}" if windows else "no sliding window"
            drops = f"drops nothing from at most {longest} positions of a model that has {reach}"
            yield f"arm {arm.label} declares kv {arm.system.kv}, which {drops}"


def _drops(sample: Sample, policy: KVPolicy, native: Sample | None) -> bool:
    """Whether a query of this row misses what it would see in native caches.

    A full layer misses something once the context outgrows sink and window. A layer with a window of its own
    does so too, but only where that reaches further back than the policy's.
    """
    if sample.positions - 1 < policy.span:
        return False
    full = native is None or bool(native.cache.classes.keys() - SLIDING - RECURRENT)
    if policy.layers == "full" or (policy.layers == "all" and full):
        return True
    own = None if native is None else native.kept_positions
    return own is not None and own >= int(policy.values[1])
