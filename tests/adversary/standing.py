"""Requests that are out of place: too old, too young, for somebody else, or not what they are named."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from bridge.protocol.result import Reason
from tests.adversary.attack import WORKLOAD, Request, Table


def _fields(reason: Reason, age: timedelta = timedelta(0), **fields: Any) -> Request:
    return Request(reason, fields, age=age)


STALE: Table = {
    "expired-an-hour-ago": _fields(Reason.EXPIRED, timedelta(hours=2)),
    "expired-a-month-ago": _fields(Reason.EXPIRED, timedelta(days=30)),
    "expires-before-it-is-made": _fields(Reason.BAD_MANIFEST, expires_at="2020-01-01T00:00:00Z"),
    "never-expires": _fields(Reason.BAD_MANIFEST, expires_at="9999-12-31T23:59:59Z"),
    "made-in-the-year-one": _fields(Reason.BAD_MANIFEST, created_at="0001-01-01T00:00:00Z"),
    "made-another-day-than-its-nonce-says": _fields(
        Reason.BAD_MANIFEST, created_at="2020-01-01T00:00:00Z", expires_at="2020-01-02T00:00:00Z"
    ),
    "local-time": _fields(Reason.BAD_MANIFEST, created_at="2026-03-01T12:00:00+02:00"),
    "for-another-remote": _fields(Reason.WRONG_AUDIENCE, audience="example.org/else/where"),
    "for-a-folder-above": _fields(Reason.WRONG_AUDIENCE, audience="/"),
    "for-anybody": _fields(Reason.WRONG_AUDIENCE, audience="*"),
    "named-by-another-nonce": _fields(Reason.BAD_MANIFEST, nonce="20260301t120000z0123456789ab"),
    "of-another-workload": _fields(Reason.BAD_MANIFEST, workload_sha="8" * 40),
    "of-a-workload-in-capitals": _fields(Reason.BAD_MANIFEST, workload_sha="A" * 40),
    "of-a-shortened-workload": _fields(Reason.BAD_MANIFEST, workload_sha="abcdef1"),
    "of-a-workload-that-is-itself-twice": _fields(Reason.BAD_MANIFEST, workload_sha=WORKLOAD * 2),
    "code-of-the-requester": _fields(Reason.POLICY, preset="tests"),
    "code-of-the-requester-by-another-name": _fields(Reason.POLICY, preset="pytest-path"),
}

_HEAD, _TAIL = b"-----BEGIN SSH SIGNATURE-----\n", b"\n-----END SSH SIGNATURE-----\n"

SIGNATURES: Table = {
    "rubbish": Request(Reason.BAD_SIGNATURE, signature=b"rubbish"),
    "empty": Request(Reason.BAD_SIGNATURE, signature=b""),
    "rubbish-in-a-frame": Request(Reason.BAD_SIGNATURE, signature=_HEAD + b"AAAA" + _TAIL),
    "nothing-in-a-frame": Request(Reason.BAD_SIGNATURE, signature=_HEAD + _TAIL),
    "a-frame-without-end": Request(Reason.BAD_SIGNATURE, signature=_HEAD + b"U1NIU0lH" * 500),
    "a-pgp-signature": Request(Reason.BAD_SIGNATURE, signature=b"-----BEGIN PGP SIGNATURE-----\n\nx\n"),
    "a-private-key": Request(Reason.BAD_SIGNATURE, signature=b"-----BEGIN OPENSSH PRIVATE KEY-----\nx\n"),
    "a-magic-and-lengths-without-end": Request(
        Reason.BAD_SIGNATURE, signature=_HEAD + b"U1NIU0lHAAAAAf////8=" + _TAIL
    ),
    "nul-bytes": Request(Reason.BAD_SIGNATURE, signature=b"\0" * 300),
    "an-option": Request(Reason.BAD_SIGNATURE, signature=b"-Y check-novalidate\n"),
}
