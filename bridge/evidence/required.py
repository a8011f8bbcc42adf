"""What a preset promises of its report, held against the report. Pure; apart from the gate's own rules.

The gate judges what a report says; a report that claims little and declares no drafter can be perfectly true.
Whether it answers the job that was asked for is decided here: the kind, the claims it has to make, and the
components that have to be part of the arms under test. That those components then really ran is judged by the
gate (``ENGINE_NEVER_RAN``, ``RESTORATION_CLAIM``, ``SILENT_FALLBACK`` compare declarations with the rows).
"""

from __future__ import annotations

from collections.abc import Iterator

from bridge.evidence.gate import Judgement
from bridge.evidence.model import Arm, Parity, Report
from bridge.evidence.policies import parse_policy
from bridge.evidence.rules.machine import WEIGHTLESS_DRAFTERS
from bridge.evidence.rules.paths import is_plain
from bridge.evidence.text import shown
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
    for code, problem in _problems(promise, report):
        yield Violation(code=code, message=f"the preset promises {problem}")


def _problems(promise: Promise, report: Report) -> Iterator[tuple[str, str]]:
    tested = report.with_role("sut")
    yield from (("CLAIM_MISSING", problem) for problem in _lacking_claims(promise, report))
    if promise.drafter is not None and (problem := _lacking_drafter(promise.drafter, report)) is not None:
        yield "ENGINE_NEVER_RAN", problem
    if promise.baseline and not any(is_plain(arm.system) for arm in report.with_role("baseline")):
        yield "SPEEDUP_BASELINE_LOOP", "mlx-lm's plain decoding, and no baseline is that"
    source = promise.restoration
    if source is not None and not any(arm.system.restoration == source for arm in tested):
        yield "RESTORATION_CLAIM", f"{source} restoration, and no arm under test declares it"
    for policy in promise.kv:
        if not any(_uses(arm, policy) for arm in tested):
            yield "SILENT_FALLBACK", f"a {policy} KV cache, and no arm under test declares it"
    for switch, value in promise.configuration.items():
        stated = report.configuration.get(switch)
        if stated != value or type(stated) is not type(value):
            yield "SILENT_FALLBACK", f"{switch} {value}, and configuration says {shown(stated)}"
    if report.parity is not None:
        yield from (("PARITY_TOLERANCE", problem) for problem in _lax_parity(promise, report.parity))


def _lacking_claims(promise: Promise, report: Report) -> Iterator[str]:
    """Promised claims that are not made, or made only of arms without the promised components."""
    for name in promise.claims:
        of = [report.arm(claim.arm) if claim.arm else None for claim in report.claims if claim.name == name]
        if not of:
            made = ", ".join(sorted({claim.name for claim in report.claims})) or "none"
            yield f"a claim of {name}; the report makes {made}"
        elif None not in of and not any(_is_promised(arm, promise) for arm in of if arm is not None):
            yield f"a claim of {name} about what it tests; the report makes it of others"


def _is_promised(arm: Arm, promise: Promise) -> bool:
    """Whether an arm declares the promised components."""
    return (
        (promise.restoration is None or arm.system.restoration == promise.restoration)
        and (not promise.kv or any(_uses(arm, policy) for policy in promise.kv))
        and (promise.drafter is None or _drafts(arm, promise.drafter))
    )


def _drafts(arm: Arm, kind: str) -> bool:
    """Whether an arm's drafter is a network, of that kind or ``any``, perhaps behind look-ups."""
    network = (arm.system.drafter or "").rpartition("+")[2]
    return bool(network) and network not in WEIGHTLESS_DRAFTERS and kind in ("any", network)


def _lacking_drafter(kind: str, report: Report) -> str | None:
    tested = report.with_role("sut")
    undrafted = [arm.label for arm in tested if not _drafts(arm, kind)]
    if undrafted:
        who = f"arm {undrafted[0]} declares none of that kind that has weights"
    elif not tested:
        who = "no arm is under test"
    elif "drafter" not in report.environment.models:
        who = "environment.models names none"
    else:
        return None
    return f"a drafter{'' if kind == 'any' else f' of the kind {kind}'}, and {who}"


def _uses(arm: Arm, promised: str) -> bool:
    """Whether an arm's KV policy is the promised one, or of the promised kind."""
    policy = parse_policy(arm.system.kv)
    if ":" in promised:
        return policy is not None and policy == parse_policy(promised)
    return policy is not None and policy.kind == promised


def _lax_parity(promise: Promise, parity: Parity) -> Iterator[str]:
    """A comparison in another precision, more loosely, or of less than was promised."""
    if promise.dtype is not None and parity.dtype != promise.dtype:
        yield f"a comparison in {promise.dtype}, and this one is in {shown(parity.dtype)}"
    if promise.tolerance is not None and parity.tolerance > promise.tolerance:
        yield f"a tolerance of {promise.tolerance:g}, and this one is {parity.tolerance:g}"
    if promise.hidden_states and not parity.compares_hidden:
        yield "a comparison of hidden states, and this one has logits alone"
