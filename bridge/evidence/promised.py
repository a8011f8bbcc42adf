"""What a preset promises of its report, held against the report. Pure; apart from the gate's own rules.

The gate judges what a report says; a report that claims little and declares no drafter can be perfectly true.
Whether it answers the job that was asked for is decided here: the kind, the claims it has to make, and the
components that have to be part of the arms under test. That those components then really ran is judged by the
gate (``ENGINE_NEVER_RAN``, ``RESTORATION_CLAIM``, ``SILENT_FALLBACK`` compare declarations with the rows).
"""

from __future__ import annotations

from collections.abc import Iterator

from bridge.evidence.gate import Judgement
from bridge.evidence.report import Report
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
    made = {claim.name for claim in report.claims}
    for name in promise.claims:
        if name not in made:
            message = f"the preset promises a claim of {name}; the report makes {', '.join(made) or 'none'}"
            yield Violation(code="CLAIM_MISSING", message=message)
    yield from _lacking_components(promise, report)


def _lacking_components(promise: Promise, report: Report) -> Iterator[Violation]:
    tested = report.with_role("sut")
    without = {None, *WEIGHTLESS_DRAFTERS}
    undrafted = [arm.name for arm in tested if arm.system.drafter in without]
    if promise.drafter and (undrafted or not tested or "drafter" not in report.environment.models):
        who = "environment.models names none" if tested else "no arm is under test"
        who = f"arm {shown(undrafted[0])} declares none that has weights" if undrafted else who
        yield Violation(code="ENGINE_NEVER_RAN", message=f"the preset promises a drafter, and {who}")
    if promise.restoration and not any(arm.system.restoration for arm in tested):
        message = "the preset promises restoration, and no arm under test declares it"
        yield Violation(code="RESTORATION_CLAIM", message=message)
    used = {arm.system.kv.partition("@")[0].partition(":")[0] for arm in tested}
    for kind in promise.kv:
        if kind not in used:
            message = f"the preset promises a {kind} KV cache, and no arm under test declares it"
            yield Violation(code="SILENT_FALLBACK", message=message)
