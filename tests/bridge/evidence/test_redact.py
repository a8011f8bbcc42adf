"""No form of a secret-named value survives redaction, and nothing else changes."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.evidence.redact import find_secrets, redact, secrets_of


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("GITHUB_TOKEN", True),
        ("HF_TOKEN", True),
        ("aws_secret_access_key", True),
        ("OPENAI_API_KEY", True),
        ("APIKEY", True),
        ("SIGNING_KEYS", True),
        ("DB_PASSWORD", True),
        ("PGPASSWORD", True),
        ("MY_CREDENTIALS", True),
        ("GITHUB_PAT", True),
        ("PATH", False),
        ("KEYBOARD_LAYOUT", False),
        ("TOKENIZERS_PARALLELISM", False),
        ("MONKEY_NAME", False),
        ("HOME", False),
    ],
)
def test_the_name_tells_what_is_secret(name: str, secret: bool) -> None:
    assert (name in secrets_of({name: "long enough a value"})) == secret


def test_short_values_are_left_alone() -> None:
    assert secrets_of({"API_KEY": "1234567", "TOKEN": "       x   "}) == {}
    assert redact(b"1234567", {"API_KEY": "1234567"}) == b"1234567"


@pytest.mark.parametrize(
    "form",
    [
        lambda value: value.encode(),
        lambda value: json.dumps(value).encode(),
        lambda value: quote(value, safe="").encode(),
        lambda value: base64.b64encode(value.encode()),
        lambda value: base64.urlsafe_b64encode(value.encode()).rstrip(b"="),
    ],
)
def test_a_secret_is_found_and_cut_in_every_form(form: object) -> None:
    value = 'p"ss w/rd+\u00e9\u00ff?'
    written = b"before " + form(value) + b" after"  # type: ignore[operator]
    assert find_secrets(written, {"THE_PASSWORD": value}) == ("THE_PASSWORD",)
    cut = redact(written, {"THE_PASSWORD": value})
    assert b"[redacted:THE_PASSWORD]" in cut
    assert find_secrets(cut, {"THE_PASSWORD": value}) == ()


def test_the_lines_of_a_key_are_secrets_too() -> None:
    lines = [
        "-----BEGIN PRIVATE KEY-----",
        "MC4CAQAwBQYDK2VwBCIEIJ",
        "abcdefghijklmnopqrstuv",
        "-----END-----",
    ]
    key = "\n".join(lines)
    cut = redact(b"-----BEGIN PRIVATE KEY-----\r\nMC4CAQAwBQYDK2VwBCIEIJ\r\n", {"DEPLOY_KEY": key})
    assert cut == b"-----BEGIN PRIVATE KEY-----\r\n[redacted:DEPLOY_KEY]\r\n"


def test_a_secret_inside_another_leaves_no_rest() -> None:
    secrets = {"A_TOKEN": "abcdefgh", "B_TOKEN": "abcdefghijkl"}
    assert redact(b"abcdefghijkl abcdefgh", secrets) == b"[redacted:B_TOKEN] [redacted:A_TOKEN]"


@given(st.binary(max_size=60), st.text(min_size=8, max_size=20), st.binary(max_size=60))
def test_a_secret_never_survives(before: bytes, value: str, after: bytes) -> None:
    secrets = secrets_of({"SOME_TOKEN": value})
    cut = redact(before + value.strip().encode() + after, secrets)
    if secrets:
        # What is left over could only spell the secret together with the marker itself.
        assert find_secrets(cut.replace(b"[redacted:SOME_TOKEN]", b"\x00"), secrets) == ()
    else:
        assert cut == before + value.strip().encode() + after


@given(st.binary())
def test_without_secrets_nothing_changes(data: bytes) -> None:
    assert redact(data, {}) == data
    assert find_secrets(data, {}) == ()
