"""A result and a heartbeat read back from the bus are of our schema, or a ResultError."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import ResultError
from bridge.protocol.result import EXIT_CODES, REASONS, Reason, Result, Status, parse_result, parse_status

RESULT: dict[str, Any] = {
    "schema_version": 1,
    "nonce": "20260301t120000z0123456789ab",
    "request_commit": "a" * 40,
    "workload_sha": "b" * 40,
    "preset": "probe",
    "preset_digest": "c" * 64,
    "engine_source": "installed",
    "runner": {"name": "studio", "id": "0" * 16, "version": "0.1.0"},
    "attempt": 1,
    "started_at": "2026-03-01T12:00:00Z",
    "finished_at": "2026-03-01T12:00:09Z",
    "files": [{"path": "report.json", "sha256": "d" * 64, "bytes": 2, "role": "evidence"}],
    "verdict": {"status": "passed", "reason": "ok"},
}


def test_what_is_written_is_what_is_read():
    result = parse_result(json.dumps(RESULT).encode())
    assert parse_result(result.to_bytes()) == result


def test_every_reason_says_when_and_what_to_do():
    assert set(REASONS) == set(Reason)
    silent = {reason for reason, meaning in REASONS.items() if not meaning.when or not meaning.remedy}
    assert silent == {Reason.OK, Reason.LEASE_LOST}


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../b", "a//b", "a\\b", ".git/config", "-o", "a/.", "a b", "a\n", ""]
)
def test_file_outside_the_results_folder_cannot_be_named(path: str):
    files = [{"path": path, "sha256": "d" * 64, "bytes": 2, "role": "log"}]
    with pytest.raises(ResultError):
        parse_result(json.dumps({**RESULT, "files": files}).encode())


@pytest.mark.parametrize(
    "changes",
    [
        {"verdict": {"status": "splendid", "reason": "ok"}},
        {"verdict": {"status": "passed", "reason": "because"}},
        {"attempt": 0},
        {"nonce": "x"},
        {"surprise": 1},
        {"runner": {"name": "a b", "id": "0" * 16, "version": "1"}},
        {"preset": "Probe"},
        {"preset": "probe  20260301\n  ran on   studio (1.0 s), signed by studio"},
        {"preset": "--help"},
        {"started_at": "yesterday"},
        {"finished_at": "2026-02-30T12:00:00Z"},
        {"finished_at": 1772366400},
    ],
)
def test_anything_outside_the_closed_sets_is_refused(changes: dict[str, Any]):
    with pytest.raises(ResultError):
        parse_result(json.dumps({**RESULT, **changes}).encode())


def test_a_request_whose_preset_could_not_be_read_has_none():
    assert parse_result(json.dumps({**RESULT, "preset": None}).encode()).preset is None


UNSAFE = {"line break": "a\nb", "escape": "\x1b[2Ja", "bidirectional": "a\u202eb", "surrogate": "a\ud800"}


@pytest.mark.parametrize("text", UNSAFE.values(), ids=UNSAFE.keys())
@pytest.mark.parametrize(
    "place",
    [
        lambda text: {"verdict": {"status": "failed", "reason": "timeout", "message": text}},
        lambda text: {
            "verdict": {
                "status": "rejected",
                "reason": "evidence",
                "violations": [{"code": "SCHEMA", "message": "m", "file": text}],
            }
        },
        lambda text: {"params": {"argv": text}},
        lambda text: {"tools": {text: "1"}},
        lambda text: {"runner": {**RESULT["runner"], "machine": {"chip": text}}},
    ],
    ids=["message", "violation", "parameter", "key", "machine"],
)
def test_text_that_could_drive_a_terminal_is_refused(place: Callable[[str], dict[str, Any]], text: str):
    with pytest.raises(ResultError, match=r"U\+"):
        parse_result(json.dumps({**RESULT, **place(text)}).encode())


@given(st.text(max_size=200), st.text(max_size=50).filter(lambda text: text.isprintable() or "\n" in text))
def test_result_of_any_text_can_be_read_back(text: str, word: str):
    """A message may quote a job or a server; the argv is the record of what ran and stays unchanged."""
    fields = json.loads(json.dumps(RESULT))
    fields["verdict"] = {
        "status": "rejected",
        "reason": "evidence",
        "message": text,
        "violations": [{"code": "SCHEMA", "message": text, "file": text}],
    }
    fields["tools"] = {"git": text}
    fields["commands"] = [{"argv": [word], "exit_code": 0, "seconds": 1.0, "log": "log.txt"}]
    written = Result.model_validate(fields)
    read = parse_result(written.to_bytes())
    assert read.commands == written.commands
    assert read.to_bytes() == written.to_bytes()
    assert "\n" not in read.verdict.message


@pytest.mark.parametrize("field", [b'"attempt": 1', b'"started_at": "2026-03-01T12:00:00Z"'])
def test_a_number_that_no_float_holds_is_refused(field: bytes):
    data = json.dumps(RESULT).encode()
    with pytest.raises(ResultError, match="finite"):
        parse_result(data.replace(field, field + b', "phase_seconds": {"running": 1e999}'))


def test_a_hostile_key_is_quoted_in_the_message():
    for parser in (parse_result, parse_status):
        with pytest.raises(ResultError) as refused:
            parser(json.dumps({**RESULT, "\x1b[2J" * 200: 1}).encode())
        assert refused.value.message.isprintable()
        assert len(refused.value.message) < 300


def test_every_status_has_an_exit_code():
    assert set(EXIT_CODES) == set(Status)
    assert [
        EXIT_CODES[Status(s)] for s in ("passed", "failed", "refused", "rejected", "cancelled", "lost")
    ] == [*(0, 1, 8, 3, 5, 5)]
