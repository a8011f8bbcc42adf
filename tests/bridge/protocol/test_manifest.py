"""A manifest is accepted whole or refused with one ManifestError; hostile bytes never get further."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bridge.errors import ManifestError
from bridge.protocol.manifest import Manifest, format_time, parse, parse_time

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


def document(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "schema_version": 1,
        "nonce": "20260301t120000z0123456789ab",
        "preset": "throughput",
        "params": {"limit": 4, "prompts": "code"},
        "workload_sha": "a" * 40,
        "result_ref": "refs/heads/mac-bridge/throughput-20260301t120000z0123456789ab",
        "transport": "embedded",
        "requested_by": "ann",
        "created_at": "2026-03-01T12:00:00Z",
        "expires_at": "2026-03-02T12:00:00Z",
        "audience": "example.org/team/repo",
    }
    return {**fields, **changes}


def encoded(**changes: Any) -> bytes:
    return json.dumps(document(**changes)).encode()


def test_what_is_written_is_what_is_read():
    manifest = parse(encoded())
    assert parse(manifest.to_bytes()) == manifest
    assert manifest.expires_at - manifest.created_at == timedelta(days=1)


REFUSED: dict[str, dict[str, Any]] = {
    "unknown key": {"argv": ["sh"]},
    "later schema": {"schema_version": 2},
    "nonce of another form": {"nonce": "../../etc/passwd"},
    "nonce with a line break": {"nonce": "20260301t120000z0123456789ab\n"},
    "preset that is an option": {"preset": "--help"},
    "preset in capitals": {"preset": "Throughput"},
    "short commit": {"workload_sha": "abc"},
    "ref outside heads": {"result_ref": "refs/tags/v1"},
    "ref that starts like an option": {"result_ref": "refs/heads/-x"},
    "unknown transport": {"transport": "carrier-pigeon"},
    "number as text": {"timeout_s": "60"},
    "boolean as number": {"timeout_s": True},
    "timeout of zero": {"timeout_s": 0},
    "timeout of a week": {"timeout_s": 7 * 86_400},
    "expires before it is made": {"expires_at": "2026-02-01T12:00:00Z"},
    "local time": {"created_at": "2026-03-01T12:00:00+02:00"},
    "time without zone": {"created_at": "2026-03-01T12:00:00"},
    "time as a number": {"created_at": 1772366400, "expires_at": 1772452800},
    "time as a fraction": {"expires_at": 1772452800.5},
    "time with an offset of zero": {"created_at": "2026-03-01T12:00:00+00:00"},
    "time with a fraction": {"created_at": "2026-03-01T12:00:00.5Z"},
    "time with a line break": {"created_at": "2026-03-01T12:00:00Z\n"},
    "time in other digits": {"created_at": "\uff12026-03-01T12:00:00Z"},
    "time that does not exist": {"created_at": "2026-02-30T12:00:00Z"},
    "nonce of the year one": {"nonce": "00010101t000000z0123456789ab"},
    "nonce of two days before": {"nonce": "20260227t115959z0123456789ab"},
    "nonce of the far future": {"nonce": "99991231t235959z0123456789ab"},
    "nonce of the month thirteen": {"nonce": "20261301t120000z0123456789ab"},
    "request of the year one that never expires": {
        "nonce": "00010101t000000z0123456789ab",
        "created_at": "0001-01-01T00:00:00Z",
        "expires_at": "9999-01-01T00:00:00Z",
    },
    "escape sequence": {"requested_by": "\x1b[31mroot"},
    "bidirectional override": {"requested_by": "abc\u202edef"},
    "NUL in a parameter": {"params": {"path": "tests/\0"}},
    "nested parameter": {"params": {"path": {"a": 1}}},
    "parameter name with a dash": {"params": {"--path": "x"}},
    "list parameter": {"params": {"path": ["a"]}},
    "too many parameters": {"params": {f"p{i}": i for i in range(65)}},
    "endless audience": {"audience": "x" * 1001},
    "no audience": {"audience": ""},
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_manifest_with_one_fault_is_refused(case: str):
    with pytest.raises(ManifestError) as refused:
        parse(encoded(**REFUSED[case]))
    assert "manifest" in refused.value.message
    assert "\x1b" not in refused.value.message


def test_every_field_is_needed_or_has_a_default():
    needed = ("nonce", "preset", "workload_sha", "result_ref", "created_at", "expires_at", "audience")
    for key in needed:
        fields = document()
        del fields[key]
        with pytest.raises(ManifestError, match=key):
            parse(json.dumps(fields).encode())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(document())), JSON)
def test_any_value_is_accepted_as_it_is_or_refused(key: str, value: Any):
    try:
        manifest = parse(encoded(**{key: value}))
    except ManifestError:
        return
    assert parse(manifest.to_bytes()) == manifest
    assert not any(ord(c) < 32 for c in manifest.requested_by + manifest.audience + manifest.preset)


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999", b"1" + b"0" * 400 + b".0"])
def test_bytes_with_a_number_that_json_has_not_are_refused(number: bytes):
    with pytest.raises(ManifestError, match=r"params\.limit"):
        parse(encoded().replace(b'"limit": 4', b'"limit": ' + number))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_number_that_json_has_not_is_refused(value: float):
    fields = {**document(), "params": {"limit": value}}
    with pytest.raises(ValidationError):
        Manifest.model_validate(fields)


@given(st.datetimes(timezones=st.just(UTC)).map(lambda moment: moment.replace(microsecond=0)))
def test_time_survives_its_text(moment: datetime):
    assert parse_time(format_time(moment)) == moment


HOSTILE_TEXT = "\x1b]0;owned\x07\u202e\nrefused by no one " + "x" * 500
HOSTILE: dict[str, bytes] = {
    "an unknown key": encoded(**{HOSTILE_TEXT: 1}),
    "a key with half a surrogate": encoded(**{"\ud800": 1}),
    "a key that appears twice": b"{" + 2 * (json.dumps(HOSTILE_TEXT).encode() + b": 1,") + b'"a": 1}',
    "a parameter's name": encoded(params={HOSTILE_TEXT: 1}),
    "a parameter's value": encoded(params={"path": {HOSTILE_TEXT: 1}}),
    "a value": encoded(preset=HOSTILE_TEXT),
    "a time": encoded(created_at=HOSTILE_TEXT),
    "a number": b'{"a": 1' + b"0" * 5000 + b".0}",
    "bytes that are no JSON": HOSTILE_TEXT.encode(),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_of_a_hostile_manifest_reaches_a_message_unquoted(case: str):
    with pytest.raises(ManifestError) as refused:
        parse(HOSTILE[case])
    message = refused.value.message
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 500


def message_of(data: bytes) -> str:
    """Why these bytes are refused; nothing when they are a manifest."""
    try:
        parse(data)
    except ManifestError as refused:
        return refused.message
    return ""


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_text_can_drive_a_terminal_from_a_message(key: str, text: str):
    for changes in ({key: text}, {"params": {key: text}}, {"preset": text}, {"requested_by": text}):
        message = message_of(encoded(**changes))
        assert message.isascii()
        assert message.isprintable()
