"""A journal keeps finished rows and returns them to the same run only, which the fingerprint identifies."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigurationError, EngineError
from engine.evaluation.journal import Entry, Fingerprint, Journal, boot_session, fingerprint
from engine.evaluation.prompts import Needle, raw_prompt
from evidence_format.model import ReportRequest

MARKS = {"max_tokens": 16, "prompts": "a" * 64, "kv": "native"}


def row(number: int) -> dict[str, Any]:
    return {"prompt_id": f"p-{number}", "decode_s": 0.1 + 0.2 * number, "text": "grün\n\u2028"}


def filled(path: Path, rows: int) -> Journal:
    journal = Journal(path).open(MARKS)
    for number in range(rows):
        journal.add(Entry("plain", [row(number)]))
    journal.close()
    return journal


def test_finished_rows_are_read_back_unchanged(tmp_path: Path):
    first = filled(tmp_path / "new" / "j.jsonl", 3)
    again = Journal(first.path).open(MARKS)
    assert again.kept == [Entry("plain", [row(number)]) for number in range(3)]
    assert again.started.isoformat() == first.started.isoformat()
    again.add(Entry("plain", [row(3)]))
    again.close()
    assert len(Journal(first.path).open(MARKS).kept) == 4


@pytest.mark.parametrize("lost", range(1, 200, 7))
def test_an_unfinished_line_is_dropped(tmp_path: Path, lost: int):
    path = filled(tmp_path / "j.jsonl", 3).path
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(path.read_bytes()[: -min(lost, len(lines[-1]))])
    journal = Journal(path).open(MARKS)
    assert len(journal.kept) == 2
    journal.add(Entry("plain", [row(2)]))
    journal.close()
    assert path.read_bytes() == b"".join(lines)


@pytest.mark.parametrize("length", [81, 120, 200])
def test_an_unfinished_first_line_starts_over(tmp_path: Path, length: int):
    path = filled(tmp_path / "j.jsonl", 1).path
    path.write_bytes(path.read_bytes()[:length])
    assert Journal(path).open(MARKS).kept == []


NO_JOURNALS = {
    "a note": b"remember the milk",
    "a digest": b"0" * 64,
    "lines": b"one\ntwo\nthree",
    "prompts": b'{"id": "p-1", "prompt": "x"}\n{"id": "p-2", "prompt": "y"}\n',
    "an empty line": b"\n",
    "no text": bytes(range(256)),
    "another digest": b"0" * 64 + b' {"fingerprint":{}}\n',
}


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", NO_JOURNALS)
def test_a_file_that_is_no_journal_is_refused_unchanged(tmp_path: Path, name: str, resume: bool):
    path = tmp_path / "notes.txt"
    path.write_bytes(NO_JOURNALS[name])
    with pytest.raises(ConfigurationError, match=r"is no journal.*delete it, or give --journal another FILE"):
        Journal(path, resume=resume).open(MARKS)
    assert path.read_bytes() == NO_JOURNALS[name]


def test_what_is_no_plain_file_is_refused():
    with pytest.raises(ConfigurationError, match="no plain file"):
        Journal(Path(os.devnull)).open(MARKS)


@pytest.mark.parametrize("marks", ["the same", "others"])
def test_a_refused_journal_keeps_its_unfinished_line(tmp_path: Path, marks: str):
    path = filled(tmp_path / "j.jsonl", 3).path
    data = path.read_bytes()[:-5]
    if marks == "the same":
        data = data.replace(b"p-1", b"p-7")
    path.write_bytes(data)
    with pytest.raises(ConfigurationError, match="damaged in line 3" if marks == "the same" else "seed was"):
        Journal(path).open(MARKS if marks == "the same" else MARKS | {"seed": 3})
    assert path.read_bytes() == data
    assert Journal(path, resume=False).open(MARKS).kept == []


@pytest.mark.parametrize("how", ["remove", "close"])
def test_another_file_under_the_journals_name_stays(tmp_path: Path, how: str):
    journal = Journal(tmp_path / "j.jsonl").open(MARKS)
    (tmp_path / "report").write_text("a report")
    (tmp_path / "report").replace(journal.path)
    getattr(journal, how)()
    assert journal.path.read_text() == "a report"


def test_abandoned_rows_are_not_resumed(tmp_path: Path):
    journal = Journal(tmp_path / "j.jsonl").open(MARKS)
    journal.add(Entry("plain", [row(0)]))
    journal.restart({"after_samples": 1, "reason": "busy"})
    journal.add(Entry("plain", [row(1)]))
    journal.close()
    again = Journal(journal.path).open(MARKS)
    assert [entry.rows for entry in again.kept] == [[row(1)]]
    assert again.restarts == [{"after_samples": 1, "reason": "busy"}]


def test_another_run_is_refused_with_the_differences(tmp_path: Path):
    path = filled(tmp_path / "j.jsonl", 1).path
    before = path.read_bytes()
    with pytest.raises(
        ConfigurationError, match=r"kv was native, is e8; max_tokens was 16, is 32\).*--no-resume"
    ):
        Journal(path).open(MARKS | {"max_tokens": 32, "kv": "e8"})
    with pytest.raises(ConfigurationError, match="seed was nothing, is 3"):
        Journal(path).open(MARKS | {"seed": 3})
    assert path.read_bytes() == before
    assert Journal(path, resume=False).open(MARKS | {"max_tokens": 32}).kept == []


@pytest.mark.parametrize("line", [0, 1, 2])
def test_an_edited_journal_is_refused(tmp_path: Path, line: int):
    path = filled(tmp_path / "j.jsonl", 3).path
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b"0", b"1") if line else lines[line].replace(b"16", b"61")
    path.write_bytes(b"".join(lines))
    with pytest.raises(ConfigurationError, match=f"damaged in line {line + 1}"):
        Journal(path).open(MARKS)


def test_a_removed_line_is_noticed(tmp_path: Path):
    path = filled(tmp_path / "j.jsonl", 3).path
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    with pytest.raises(ConfigurationError, match="damaged in line 3"):
        Journal(path).open(MARKS)


def test_two_processes_do_not_share_a_journal(tmp_path: Path):
    journal = Journal(tmp_path / "j.jsonl").open(MARKS)
    with pytest.raises(ConfigurationError, match="another process"):
        Journal(journal.path).open(MARKS)


def test_only_a_journal_with_rows_is_left_behind(tmp_path: Path):
    journal = Journal(tmp_path / "j.jsonl").open(MARKS)
    assert not journal.close()
    assert not journal.path.exists()
    journal = Journal(tmp_path / "j.jsonl").open(MARKS)
    journal.add(Entry("plain", [row(0)]))
    assert journal.close()
    again = Journal(journal.path).open(MARKS)
    assert again.close()
    assert again.path.exists()
    Journal(journal.path).open(MARKS).remove()
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="cannot be opened"):
        Journal(tmp_path / "file" / "j.jsonl").open(MARKS)


def test_unnamed_journals_are_named_by_run_and_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.evaluation.journal.KEPT", 2)
    for number in range(4):
        journal = Journal(None, tmp_path).open(MARKS | {"seed": number})
        journal.add(Entry("plain", [row(number)]))
        journal.close()
        os.utime(journal.path, (number, number))
    assert len(list(tmp_path.iterdir())) == 2
    assert Journal(None, tmp_path).open(MARKS | {"seed": 3}).kept == [Entry("plain", [row(3)])]


def test_every_line_is_json_behind_its_digest(tmp_path: Path):
    path = filled(tmp_path / "j.jsonl", 2).path
    head, *rows = [json.loads(line.partition(b" ")[2]) for line in path.read_bytes().splitlines()]
    assert head["fingerprint"] == MARKS
    assert [entry["rows"][0]["prompt_id"] for entry in rows] == ["p-0", "p-1"]


CARD = {"id": "demo", "weights_sha256": "a" * 64, "dtype": "float32", "quantization": None, "parameters": 5}
ENVIRONMENT: dict[str, Any] = {
    "machine": "x86_64",
    "chip": "A",
    "memory_bytes": 2**30,
    "power_source": "ac",
    "thermal_state": "nominal",
    "swapping": False,
    "versions": {"mlx": "0.32.4"},
    "git": {"sha": "b" * 40, "dirty": None, "source_sha256": "c" * 64},
    "models": {"target": CARD},
}
PROMPTS = [raw_prompt("x", "p-1"), raw_prompt("y", "p-2")]
REQUEST = ReportRequest(
    nonce="20260102t030405z0123456789ab",
    workload_sha="a" * 40,
    preset_digest="b" * 64,
    engine_source="installed",
)


def marks(**changes: Any) -> Fingerprint:
    given = {
        "environment": ENVIRONMENT,
        "configuration": {"max_tokens": 16},
        "prompts": PROMPTS,
        "encoded": [[1], [2]],
        "request": None,
    }
    return fingerprint(**given | changes)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"configuration": {"max_tokens": 17}}, "max_tokens"),
        ({"encoded": [[1], [3]]}, "prompts"),
        ({"prompts": PROMPTS[::-1]}, "prompts"),
        ({"prompts": [PROMPTS[0], replace(PROMPTS[1], needle=Needle("y", "y", 0.5))]}, "prompts"),
        ({"request": REQUEST}, "request nonce"),
        ({"environment": ENVIRONMENT | {"chip": "B"}}, "machine"),
        ({"environment": ENVIRONMENT | {"versions": {"mlx": "0.32.5"}}}, "version of mlx"),
        (
            {"environment": ENVIRONMENT | {"git": {"source_sha256": "d" * 64}}},
            "engine source",
        ),
        (
            {"environment": ENVIRONMENT | {"models": {"target": CARD | {"weights_sha256": "d" * 64}}}},
            "target weights_sha256",
        ),
    ],
)
def test_fingerprint_changes_with_what_rows_depend_on(changes: dict[str, Any], name: str):
    one, other = marks(), marks(**changes)
    assert one.get(name) != other.get(name)


def test_fingerprint_ignores_volatile_conditions():
    later = {"power_source": "battery", "swapping": True, "git": ENVIRONMENT["git"] | {"sha": "e" * 40}}
    assert marks(environment=ENVIRONMENT | later) == marks()


def test_a_reboot_changes_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = marks()
    assert before["boot"] == boot_session()
    (tmp_path / "boot_id").write_text("another\n")
    monkeypatch.setattr("engine.evaluation.journal.BOOT", tmp_path / "boot_id")
    monkeypatch.setattr("sys.platform", "linux")
    assert marks()["boot"] == "another"
    monkeypatch.setattr("engine.evaluation.journal.BOOT", tmp_path / "nowhere")
    assert marks()["boot"] is None
