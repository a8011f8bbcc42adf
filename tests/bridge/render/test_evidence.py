"""Judged evidence and results, shown: the figures stand there, and nothing hostile takes effect."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bridge.bus.results import Believed, Standing
from bridge.evidence.gate import judge
from bridge.evidence.rules.claims import ClaimFigure
from bridge.render.figures import bytes_text, claim_text, number_text, ratio_text
from bridge.render.summary import job_summary, literal
from bridge.render.terminal import evidence_tables, result_panel
from bridge.result import Reason, Result, RunnerFacts, Status, Verdict, Violation
from tests.bridge.evidence import reports
from tests.bridge.evidence.reports import Document, dump

HOSTILE = "[bold]\x1b[2J\u202e<img src=x>|**pwn**\nnext @everyone"


def drawn(*renderables: object, terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=terminal, width=140, color_system="standard" if terminal else None
    )
    for renderable in renderables:
        console.print(renderable)
    return out.getvalue()


def believed(
    status: Status = Status.PASSED, message: str = "", violations: tuple[Violation, ...] = ()
) -> Believed:
    result = Result(
        nonce=reports.NONCE,
        request_commit="ab" * 20,
        workload_sha=reports.WORKLOAD,
        preset="throughput",
        preset_digest="56" * 32,
        engine_source="installed",
        runner=RunnerFacts(name="studio", id="0123456789abcdef", version="0.1.0"),
        attempt=1,
        started_at="2026-03-01T12:00:05Z",
        finished_at="2026-03-01T12:01:05Z",
        verdict=Verdict(status=status, reason=Reason.OK, message=message, violations=violations),
    )
    return Believed(result, {}, "cd" * 20, "refs/heads/x", Standing.UNSIGNED, None)


def edited(document: Document, text: str) -> Document:
    """The report with a text of the requester's choosing wherever the gate lets one through."""
    document["environment"]["chip"] = text
    return document


def test_a_throughput_report_shows_what_the_demo_promises() -> None:
    text = drawn(*evidence_tables(judge(dump(reports.throughput()))))
    for expected in (
        "plain",
        "speculative",
        "2.00x",
        "4.00",
        "8/8",
        "390.7 KiB",
        "accepted",
        "(claimed: 1.50x) met",
    ):
        assert expected in text
    assert "\x1b" not in text


def test_a_recall_report_shows_every_arm_and_a_probe_the_machine() -> None:
    text = drawn(*evidence_tables(judge(dump(reports.recall()))))
    for expected in ("no_needle", "control", "oracle", "1.00", "0.000"):
        assert expected in text
    assert "Apple M4, 10 cores" in drawn(*evidence_tables(judge(dump(reports.probe()))))


def test_a_speed_without_a_fast_blas_comes_with_the_line_that_installs_one() -> None:
    document = reports.throughput()
    assert "apt install" not in drawn(*evidence_tables(judge(dump(document))))
    document["environment"] |= {"system": "Linux", "metal": False, "device": "cpu", "blas": "reference"}
    assert "apt install libopenblas0-pthread" in drawn(*evidence_tables(judge(dump(document))))


def test_a_measurement_begun_again_says_why() -> None:
    document = reports.throughput() | {"restarts": [{"after_samples": 4, "reason": "prefills differed"}]}
    text = drawn(*evidence_tables(judge(dump(document))))
    assert "measured again" in text
    assert "after 4 samples: prefills differed" in text


def test_an_unreadable_report_shows_the_rule_it_breaks() -> None:
    text = drawn(*evidence_tables(judge(b"{}")))
    assert "REJECTED" in text
    assert "LEGACY_SCHEMA" in text


def test_figures_are_the_gates_not_the_reports() -> None:
    document = reports.throughput()
    document["summary"]["comparisons"][0]["decode_ratio"] = 9.99
    text = drawn(*evidence_tables(judge(dump(document))))
    assert "2.00x" in text
    assert "REJECTED" in text
    assert "SUMMARY_MISMATCH" in text


def test_markup_in_a_report_is_shown_as_it_stands() -> None:
    document = edited(reports.probe(), "[red]M4[/red]")
    assert "[red]M4[/red]" in drawn(*evidence_tables(judge(dump(document))))


def test_a_panel_holds_the_outcome_and_the_tables() -> None:
    judgement = judge(dump(reports.throughput()))
    text = drawn(result_panel(believed(), judgement))
    for expected in ("PASSED", "throughput", reports.NONCE, "anyone with push rights", "2.00x"):
        assert expected in text
    assert "2.00x" not in drawn(result_panel(believed(), None))


@pytest.mark.parametrize("terminal", [False, True])
def test_a_hostile_message_does_nothing_on_a_terminal(terminal: bool) -> None:
    broken = (Violation(code="SCHEMA", message=HOSTILE),)
    text = drawn(result_panel(believed(Status.REJECTED, HOSTILE, broken), None), terminal=terminal)
    assert "\x1b[2J" not in text
    assert "\u202e" not in text
    assert "[bold]" in text


def test_a_summary_is_markdown_in_which_only_ours_takes_effect() -> None:
    broken = (Violation(code="SCHEMA", message=HOSTILE),)
    page = job_summary(believed(Status.REJECTED, HOSTILE, broken), judge(dump(reports.throughput())))
    assert page.startswith("## REJECTED: throughput\n")
    assert "| speculative |" in page
    assert "2.00x" in page
    for active in ("<img", "**", "@everyone", "\u202e", "\x1b"):
        assert active not in page
    rows = [line for line in page.splitlines() if line.startswith("| SCHEMA")]
    assert len(rows) == 1
    assert rows[0].count("|") == 3


def test_a_summary_without_evidence_has_no_figures() -> None:
    page = job_summary(believed(), None)
    assert "tok/s" not in page
    assert "rule broken" not in page
    assert "studio" in page


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.95, "0.950"), (3.837, "3.84"), (143.21, "143.2"), (0.0, "0.000")]
)
def test_numbers(value: float | None, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 * 2**20, "3.0 MiB"),
        (24 * 2**30, "24.0 GiB"),
    ],
)
def test_bytes(value: float | None, text: str) -> None:
    assert bytes_text(value) == text


def test_ratios_and_claims() -> None:
    assert ratio_text(None) == "-"
    assert claim_text(ClaimFigure("speedup", "a", "b", 1.0, 2.125, True)) == "2.12x (claimed: 1.00x) met"
    assert claim_text(ClaimFigure("resident_bytes", "a", None, 1024, 2048, False)) == (
        "2.0 KiB (claimed: 1.0 KiB) NOT MET"
    )
    assert claim_text(ClaimFigure("machine", None, None, None, None, True)) == "met"


def test_literal_text_stays_readable() -> None:
    assert literal("plain words, 3.5 tok/s") == "plain words, 3.5 tok/s"
    assert literal("a|b") == "a&#124;b"
