"""Did the KV policy of an arm under test bound anything, or is it native caches under another name?

What a code does to values, and what was restored, other rules see in the rows; here is what windows drop.
"""

from __future__ import annotations

from collections.abc import Iterator

from bridge.evidence.case import Case
from bridge.evidence.policies import NATIVE, SLIDING, Policy, parse_policy
from bridge.evidence.report import Arm, Sample
from bridge.evidence.rules.claims import SAMENESS
from bridge.evidence.shown import shown

RECURRENT = frozenset({"ArraysCache"})  # state, which no policy bounds


def policy_no_effect(case: Case) -> Iterator[str]:
    """A bounding policy under test that dropped no position of any row.

    An arm of which sameness alone is claimed may be such a one: that nothing changes is what it shows.
    """
    native = _native_rows(case)
    for arm in case.report.with_role("sut"):
        policy = parse_policy(arm.system.kv)
        if policy is None or policy.bound is None or not arm.samples or _same_alone(case, arm):
            continue
        if not any(_drops(sample, policy, native.get(sample.prompt_id)) for sample in arm.samples):
            longest = max(map(_positions, arm.samples))
            windows = [row.kept_positions for row in native.values() if row.kept_positions is not None]
            reach = f"windows of its own that reach {max(windows)}" if windows else "no sliding window"
            yield (
                f"arm {shown(arm.name)} declares kv {arm.system.kv}, which drops nothing from contexts of at "
                f"most {longest} positions in a model whose native rows show {reach}"
            )


def _same_alone(case: Case, arm: Arm) -> bool:
    claimed = {claim.name for claim in case.report.claims if case.arm_of(claim) is arm}
    return bool(claimed) and claimed <= SAMENESS


def _native_rows(case: Case) -> dict[str, Sample]:
    """A row of native caches for every prompt, one that says how far its windows reach where there is one."""
    found: dict[str, Sample] = {}
    for arm in case.report.with_role("baseline") + case.report.with_role("oracle"):
        if parse_policy(arm.system.kv) == NATIVE:
            for sample in arm.samples:
                if sample.kept_positions is not None or sample.prompt_id not in found:
                    found[sample.prompt_id] = sample
    return found


def _positions(sample: Sample) -> int:
    """Positions behind the last token."""
    return sample.prompt_tokens + len(sample.tokens) - 1


def _drops(sample: Sample, policy: Policy, native: Sample | None) -> bool:
    """Whether a query of this row misses what it would see in native caches.

    A full layer misses something once the context outgrows sink and window. A layer with a window of its own
    does so too, but only where that reaches further back than the policy's.
    """
    if _positions(sample) < (policy.bound or 0):
        return False
    full = native is None or bool(native.cache.classes.keys() - SLIDING - RECURRENT)
    if policy.layers == "full" or (policy.layers == "all" and full):
        return True
    own = None if native is None else native.kept_positions
    return own is not None and own >= int(policy.values[1])
