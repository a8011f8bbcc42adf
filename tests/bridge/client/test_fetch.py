"""A result that a runner passed is passed here only if the gate installed here accepts its evidence, too."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from bridge.bus.results import Believed
from bridge.client.fetch import Judged, judge
from bridge.protocol.result import File, Reason, Result, RunnerFacts, Status, Verdict
from bridge.signing.trust import TrustLevel
from tests.bridge.evidence import reports
from tests.bridge.evidence.reports import Document

REPORT = "report.json"
PASSED = Verdict(status=Status.PASSED, reason=Reason.OK)


def judged(data: bytes | None, *, verdict: Verdict = PASSED, **changes: object) -> Judged:
    """What the client makes of a result with this report."""
    files = {} if data is None else {REPORT: data}
    listed = tuple(
        File(path=path, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data), role="evidence")
        for path, data in files.items()
    )
    fields: dict[str, object] = {
        "nonce": reports.NONCE,
        "request_commit": "ab" * 20,
        "workload_sha": reports.WORKLOAD,
        "preset": "throughput",
        "preset_digest": "56" * 32,
        "engine_source": "installed",
        "runner": RunnerFacts(
            name="studio",
            id="0123456789abcdef",
            version="0.1.0",
            machine=reports.runner_facts(reports.throughput()),
        ),
        "attempt": 1,
        "started_at": "2026-03-01T12:00:05Z",
        "finished_at": "2026-03-01T12:01:05Z",
        "files": listed,
        "verdict": verdict,
        **changes,
    }
    result = Result.model_validate(fields)
    return judge(Believed(result, files, "cd" * 20, "refs/heads/x", TrustLevel.UNSIGNED, None))


def throughput(edit: Callable[[Document], object] = lambda _: None) -> bytes:
    document = reports.throughput()
    edit(document)
    return reports.dump(document)


def test_an_accepted_report_of_this_request_stays_passed() -> None:
    seen = judged(throughput())
    assert seen.verdict == PASSED
    assert seen.exit_code == 7  # no key that is trusted signed it
    assert seen.judgements[REPORT].accepted


FORGED: dict[str, tuple[Callable[[Document], object], str]] = {
    "an edited figure": (
        lambda d: d["summary"]["comparisons"][0].update(decode_ratio=9.99),
        "SUMMARY_MISMATCH",
    ),
    "no request": (lambda d: d.pop("request"), "WRONG_REQUEST"),
    "another nonce": (lambda d: d["request"].update(nonce="20200101t000000z000000000000"), "WRONG_REQUEST"),
    "another workload": (lambda d: d["request"].update(workload_sha="cd" * 20), "WRONG_REQUEST"),
    "another preset": (lambda d: d["request"].update(preset_digest="00" * 32), "WRONG_REQUEST"),
    "the requester's engine": (lambda d: d["request"].update(engine_source="workload"), "WRONG_REQUEST"),
    "started before the job": (lambda d: d.update(started_at="2026-03-01T11:00:00Z"), "STALE_REPORT"),
    "ended after the job": (lambda d: d.update(finished_at="2026-03-01T12:09:00Z"), "STALE_REPORT"),
    "no report at all": (lambda d: d.clear(), "LEGACY_SCHEMA"),
}


@pytest.mark.parametrize("case", FORGED)
def test_rejected_report_turns_a_passed_result_into_rejected(case: str) -> None:
    edit, code = FORGED[case]
    seen = judged(throughput(edit))
    reason = Reason.BINDING if code == "WRONG_REQUEST" else Reason.EVIDENCE
    assert (seen.verdict.status, seen.verdict.reason) == (Status.REJECTED, reason)
    assert seen.exit_code == 3
    assert code in [violation.code for violation in seen.verdict.violations]
    assert all(violation.file == REPORT for violation in seen.verdict.violations)
    if reason is Reason.EVIDENCE:
        assert "this client's gate" in seen.verdict.message
        assert code in seen.verdict.message
    assert seen.believed.result.verdict == PASSED


def test_promised_report_that_is_missing_or_of_another_kind_fails() -> None:
    for data, code in ((None, "NO_EVIDENCE"), (reports.dump(reports.probe()), "WRONG_KIND")):
        seen = judged(data)
        assert seen.verdict.status is Status.REJECTED
        assert [violation.code for violation in seen.verdict.violations] == [code]


def test_valid_report_that_breaks_its_presets_promise_is_rejected() -> None:
    seen = judged(throughput(), preset="throughput-bounded")
    assert seen.judgements[REPORT].accepted
    assert seen.exit_code == 3
    assert [(violation.code, violation.file) for violation in seen.verdict.violations] == [
        ("SILENT_FALLBACK", REPORT)
    ]


@pytest.mark.parametrize("preset", ["tests", "gate", "somebodys-own", None])
def test_a_preset_that_promises_no_report_here_passes_without_one(preset: str | None) -> None:
    assert judged(None, preset=preset).verdict == PASSED


def test_report_of_a_preset_not_installed_here_is_judged() -> None:
    assert judged(throughput(), preset="somebodys-own").verdict == PASSED
    assert judged(throughput(lambda d: d.pop("request")), preset="somebodys-own").exit_code == 3


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(status=Status.FAILED, reason=Reason.EXIT_CODE, message="exit code 3"),
        Verdict(status=Status.REJECTED, reason=Reason.EVIDENCE, message="the gate rejected the report"),
    ],
)
def test_what_the_runner_did_not_pass_stays_what_it_said(verdict: Verdict) -> None:
    assert judged(throughput(lambda d: d.pop("request")), verdict=verdict).verdict == verdict
