"""``kakeya_mac gate`` over files and folders: what is judged, what is skipped, and the worst decides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bridge.cli.gate import gate
from tests.bridge.cli.calls import call
from tests.bridge.evidence import reports

EARLIER = {"schema_version": 2, "kind": "k3_integrated_niah_acceptance_mac", "config": {}, "results": {}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good report in a subfolder, among JSON of other kinds and files of other types."""
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "good.json").write_bytes(reports.dump(reports.throughput()))
    (tmp_path / "package.json").write_text('{"name": "x"}')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "notes.txt").write_text("kakeya.evidence/1")
    return tmp_path


def test_every_report_in_a_folder_is_judged_and_the_rest_is_counted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = call(gate, capsys, str(folder))
    assert done.code == 0, done.out + done.err
    assert f"{folder / 'deep' / 'er' / 'good.json'}: accepted (throughput)" in done.out
    assert "skipped 2 JSON files that are no evidence reports" in done.out
    document = call(gate, capsys, str(folder), "--json").json
    assert [Path(row["file"]).name for row in document["files"]] == ["good.json"]
    assert [Path(path).name for path in document["skipped"]] == ["list.json", "package.json"]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (json.dumps(EARLIER).encode(), "LEGACY_SCHEMA"),
        (b'{"schema": "kakeya.evidence/0"}', "LEGACY_SCHEMA"),
        (reports.dump(reports.throughput())[:-9], "SCHEMA"),
    ],
    ids=["earlier", "older", "truncated"],
)
def test_one_rejected_report_rejects_the_folder(
    folder: Path, capsys: pytest.CaptureFixture[str], data: bytes, code: str
) -> None:
    (folder / "bad.json").write_bytes(data)
    done = call(gate, capsys, str(folder))
    assert done.code == 3
    assert f"{folder / 'bad.json'}: REJECTED" in done.out
    assert code in done.out
    assert "good.json: accepted" in done.out
    assert ("written by the earlier system" in done.out) == (data[:18] == b'{"schema_version":')


def test_a_folder_without_a_report_is_not_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "package.json").write_text("{}")
    done = call(gate, capsys, str(tmp_path))
    assert done.code == 3
    assert "no evidence report in the folder" in done.err
    assert "(1 other JSON files)" in done.err


def test_a_named_file_is_judged_whatever_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = call(gate, capsys, str(folder / "package.json"), str(folder / "deep"))
    assert done.code == 3
    assert "package.json: REJECTED (not a report)" in done.out


def test_a_threshold_holds_for_each_value_of_its_figure(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    met = call(gate, capsys, str(folder), "--threshold", "ratio>0", "--json")
    assert (met.code, met.json["thresholds"][0]["met"]) == (0, True)
    missed = call(gate, capsys, str(folder), "--threshold", "ratio>0", "--threshold", "ratio>=1000")
    assert (missed.code, "threshold ratio>=1000: NOT MET by" in missed.out) == (1, True)
    unknown = call(gate, capsys, str(folder), "--threshold", "speed>1")
    assert (unknown.code, "no report has this figure; there are acceptance_length" in unknown.out) == (
        1,
        True,
    )
