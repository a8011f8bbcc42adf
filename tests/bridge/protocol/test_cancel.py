"""A cancel request survives its bytes, and any other form is refused."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime

import pytest

from bridge.errors import ManifestError
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_CANCEL_BYTES, CancelRequest, new_cancel, parse_cancel


def one() -> CancelRequest:
    nonce = refs.new_nonce(datetime.now(UTC), secrets.token_bytes(6))
    return new_cancel(nonce, "a" * 40, requested_by="me", reason="because")


def test_cancel_request_survives_its_bytes() -> None:
    cancel = one()
    assert parse_cancel(cancel.to_bytes()) == cancel
    assert parse_cancel(new_cancel(cancel.nonce, "b" * 64).to_bytes()).reason is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"because"', b'"\\u001b[2J"', "not allowed in a text"),
        (b'"because"', b'"\\u202eevil"', "not allowed in a text"),
        (b'"because"', b'"' + b"x" * 501 + b'"', "at most 500"),
        (b'"because"', b"1", "string"),
        (b'"schema_version": 1', b'"schema_version": 2', "schema_version"),
        (b'"schema_version": 1', b'"schema_version": true', "schema_version"),
        (b'"me"', b'"me", "me2": 1', "me2"),
        (b'"me"', b'"me", "reason": "twice"', "twice"),
        (b'"' + b"a" * 40, b'"' + b"A" * 40, "request_commit"),
        (b"Z", b"", "time"),
        (b"{", b"[", "JSON"),
        (b"}", b"}" + b" " * MAX_CANCEL_BYTES, "at most"),
    ],
)
def test_cancel_request_of_the_wrong_form_is_refused(old: bytes, new: bytes, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        parse_cancel(one().to_bytes().replace(old, new, 1))


def test_reason_is_brought_onto_one_line_and_not_cut() -> None:
    cancel = one()
    assert new_cancel(cancel.nonce, "a" * 40, reason="one\ntwo\x1b[31m").reason == "one two"
    with pytest.raises(ManifestError, match="reason"):
        new_cancel(cancel.nonce, "a" * 40, reason="x" * 501)
