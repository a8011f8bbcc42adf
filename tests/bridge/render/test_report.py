"""The page of a report: sections for what is there, small, and nothing hostile takes effect."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bridge.client.fetch import GateRecord, Judged
from bridge.evidence.gate import Judgement, judge
from bridge.protocol.result import ATTESTATION_KEY_FACT, Status, Violation
from bridge.render import report
from bridge.render.evidence import shortened
from bridge.render.report import ReportSubject, html, markdown
from evidence_format.model import Report
from evidence_format.verification import Verification, parse_verification
from tests.bridge.evidence import reports, test_paired
from tests.bridge.evidence.reports import dump
from tests.bridge.render.test_evidence import HOSTILE, judged


class Page(HTMLParser):
    """The headings, the text, and whatever could load or run something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.words: list[str] = []
        self.active: list[str] = []
        self.tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tag = tag
        if tag in {"script", "img", "iframe", "link", "object", "form", "base"}:
            self.active.append(tag)
        for name, value in attrs:
            loads = name in {"src", "srcset", "action", "style"} or name.startswith("on")
            if loads or (name == "href" and not (value or "").startswith("#")):
                self.active.append(f"{tag} {name}={value}")

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.tag in {"h2", "h3"} and data.strip():
            self.headings.append(data.strip())

    def handle_endtag(self, tag: str) -> None:
        self.tag = ""


def full_request() -> Judged:
    """A request with every record that a result may carry: a replay, reports judged in the job, a key."""
    replay = parse_verification(Path("tests/data/verification.json").read_bytes())
    assert isinstance(replay, Verification)
    rows = [
        {"file": f"{name}.json", "accepted": not code, "kind": "throughput", "claims": [], "figures": None}
        | {"violations": [{"code": code, "message": HOSTILE}] if code else []}
        for name, code in (("good", ""), ("bad", "SPEEDUP"))
    ]
    request = judged()
    result = request.believed.result
    runner = result.runner.model_copy(update={"machine": {ATTESTATION_KEY_FACT: "AAAAkey"}})
    return replace(
        request,
        believed=replace(request.believed, result=result.model_copy(update={"runner": runner})),
        judgements={"report.json": judge(dump(reports.throughput()))},
        verification=replay,
        gate_record=GateRecord.model_validate({"files": rows}),
    )


def subject(judgement: Judgement, name: str = "report.json") -> ReportSubject:
    return ReportSubject(name, {"report.json": judgement})


@pytest.mark.parametrize(
    ("data", "headings", "words"),
    [
        (
            dump(reports.throughput()),
            "Gate, Figures, Speed, Acceptance length, Time of a round, KV cache,"
            " Environment and configuration",
            [
                "speedup",
                "2.00x",
                "speculative: 4.00 tokens a round",
                "draft, ms",
                "99%",
                "Apple M4",
                "max_tokens",
            ],
        ),
        (
            dump(reports.recall()),
            "Gate, Figures, Speed, Acceptance length, Time of a round, Recall by depth, KV cache,"
            " Environment and configuration",
            ["Answers found, by depth in the prompt", "no_needle"],
        ),
        (dump(reports.probe()), "Gate, Figures, Environment and configuration", ["24.0 GiB"]),
        (dump(reports.parity()), "Gate, Figures, Environment and configuration", ["2 cases, 4 rounds"]),
        (
            dump(test_paired.record()),
            "Gate, Paired run",
            ["SLOWER", "Time ratio by block", "smallest effect"],
        ),
        (b"{}", "Gate", ["LEGACY_SCHEMA", "rejected"]),
    ],
)
def test_a_page_has_a_section_for_what_is_there(data: bytes, headings: str, words: list[str]) -> None:
    page = Page(html([subject(judge(data))]))
    assert page.headings == ["report.json", *headings.split(", ")]
    text = " ".join(page.words)
    for each in words:
        assert each in text
    assert not page.active


def test_hostile_text_is_shown_and_does_nothing() -> None:
    evil = f"</title></svg><script>alert(1)</script>\" onload='x' {HOSTILE}"
    document = reports.throughput()
    for arm in document["arms"]:
        for sample in arm["samples"]:
            sample["path"] = evil
    document["arms"][1]["name"] = document["environment"]["chip"] = evil
    document["configuration"][evil] = evil
    request = judged(Status.REJECTED, evil, (Violation(code="SCHEMA", message=evil, file=evil),))
    judgement = judge(dump(document))
    page = html([replace(subject(judgement, evil), judged=replace(request, judgements={evil: judgement}))])
    assert not Page(page).active
    assert "&lt;script&gt;" in page
    assert not set("\x1b\u202e") & set(page)
    text = markdown([subject(judgement, evil)], [evil])
    assert not set("<>@\x1b\u202e") & set(text)


def test_a_page_over_its_limit_leaves_rows_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = html([subject(judge(dump(reports.throughput())))])
    assert "are shown" not in whole
    monkeypatch.setattr(report, "MOST_BYTES", len(whole) - 1)
    monkeypatch.setattr(report, "_LIMITS", ((300, 8, 1000), (5, 8, 1000)))
    small = html([subject(judge(dump(reports.throughput())))])
    assert "5 of 16 rows are shown, to keep this page small" in small


@pytest.mark.exhaustive
def test_the_largest_results_fit_a_page() -> None:
    """Thirty reports of 32 arms with long names, each with many samples."""
    judgement = judge(dump(reports.throughput()))
    assert judgement.report is not None
    arm, name = judgement.report.arms[1], '"' * 400
    samples = arm.samples * 10
    arms = tuple(
        arm.model_copy(update={"name": f"{number}{name}", "samples": samples}) for number in range(32)
    )
    figures = judgement.figures
    assert figures is not None
    large = replace(
        judgement,
        report=Report.model_construct(**{**dict(judgement.report), "arms": arms, "claims": ()}),
        figures=figures.model_copy(
            update={"arms": {each.name: figures.arms["speculative"] for each in arms}}
        ),
        violations=tuple(Violation(code="SCHEMA", message=name * 5) for _ in range(100)),
    )
    page = html([ReportSubject("file", {f"{number}.json": large for number in range(30)}) for _ in range(2)])
    assert len(page.encode()) <= 2_000_000
    assert "more reports of this result are not shown" in page


def test_several_are_compared_side_by_side() -> None:
    both = [subject(judge(dump(each())), each.__name__) for each in (reports.throughput, reports.kv)]
    page = Page(html(both, ["FASTER  a against b"]))
    assert page.headings[0] == "Comparison"
    assert "FASTER a against b" in page.words
    text = markdown(both, ["FASTER  a against b"])
    assert text.startswith("## Comparison\n\n| what | throughput | kv |")
    assert "FASTER a against b" in text


def test_a_request_shows_the_records_of_a_replay_of_reports_judged_in_the_job_and_its_key() -> None:
    request = full_request()
    page = Page(html([ReportSubject(reports.NONCE, request.judgements, request)]))
    text = " ".join(page.words)
    assert {"Verification", "Judged in the job", "Gate"} <= set(page.headings)
    for each in ("Replayed rows", "tokens checked", "plain/", "REJECTED", "SPEEDUP", "Ed25519 AAAAkey"):
        assert each in text, each
    assert not page.active


def test_a_request_says_what_ran_and_markdown_is_cut_to_the_limit_of_a_comment() -> None:
    request = replace(judged(), judgements={"report.json": judge(dump(reports.throughput()))})
    one = ReportSubject(reports.NONCE, request.judgements, request)
    page = " ".join(Page(html([one])).words)
    assert "installed on the Mac; the commit was not measured" in page
    assert request.believed.result.request_commit in page
    text = shortened(markdown([one]), 600)
    assert text.startswith("## ✅ PASSED throughput")
    assert len(text) <= 600
    assert "cut here" in text
