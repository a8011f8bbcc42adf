"""What a preset promises of its report, held against the report. Pure; apart from the gate's own rules.

The gate judges what a report says; a report that claims little and declares no drafter can be perfectly true.
Whether it answers the job that was asked for is decided here: the kind, the claims it has to make, and the
components that have to be part of the arms under test. That those components then really ran is judged by the
gate (``ENGINE_NEVER_RAN``, ``RESTORATION_CLAIM``, ``SILENT_FALLBACK`` compare declarations with the rows).
"""

from __future__ import annotations

from collections.abc import Iterator

from bridge.evidence.gate import Judgement
from bridge.evidence.report import Arm, Parity, Report
from bridge.evidence.rules.machine import WEIGHTLESS_DRAFTERS
from bridge.evidence.shown import shown
from bridge.presets import Promise
from bridge.result import Violation


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
        (not promise.restoration or arm.system.restoration is not None)
        and (not promise.kv or _kv_kind(arm) in promise.kv)
        and (not promise.drafter or not _lacks_drafter(arm))
    )


def _lacks_drafter(arm: Arm) -> bool:
    return arm.system.drafter is None or arm.system.drafter in WEIGHTLESS_DRAFTERS


def _kv_kind(arm: Arm) -> str:
    return arm.system.kv.partition("@")[0].partition(":")[0]


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
    undrafted = [arm.name for arm in tested if _lacks_drafter(arm)]
    if promise.drafter and (undrafted or not tested or "drafter" not in report.environment.models):
        who = "environment.models names none" if tested else "no arm is under test"
        who = f"arm {shown(undrafted[0])} declares none that has weights" if undrafted else who
        yield Violation(code="ENGINE_NEVER_RAN", message=f"the preset promises a drafter, and {who}")
    if promise.restoration and not any(arm.system.restoration for arm in tested):
        message = "the preset promises restoration, and no arm under test declares it"
        yield Violation(code="RESTORATION_CLAIM", message=message)
    used = {_kv_kind(arm) for arm in tested}
    for kind in promise.kv:
        if kind not in used:
            message = f"the preset promises a {kind} KV cache, and no arm under test declares it"
            yield Violation(code="SILENT_FALLBACK", message=message)
