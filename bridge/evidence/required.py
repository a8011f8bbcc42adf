"""What a preset promises of its report, held against the report. Pure; apart from the gate's own rules.

The gate judges what a report says; one that claims little and declares no drafter can be perfectly true. Here
is decided whether it answers the job that was asked for. That declared components really ran is the gate's
(``ENGINE_NEVER_RAN``, ``RESTORATION_CLAIM``, ``SILENT_FALLBACK`` compare declarations with the rows).
"""

from __future__ import annotations

from collections.abc import Iterator

from bridge.evidence.gate import Judgement
from bridge.evidence.model import Parity, Report, System
from bridge.evidence.policies import parse_policy
from bridge.evidence.rules.identity import WEIGHTLESS_DRAFTERS
from bridge.evidence.text import several, shown
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
    problems = (*_claim_problems(promise, report), *_component_problems(promise, report))
    for code, problem in (*problems, *_parity_problems(promise, report.parity)):
        yield Violation(code=code, message=f"the preset promises {problem}")


def _claim_problems(promise: Promise, report: Report) -> Iterator[tuple[str, str]]:
    for name in promise.claims:
        of = [report.arm(claim.arm) if claim.arm else None for claim in report.claims if claim.name == name]
        if not of:
            made = several(sorted({claim.name for claim in report.claims})) or "none"
            yield "CLAIM_MISSING", f"a claim of {name}; the report makes {made}"
        elif not any(arm is None or _is_promised(arm.system, promise) for arm in of):
            yield "CLAIM_MISSING", f"a claim of {name} about what it tests; the report makes it of others"


def _component_problems(promise: Promise, report: Report) -> Iterator[tuple[str, str]]:
    tested = [arm.system for arm in report.with_role("sut")]
    if promise.drafter is not None:
        drafting = tested and all(_drafts(system, promise.drafter) for system in tested)
        if not drafting or "drafter" not in report.environment.models:
            declared = several([str(system.drafter) for system in tested])
            problem = f"a drafter with weights ({promise.drafter}) in every arm under test, and in the models"
            yield "ENGINE_NEVER_RAN", f"{problem}; the arms declare {declared or 'none'}"
    if promise.baseline and not any(arm.system.is_plain for arm in report.with_role("baseline")):
        yield "SPEEDUP_BASELINE_LOOP", "mlx-lm's plain decoding, and no baseline is that"
    source = promise.restoration
    if source is not None and not any(system.restoration == source for system in tested):
        yield "RESTORATION_CLAIM", f"{source} restoration, and no arm under test declares it"
    for policy in promise.kv:
        if not any(_uses(system, policy) for system in tested):
            yield "SILENT_FALLBACK", f"a {policy} KV cache, and no arm under test declares it"
    for switch, value in promise.configuration.items():
        stated = report.configuration.get(switch)
        if stated != value or type(stated) is not type(value):
            yield "SILENT_FALLBACK", f"{switch} {value}, and configuration says {shown(stated)}"


def _parity_problems(promise: Promise, parity: Parity | None) -> Iterator[tuple[str, str]]:
    if parity is None:
        return
    if promise.dtype not in (None, parity.dtype):
        yield "PARITY_TOLERANCE", f"a comparison in {promise.dtype}, and this one is in {shown(parity.dtype)}"
    if promise.tolerance is not None and parity.tolerance > promise.tolerance:
        problem = f"a tolerance of {promise.tolerance:g}, and this one is {parity.tolerance:g}"
        yield "PARITY_TOLERANCE", problem
    if promise.hidden_states and not parity.compares_hidden:
        yield "PARITY_TOLERANCE", "a comparison of hidden states, and this one has logits alone"


def _is_promised(system: System, promise: Promise) -> bool:
    return (
        promise.restoration in (None, system.restoration)
        and (not promise.kv or any(_uses(system, policy) for policy in promise.kv))
        and (promise.drafter is None or _drafts(system, promise.drafter))
    )


def _drafts(system: System, kind: str) -> bool:
    """Whether an arm's drafter is a network, of that kind or ``any``, perhaps behind look-ups."""
    network = (system.drafter or "").rpartition("+")[2]
    return bool(network) and network not in WEIGHTLESS_DRAFTERS and kind in ("any", network)


def _uses(system: System, promised: str) -> bool:
    policy = system.policy
    return policy is not None and (policy == parse_policy(promised) or policy.kind == promised)
