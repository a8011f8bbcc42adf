"""Hostile manifests and signatures: no strict JSON, too much of it, of another schema, or out of date."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from bridge.protocol.manifest import MAX_BYTES
from bridge.protocol.result import Reason
from tests.adversary.attack import ABSENT, WORKLOAD, Request, Table


def _raw(data: bytes, reason: Reason = Reason.BAD_MANIFEST) -> Request:
    return Request(reason, raw=data)


def _fields(**fields: Any) -> Request:
    return Request(Reason.BAD_MANIFEST, fields)


def _swap(old: bytes, new: bytes) -> Request:
    return Request(Reason.BAD_MANIFEST, swap=((old, new),))


def _params(preset: str, text: bytes, reason: Reason = Reason.BAD_PARAMETER) -> Request:
    """Parameters in the very bytes of the JSON."""
    return Request(reason, {"preset": preset, "params": {"X": 1}}, swap=((b'{"X": 1}', text),))


DUPLICATES: Table = {
    "preset-twice": _swap(b'"preset": "echo"', b'"preset": "probe", "preset": "echo"'),
    "preset-twice-and-escaped": _swap(b'"preset": "echo"', b'"preset": "echo", "pr\\u0065set": "probe"'),
    "nonce-twice": _swap(b"{", b'{"nonce": "20260301t120000z0123456789ab", '),
    "the-same-value-twice": _swap(b"{", b'{"schema_version": 1, '),
    "parameters-twice": _swap(b"{", b'{"params": {}, "params": {"word": "x"}, '),
    "parameter-twice": _params("echo", b'{"word": "x", "word": "--help"}', Reason.BAD_MANIFEST),
    "an-unknown-key-twice": _swap(b"{", b'{"x": 1, "x": 1, '),
}

NESTING: Table = {
    "nine-objects": _raw(b'{"params":' * 9 + b"1" + b"}" * 9),
    "a-thousand-lists": _raw(b'{"params": ' + b"[" * 1000 + b"]" * 1000 + b"}"),
    "thirty-thousand-open-lists": _raw(b"[" * 30_000),
    "thirty-thousand-open-objects": _raw(b'{"a":' * 12_000),
    "brackets-after-a-broken-text": _raw(b'"\\' + b"[" * 30_000),
    "an-object-as-a-value": _params("echo", b'{"word": {"a": 1}}', Reason.BAD_MANIFEST),
    "a-list-as-a-value": _params("echo", b'{"word": ["a"]}', Reason.BAD_MANIFEST),
    "nothing-as-a-value": _params("echo", b'{"word": null}', Reason.BAD_MANIFEST),
    "deep-in-a-value": _params("echo", b'{"word": ' + b"[" * 500 + b"]" * 500 + b"}", Reason.BAD_MANIFEST),
}

NUMBERS: Table = {
    "nan": _params("throughput", b'{"limit": NaN}', Reason.BAD_MANIFEST),
    "infinity": _params("throughput", b'{"limit": Infinity}', Reason.BAD_MANIFEST),
    "minus-infinity": _params("throughput", b'{"limit": -Infinity}', Reason.BAD_MANIFEST),
    "more-than-a-float": _params("throughput", b'{"limit": 1e999}', Reason.BAD_MANIFEST),
    "less-than-a-float": _params("throughput", b'{"limit": -1e999}', Reason.BAD_MANIFEST),
    "a-whole-number-of-four-thousand-digits": _params("throughput", b'{"limit": 1' + b"0" * 4000 + b"}"),
    "a-negative-one": _params("throughput", b'{"limit": -1' + b"0" * 4000 + b"}"),
    "a-choice-of-four-thousand-digits": _params("throughput", b'{"prompts": 1' + b"0" * 4000 + b"}"),
    "a-whole-number-of-sixty-thousand-digits": _params(
        "throughput", b'{"limit": 1' + b"0" * 60_000 + b"}", Reason.BAD_MANIFEST
    ),
    "a-fraction-of-sixty-thousand-digits": _params("throughput", b'{"limit": 0.' + b"1" * 60_000 + b"}"),
    "one-more-than-allowed": _params("throughput", b'{"limit": 201}'),
    "one-less-than-allowed": _params("throughput", b'{"limit": 0}'),
    "minus-zero": _params("throughput", b'{"limit": -0}'),
    "a-fraction-for-a-whole-number": _params("throughput", b'{"limit": 8.0}'),
    "a-power-for-a-whole-number": _params("throughput", b'{"limit": 8e0}'),
    "true-for-a-number": _params("throughput", b'{"limit": true}'),
    "a-text-for-a-number": _params("throughput", b'{"limit": "8"}'),
    "a-number-for-true": _params("throughput", b'{"chat": 1}'),
    "a-text-for-true": _params("throughput", b'{"chat": "true"}'),
    "a-number-for-a-choice": _params("throughput", b'{"block": 2}'),
    "a-number-for-a-text": _params("echo", b'{"word": 7}'),
    "leading-zero": _params("throughput", b'{"limit": 08}', Reason.BAD_MANIFEST),
    "hexadecimal": _params("throughput", b'{"limit": 0x8}', Reason.BAD_MANIFEST),
    "a-year-of-seconds": _fields(timeout_s=365 * 86_400),
    "no-seconds": _fields(timeout_s=0),
    "negative-seconds": _fields(timeout_s=-1),
    "seconds-as-true": _fields(timeout_s=True),
    "seconds-as-text": _fields(timeout_s="60"),
    "seconds-as-a-fraction": _fields(timeout_s=60.5),
    "seconds-without-end": _swap(b"{", b'{"timeout_s": 1' + b"0" * 4000 + b", "),
    "time-as-a-number": _fields(created_at=1772366400, expires_at=1772452800),
    "a-month-that-does-not-exist": _fields(created_at="2026-13-01T00:00:00Z"),
    "the-year-ten-thousand": _fields(expires_at="10000-01-01T00:00:00Z"),
}

GIGANTIC: Table = {
    "blanks-over-the-limit": _raw(b" " * (MAX_BYTES + 1), Reason.BAD_COMMIT),
    "megabytes-of-text": _raw(b'{"requested_by": "' + b"x" * (8 << 20) + b'"}', Reason.BAD_COMMIT),
    "blanks-within-the-limit": _raw(b" " * MAX_BYTES),
    "one-text-within-the-limit": _raw(b'"' + b"x" * (MAX_BYTES - 2) + b'"'),
    "a-text-of-escapes": _raw(b'"' + b"\\u0041" * 10_000 + b'"'),
    "five-thousand-keys": _raw(b"{" + b",".join(b'"%d": 1' % n for n in range(5000)) + b"}"),
    "sixty-five-parameters": _fields(params={f"p{n}": n for n in range(65)}),
    "a-parameter-of-five-thousand-letters": _fields(params={"word": "x" * 5000}),
    "a-parameter-as-long-as-may-be": Request(Reason.BAD_PARAMETER, {"params": {"word": "x" * 4096}}),
    "a-choice-as-long-as-may-be": Request(
        Reason.BAD_PARAMETER, {"preset": "throughput", "params": {"prompts": "x" * 4096}}
    ),
    "a-parameter-name-of-a-thousand-letters": _fields(params={"x" * 1000: 1}),
    "a-preset-of-a-thousand-letters": _fields(preset="x" * 1000),
    "a-requester-of-a-thousand-letters": _fields(requested_by="x" * 1000),
    "an-audience-of-ten-thousand-letters": _fields(audience="x" * 10_000),
    "a-ref-of-a-thousand-letters": _fields(result_ref="refs/heads/" + "x" * 1000),
    "a-signature-of-a-megabyte": Request(Reason.BAD_COMMIT, signature=b"x" * (1 << 20)),
    "a-commit-message-of-two-megabytes": Request(Reason.BAD_COMMIT, message="x" * (2 << 20)),
}

SCHEMAS: Table = {
    "a-side-that-is-no-parent": _fields(against={"workload_sha": "f" * 40}),
    "a-side-without-a-commit": _fields(against={"params": {}}),
    "a-side-with-argv": _fields(against={"workload_sha": WORKLOAD, "argv": ["sh"]}),
    "version-0": _fields(schema_version=0),
    "version-2": _fields(schema_version=2),
    "version-minus-1": _fields(schema_version=-1),
    "version-as-text": _fields(schema_version="1"),
    "version-as-true": _fields(schema_version=True),
    "version-as-a-fraction": _fields(schema_version=1.0),
    "version-is-nothing": _fields(schema_version=None),
    "version-is-a-list": _fields(schema_version=[1]),
    "version-of-four-thousand-digits": _swap(b'"schema_version": 1', b'"schema_version": 1' + b"0" * 4000),
    "an-argv": _fields(argv=["/bin/sh", "-c", "id"]),
    "an-environment": _fields(env={"LD_PRELOAD": "/tmp/x.so"}),
    "a-working-folder": _fields(cwd="/"),
    "trust": _fields(trusted=True),
    "an-engine": _fields(engine="workload"),
    "a-policy": _fields(policy={"allow_repo_code": True}),
    "a-network": _fields(network=True),
    "a-key-of-python": _fields(__class__="x"),
    "a-key-in-capitals": _fields(Preset="echo"),
    "no-preset": _fields(preset=ABSENT),
    "no-nonce": _fields(nonce=ABSENT),
    "no-workload": _fields(workload_sha=ABSENT),
    "no-audience": _fields(audience=ABSENT),
    "no-expiry": _fields(expires_at=ABSENT),
    "an-empty-audience": _fields(audience=""),
    "an-unknown-transport": _fields(transport="carrier-pigeon"),
    "parameters-as-a-list": _fields(params=["word"]),
    "parameters-are-nothing": _fields(params=None),
    "nothing": _raw(b""),
    "a-list": _raw(b"[]"),
    "a-text": _raw(b'"echo"'),
    "null": _raw(b"null"),
    "two-documents": _swap(b"}", b"}{}"),
    "rubbish-after-it": _swap(b"}", b"} x"),
    "a-comment": _swap(b"{", b"{/* */"),
    "single-quotes": _raw(b"{'preset': 'echo'}"),
    "a-trailing-comma": _swap(b"}", b",}"),
    "not-utf-8": _raw(b'{"preset": "\xff\xfe"}'),
    "utf-16": _raw('{"preset": "echo"}'.encode("utf-16")),
    "a-byte-order-mark": _raw(b"\xef\xbb\xbf{}"),
    "overlong-utf-8": _raw(b'{"preset": "\xc0\xaf"}'),
    "nul-bytes": _raw(b"\0" * 100),
    "toml": _raw(b'preset = "echo"\n'),
    "yaml": _raw(b"!!python/object/apply:os.system ['id']\n"),
    "a-pickle": _raw(b"cos\nsystem\n(S'id'\ntR."),
    "an-lfs-pointer": _raw(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 400\n"
    ),
    "an-unknown-preset": Request(Reason.UNKNOWN_PRESET, {"preset": "rm"}),
    "an-unknown-parameter": Request(Reason.BAD_PARAMETER, {"params": {"argv": "x"}}),
    "a-missing-parameter": Request(Reason.BAD_PARAMETER, {"preset": "gate"}),
}


def _stale(reason: Reason, age: timedelta = timedelta(0), **fields: Any) -> Request:
    return Request(reason, fields, age=age)


STALE: Table = {
    "expired-an-hour-ago": _stale(Reason.EXPIRED, timedelta(hours=2)),
    "expired-a-month-ago": _stale(Reason.EXPIRED, timedelta(days=30)),
    "expires-before-it-is-made": _stale(Reason.BAD_MANIFEST, expires_at="2020-01-01T00:00:00Z"),
    "never-expires": _stale(Reason.BAD_MANIFEST, expires_at="9999-12-31T23:59:59Z"),
    "made-in-the-year-one": _stale(Reason.BAD_MANIFEST, created_at="0001-01-01T00:00:00Z"),
    "made-another-day-than-its-nonce-says": _stale(
        Reason.BAD_MANIFEST, created_at="2020-01-01T00:00:00Z", expires_at="2020-01-02T00:00:00Z"
    ),
    "local-time": _stale(Reason.BAD_MANIFEST, created_at="2026-03-01T12:00:00+02:00"),
    "for-another-remote": _stale(Reason.WRONG_AUDIENCE, audience="example.org/else/where"),
    "for-a-folder-above": _stale(Reason.WRONG_AUDIENCE, audience="/"),
    "for-anybody": _stale(Reason.WRONG_AUDIENCE, audience="*"),
    "named-by-another-nonce": _stale(Reason.BAD_MANIFEST, nonce="20260301t120000z0123456789ab"),
    "of-another-workload": _stale(Reason.BAD_MANIFEST, workload_sha="8" * 40),
    "of-a-workload-in-capitals": _stale(Reason.BAD_MANIFEST, workload_sha="A" * 40),
    "of-a-shortened-workload": _stale(Reason.BAD_MANIFEST, workload_sha="abcdef1"),
    "of-a-workload-that-is-itself-twice": _stale(Reason.BAD_MANIFEST, workload_sha=WORKLOAD * 2),
    "code-of-the-requester": _stale(Reason.POLICY, preset="tests"),
    "code-of-the-requester-by-another-name": _stale(Reason.POLICY, preset="pytest-path"),
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
