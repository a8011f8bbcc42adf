"""A result and a heartbeat read back from the bus are of our schema, or a ResultError."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import ResultError
from bridge.result import EXIT_CODES, Status, parse_result, parse_status

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


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../b", "a//b", "a\\b", ".git/config", "-o", "a/.", "a b", "a\n", ""]
)
def test_a_file_outside_the_results_folder_cannot_be_named(path: str):
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
    ],
)
def test_anything_outside_the_closed_sets_is_refused(changes: dict[str, Any]):
    with pytest.raises(ResultError):
        parse_result(json.dumps({**RESULT, **changes}).encode())


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_without_another_exception(data: bytes):
    for parser in (parse_result, parse_status):
        with pytest.raises(ResultError):
            parser(data)


def test_every_status_has_an_exit_code():
    assert set(EXIT_CODES) == set(Status)
    assert [
        EXIT_CODES[Status(s)] for s in ("passed", "failed", "refused", "rejected", "cancelled", "lost")
    ] == [*(0, 1, 2, 3, 5, 5)]
