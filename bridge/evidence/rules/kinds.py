"""Are the arms those of the report's kind?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from bridge.evidence.case import Case
from bridge.evidence.policies import NATIVE, parse_policy
from bridge.evidence.report import Report
from bridge.evidence.shown import several, shown

ARMLESS = frozenset({"probe", "parity"})  # kinds that say nothing of any prompt


def kind_mismatch(case: Case) -> Iterator[str]:
    """The report's arms are not those of its kind."""
    report = case.report
    names = [arm.name for arm in report.arms]
    doubled = [name for name, count in Counter(names).items() if count > 1]
    if doubled:
        yield f"several arms are called {several(doubled)}"
    if len(report.with_role("baseline")) > 1:
        yield "more than one arm is the baseline"
    if len(report.with_role("oracle")) > 1:
        yield "more than one arm is the oracle"
    for arm in report.arms:
        if (arm.control is not None) != (arm.role == "control"):
            yield f"arm {shown(arm.name)} of role {arm.role} has control {arm.control}"
    if (report.parity is not None) != (report.kind == "parity"):
        having = "lacks" if report.parity is None else "carries"
        yield f"a {report.kind} report {having} a comparison with a reference"
    if report.kind in ARMLESS:
        if report.arms or report.order or report.divergences:
            yield f"a {report.kind} report carries arms, an order or divergences"
        live = report.liveness
        if live.rounds or live.drafter_forwards or report.restarts or report.rounding is not None:
            yield f"a {report.kind} report counts rounds, restarts or a rounding error of no arm"
        return
    if not report.arms or not any(arm.samples for arm in report.arms):
        yield f"a {report.kind} report carries no rows"
    yield from _KINDS.get(report.kind, _nothing_more)(report)


def _nothing_more(_report: Report) -> Iterator[str]:
    yield from ()


def _recall(report: Report) -> Iterator[str]:
    if not report.with_role("sut"):
        yield "a recall report has no arm under test"


def _quality(report: Report) -> Iterator[str]:
    if not report.with_role("sut") or not report.with_role("baseline"):
        yield "a quality report compares an arm under test with a baseline; one of them is missing"


def _kv(report: Report) -> Iterator[str]:
    """Policies against the native caches of the same system, so that nothing else can make the difference."""
    tested, natives = report.with_role("sut"), report.with_role("baseline")
    if not tested or not natives:
        yield "a kv report compares policies with native caches; one of them is missing"
    for native in natives:
        if parse_policy(native.system.kv) != NATIVE:
            yield f"the baseline {shown(native.name)} of a kv report declares kv {shown(native.system.kv)}"
        for arm in tested:
            ours, theirs = arm.system, native.system
            if (ours.loop, ours.drafter, ours.block) != (theirs.loop, theirs.drafter, theirs.block):
                yield f"{shown(arm.name)} and {shown(native.name)} differ in more than their KV policies"
    for arm in tested:
        if parse_policy(arm.system.kv) == NATIVE:
            yield f"arm {shown(arm.name)} is under test in a kv report, but its caches are native"


_KINDS: dict[str, Callable[[Report], Iterator[str]]] = {"recall": _recall, "quality": _quality, "kv": _kv}
