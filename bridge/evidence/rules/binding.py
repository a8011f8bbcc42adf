"""Does the report belong to this job? Identity against the binding, and times."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from bridge.evidence.case import Case
from bridge.evidence.shown import shown

CLOCK_SLACK = timedelta(seconds=2)  # reports and runners may write whole seconds


def stale_report(case: Case) -> Iterator[str]:
    """The report's times are out of order, or outside the job's."""
    report, binding = case.report, case.binding
    if report.finished_at < report.started_at:
        yield f"the report finished at {report.finished_at} before it started at {report.started_at}"
    if binding is None:
        return
    if binding.started_at is not None and report.started_at < binding.started_at - CLOCK_SLACK:
        yield f"the report started at {report.started_at}, before this job's start {binding.started_at}"
    if binding.finished_at is not None and report.finished_at > binding.finished_at + CLOCK_SLACK:
        yield f"the report finished at {report.finished_at}, after this job's end {binding.finished_at}"


def wrong_request(case: Case) -> Iterator[str]:
    """The report names another request than the one it is judged for, or none."""
    request, binding = case.report.request, case.binding
    if binding is None:
        return
    if request is None:
        yield f"the report names no request, but is to answer {binding.nonce}"
        return
    for field in ("nonce", "workload_sha", "preset_digest", "engine_source"):
        expected, stated = getattr(binding, field), getattr(request, field)
        if expected is not None and stated != expected:
            yield f"request.{field} is {shown(stated)}, but this job's is {shown(expected)}"
