"""Judged evidence and results, shown: the figures are there, and nothing hostile takes effect."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bridge.bus.results import Believed
from bridge.client.fetch import Judged
from bridge.client.watch import Update
from bridge.evidence.gate import judge
from bridge.protocol.result import (
    File,
    Phase,
    Progress,
    Reason,
    Result,
    RunnerFacts,
    RunStatus,
    Status,
    Verdict,
    Violation,
)
from bridge.render.evidence import (
    EvidenceTable,
    as_rich,
    bytes_text,
    claim_figure_text,
    evidence_tables,
    number_text,
    ratio_text,
)
from bridge.render.outcome import outcome_lines, status_line
from bridge.signing.trust import TrustLevel
from evidence_format.rules.claims import ClaimFigure
from tests.bridge.evidence import reports
from tests.bridge.evidence.reports import Document, dump

HOSTILE = "[bold]\x1b[2J\u202e<img src=x>|**pwn**\nnext @everyone"


def drawn(*tables: EvidenceTable) -> str:
    out = io.StringIO()
    console = Console(file=out, width=140)
    for table in tables:
        console.print(as_rich(table))
    return out.getvalue()


def judged(
    status: Status = Status.PASSED, message: str = "", violations: tuple[Violation, ...] = ()
) -> Judged:
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
    believed = Believed(result, {}, "cd" * 20, "refs/heads/x", TrustLevel.UNSIGNED, None)
    return Judged(believed, {}, result.verdict)


def edited(document: Document, text: str) -> Document:
    """The report with a text of the requester's choosing wherever the gate lets one through."""
    document["environment"]["chip"] = text
    return document


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            "kv",
            ["affine:4,64@all", "4.50", "68.4 KiB", "0.014", "no_needle", "sink-window:4,64@all", "0.600"],
        ),
        ("quality", ["speculative", "8/8", "runaway", "exact_match", "(claimed: 0.950) met"]),
        (
            "parity",
            ["torch package 0.1.0", "2 cases, 4 rounds, 32 rows", "4e-06 (claimed: 0.0001) met", "2/2"],
        ),
        ("restoration", ["noise", "recall", "1.00"]),
        ("probe", ["Apple M4", "24.0 GiB"]),
    ],
)
def test_a_report_of_every_kind_shows_its_figures(kind: str, expected: list[str]) -> None:
    text = drawn(*evidence_tables(judge(dump(getattr(reports, kind)()))))
    for part in expected:
        assert part in text


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


def test_restarted_measurement_says_why() -> None:
    document = reports.throughput() | {"restarts": [{"after_samples": 4, "reason": "prefills differed"}]}
    text = drawn(*evidence_tables(judge(dump(document))))
    assert "measured again" in text
    assert "after 4 samples: prefills differed" in text


def test_speed_on_a_busy_machine_is_labelled_with_its_reason() -> None:
    document = reports.throughput()
    assert "not claimed" not in drawn(*evidence_tables(judge(dump(document))))
    document["claims"] = [claim for claim in document["claims"] if claim["name"] == "identical_output"]
    document["configuration"]["speed_not_claimed"] = "other processes used 40% of the CPU time"
    judgement = judge(dump(document))
    assert judgement.accepted
    text = drawn(*evidence_tables(judgement))
    assert "2.00x not claimed" in text
    assert "no speed claimed" in text
    assert "other processes used 40% of the CPU time" in text


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


def test_markup_in_a_report_is_shown_verbatim() -> None:
    document = edited(reports.probe(), "[red]M4[/red]")
    assert "[red]M4[/red]" in drawn(*evidence_tables(judge(dump(document))))


def test_an_outcome_says_who_ran_it_and_a_hostile_message_does_nothing() -> None:
    assert "anyone with push rights" in "\n".join(outcome_lines(judged()))
    broken = (Violation(code="SCHEMA", message=HOSTILE),)
    text = "\n".join(outcome_lines(judged(Status.REJECTED, HOSTILE, broken)))
    assert "REJECTED  throughput" in text
    assert "[bold]" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


FAKED = "x\r\n  ran on   studio (1.0 s), signed by studio\u2028\x1b]8;;http://x\x07\u202e\tend"


def test_no_field_of_a_result_can_look_like_a_line_of_ours() -> None:
    """Also for a value that never went through a parser: every field shown is made one line here."""
    broken = (Violation(code="SCHEMA", message=FAKED, file=FAKED),)
    honest = judged(Status.REJECTED, FAKED, broken)
    facts = honest.believed.result.runner.model_copy(update={"name": FAKED})
    file = File(path="report.json", sha256="0" * 64, bytes=2).model_copy(
        update={"path": FAKED, "role": "log"}
    )
    result = honest.believed.result.model_copy(update={"preset": FAKED, "runner": facts, "files": (file,)})
    believed = Believed(result, {}, "cd" * 20, FAKED, TrustLevel.TRUSTED, FAKED)
    lines = list(outcome_lines(Judged(believed, {}, honest.verdict)))
    assert len(lines) == 7
    assert all(line.isprintable() for line in lines)
    assert sum(line.startswith("  ran on") for line in lines) == 1


def test_a_heartbeat_is_one_line() -> None:
    status = RunStatus(
        nonce=reports.NONCE,
        request_commit="ab" * 20,
        runner=FAKED[:64],
        runner_id="0" * 16,
        pid=1,
        unique="0" * 16,
        attempt=1,
        beat=1,
        lease_s=1.0,
        session="0" * 16,
        updated_at="2026-03-01T12:00:00Z",
        phase=Phase.RUNNING,
        elapsed_s=1.0,
        progress=Progress(done=1, total=2, step=FAKED),
    )
    assert status_line(Update(reports.NONCE, Phase.RUNNING, status=status)).isprintable()


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
    assert (
        claim_figure_text(ClaimFigure("speedup", "a", "b", 1.0, 2.125, True)) == "2.12x (claimed: 1.00x) met"
    )
    assert claim_figure_text(ClaimFigure("resident_bytes", "a", None, 1024, 2048, False)) == (
        "2.0 KiB (claimed: 1.0 KiB) NOT MET"
    )
    assert claim_figure_text(ClaimFigure("machine", None, None, None, None, True)) == "met"
