"""A job's report is accepted only as a plain file that passes the gate."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.runner.workspace import ReportUnusable, read_report
from tests.bridge.evidence import reports
from tests.fixtures.runner import RunnerFixture


def evidence_preset(runner: RunnerFixture, program: str) -> None:
    script = runner.repo.root / "reporter.py"
    script.write_text("import os, sys\nout = sys.argv[1].partition('=')[2]\n" + program)
    argv = ["${python}", "-I", str(script), "--report=${out:report}"]
    runner.preset("reporter", argv, tail='[evidence]\nkind = "probe"\n')


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        ("", "failed", "no_evidence"),
        ("open(out, 'w').write('{}')", "rejected", "evidence"),
        ("os.symlink('/etc/passwd', out)", "failed", "no_evidence"),
        ("os.mkdir(out)", "failed", "no_evidence"),
        ("f = os.path.dirname(out); os.rmdir(f); os.symlink('/etc', f)", "failed", "no_evidence"),
        ("f = os.path.dirname(out); os.rmdir(f); open(f, 'w')", "failed", "no_evidence"),
        ("os.mkfifo(out)", "failed", "no_evidence"),
        ("open('x', 'w').write('{}'); os.link('x', out)", "failed", "no_evidence"),
        ("open(out, 'w').write('{}'); sys.exit(1)", "failed", "exit_code"),
        ("open(out, 'wb').truncate(33 << 20)", "failed", "no_evidence"),
        ("open(out, 'w').write('correct horse battery')", "rejected", "evidence"),
    ],
)
def test_only_a_plain_report_that_the_gate_accepts_counts(
    runner: RunnerFixture, program: str, status: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "correct horse battery")
    evidence_preset(runner, program)
    asked = runner.ask("reporter")
    runner.serve_once()
    assert runner.verdict(asked.nonce) == (status, reason)
    codes = {violation.code for violation in runner.answer(asked.nonce).result.verdict.violations}
    assert codes == ({"SECRET_IN_EVIDENCE"} if "battery" in program else codes - {"SECRET_IN_EVIDENCE"})
    published = runner.answer(asked.nonce).files.get("report.json", b"")
    assert b"root:" not in published
    assert b"battery" not in published


def job_folder_elsewhere(folder: Path) -> None:
    folder.rename(folder.parent / "other")
    folder.symlink_to("other")


def result_folder_elsewhere(folder: Path) -> None:
    (folder / "out").rename(folder.parent / "out")
    (folder / "out").symlink_to(folder.parent / "out")


def report_elsewhere(folder: Path) -> None:
    (folder / "out" / "report.json").rename(folder.parent / "report.json")
    (folder / "out" / "report.json").symlink_to(folder.parent / "report.json")


@pytest.mark.parametrize("replace", [job_folder_elsewhere, result_folder_elsewhere, report_elsewhere])
def test_no_part_of_a_reports_path_may_be_a_link(tmp_path: Path, replace: Callable[[Path], None]) -> None:
    folder = tmp_path / "jobs" / "20260301t120000z0123456789ab"
    (folder / "out").mkdir(parents=True)
    (folder / "out" / "report.json").write_bytes(b"{}")
    assert read_report(folder / "out", "report.json") == b"{}"
    replace(folder)
    with pytest.raises(ReportUnusable, match=r"the report report\.json cannot be opened"):
        read_report(folder / "out", "report.json")


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize(("edit", "expected"), [(1.0, ("passed", "ok")), (1.5, ("rejected", "evidence"))])
def test_the_gate_preset_ends_as_the_gate_decides(
    runner: RunnerFixture, edit: float, expected: tuple[str, str]
) -> None:
    report = reports.throughput()
    report["summary"]["comparisons"][0]["decode_ratio"] *= edit
    runner.commit({"report.json": reports.dump(report).decode()})
    asked = runner.ask("gate", params={"file": "report.json"})
    assert runner.serve_once() == 1
    assert runner.verdict(asked.nonce) == expected
    assert ("SUMMARY_MISMATCH" in runner.log(asked.nonce)) == (edit != 1.0)
