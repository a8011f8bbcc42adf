"""What a preset promises of its report, held against the report. Pure; apart from the gate's own rules.

The gate judges what a report says; a report that claims little and declares no drafter can be perfectly true.
Whether it answers the job that was asked for is decided here: the kind, the claims it has to make, and the
components that have to be part of the arms under test. That those components then really ran is judged by the
gate (``ENGINE_NEVER_RAN``, ``RESTORATION_CLAIM``, ``SILENT_FALLBACK`` compare declarations with the rows).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bridge.evidence.gate import Judgement
from bridge.evidence.policies import parse_policy
from bridge.evidence.report import Arm, Parity, Report
from bridge.evidence.rules.machine import WEIGHTLESS_DRAFTERS
from bridge.evidence.rules.paths import is_plain
from bridge.evidence.shown import shown
from bridge.presets import Promise
from bridge.protocol.result import Violation


def broken_promises(promise: Promise, judgement: Judgement) -> Iterator[Violation]:
    """Each way in which a judged report is not what its preset promises; none where it cannot be read."""
    report = judgement.report
    if report is None:
        return
    if report.kind != promise.kind:
        message = f"the preset promises a {promise.kind} report, this is a {report.kind} report"
        yield Violation(code="WRONG_KIND", message=message)
        return
    yield from _lacking_claims(promise, report)
    yield from _lacking_components(promise, report)
    if report.parity is not None:
        yield from _lax_parity(promise, report.parity)


def _lacking_claims(promise: Promise, report: Report) -> Iterator[Violation]:
    """Promised claims that are not made, or made only of arms without the promised components."""
    for name in promise.claims:
        of = [report.arm(claim.arm) if claim.arm else None for claim in report.claims if claim.name == name]
        if not of:
            made = ", ".join(sorted({claim.name for claim in report.claims})) or "none"
            message = f"the preset promises a claim of {name}; the report makes {made}"
            yield Violation(code="CLAIM_MISSING", message=message)
        elif None not in of and not any(_is_promised(arm, promise) for arm in of if arm is not None):
            message = (
                f"the preset promises a claim of {name} about what it tests; the report makes it of others"
            )
            yield Violation(code="CLAIM_MISSING", message=message)


def _is_promised(arm: Arm, promise: Promise) -> bool:
    """Whether an arm declares the promised components."""
    return (
        (promise.restoration is None or arm.system.restoration == promise.restoration)
        and (not promise.kv or any(_uses(arm, policy) for policy in promise.kv))
        and (promise.drafter is None or _drafts(arm, promise.drafter))
    )


def _drafts(arm: Arm, kind: str) -> bool:
    """Whether an arm's drafter is a network, of that kind or ``any``; look-ups may stand before it."""
    network = (arm.system.drafter or "").rpartition("+")[2]
    return bool(network) and network not in WEIGHTLESS_DRAFTERS and kind in ("any", network)


def _uses(arm: Arm, promised: str) -> bool:
    """Whether an arm's KV policy is the promised one, or of the promised kind."""
    policy = parse_policy(arm.system.kv)
    if ":" in promised:
        return policy is not None and policy == parse_policy(promised)
    return policy is not None and policy.kind == promised


def _lax_parity(promise: Promise, parity: Parity) -> Iterator[Violation]:
    """A comparison in another precision, more loosely, or of less than was promised."""
    problems = []
    if promise.dtype is not None and parity.dtype != promise.dtype:
        problems.append(f"a comparison in {promise.dtype}, and this one is in {shown(parity.dtype)}")
    if promise.tolerance is not None and parity.tolerance > promise.tolerance:
        problems.append(f"a tolerance of {promise.tolerance:g}, and this one is {parity.tolerance:g}")
    if promise.hidden_states and not parity.compares_hidden:
        problems.append("a comparison of hidden states, and this one has logits alone")
    for problem in problems:
        yield Violation(code="PARITY_TOLERANCE", message=f"the preset promises {problem}")


def _lacking_components(promise: Promise, report: Report) -> Iterator[Violation]:
    tested = report.with_role("sut")
    if promise.drafter is not None:
        yield from _lacking_drafter(promise.drafter, tested, report)
    if promise.baseline and not any(is_plain(arm.system) for arm in report.with_role("baseline")):
        message = "the preset promises mlx-lm's plain decoding, and no baseline is that"
        yield Violation(code="SPEEDUP_BASELINE_LOOP", message=message)
    if promise.restoration is not None and not any(
        arm.system.restoration == promise.restoration for arm in tested
    ):
        message = f"the preset promises {promise.restoration} restoration, and no arm under test declares it"
        yield Violation(code="RESTORATION_CLAIM", message=message)
    for policy in promise.kv:
        if not any(_uses(arm, policy) for arm in tested):
            message = f"the preset promises a {policy} KV cache, and no arm under test declares it"
            yield Violation(code="SILENT_FALLBACK", message=message)
    for switch, value in promise.configuration.items():
        stated = report.configuration.get(switch)
        if stated != value or type(stated) is not type(value):
            message = f"the preset promises {switch} {value}, and configuration says {shown(stated)}"
            yield Violation(code="SILENT_FALLBACK", message=message)


def _lacking_drafter(kind: str, tested: Sequence[Arm], report: Report) -> Iterator[Violation]:
    undrafted = [arm.name for arm in tested if not _drafts(arm, kind)]
    if not undrafted and tested and "drafter" in report.environment.models:
        return
    wanted = "a drafter" if kind == "any" else f"a drafter of the kind {kind}"
    who = "environment.models names none" if tested else "no arm is under test"
    who = f"arm {shown(undrafted[0])} declares none of that kind that has weights" if undrafted else who
    yield Violation(code="ENGINE_NEVER_RAN", message=f"the preset promises {wanted}, and {who}")
