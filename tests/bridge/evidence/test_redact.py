"""No form of a secret-named value survives redaction, and nothing else changes."""

from __future__ import annotations

import base64
import html
import json
import re
import time
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.evidence.redact import Secrets, secrets_of


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
    assert Secrets({"API_KEY": "1234567"}).cut(b"1234567") == b"1234567"


VALUE = "p\"ss w/rd+\u00e9\u00ff<?&'"
FORMS: dict[str, Callable[[str], bytes]] = {
    "plain": lambda value: value.encode(),
    "JSON": lambda value: json.dumps(value).encode(),
    "JSON, not ASCII": lambda value: json.dumps(value, ensure_ascii=False).encode(),
    "JSON, slashes": lambda value: json.dumps(value).replace("/", "\\/").encode(),
    "Python": lambda value: repr(value).encode(),
    "HTML": lambda value: html.escape(value).encode(),
    "URL": lambda value: quote(value, safe="").encode(),
    "URL, lower case": lambda value: re.sub("%..", lambda m: m[0].lower(), quote(value, safe="")).encode(),
    "URL, path": lambda value: quote(value).encode(),
    "form": lambda value: quote_plus(value).encode(),
    "hex": lambda value: value.encode().hex().encode(),
    "HEX": lambda value: value.encode().hex().upper().encode(),
    "base64": lambda value: base64.b64encode(value.encode()),
    "base64 of a URL": lambda value: base64.urlsafe_b64encode(value.encode()).rstrip(b"="),
    "base64 after a name": lambda value: base64.b64encode(b"me:" + value.encode()),
    "base64 after a longer name": lambda value: base64.b64encode(b"user:" + value.encode()),
    "base64 amid others": lambda value: base64.b64encode(b"user=a&" + value.encode() + b"&b=c"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_secret_is_found_and_cut_in_every_form(form: str) -> None:
    secrets = Secrets({"THE_PASSWORD": VALUE})
    written = b"before " + FORMS[form](VALUE) + b" after"
    assert secrets.found_in(written) == ("THE_PASSWORD",)
    cut = secrets.cut(written)
    assert b"[redacted:THE_PASSWORD]" in cut
    assert secrets.found_in(cut) == ()


@given(st.binary(max_size=20), st.text(min_size=8, max_size=30), st.binary(max_size=20))
def test_base64_hides_no_secret_wherever_it_begins(before: bytes, value: str, after: bytes) -> None:
    if len(value.strip()) < 8:
        return
    secrets = Secrets({"T": value})
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        assert secrets.found_in(encode(before + value.strip().encode() + after)) == ("T",)


def test_the_lines_of_a_key_are_secrets_too() -> None:
    lines = [
        "-----BEGIN PRIVATE KEY-----",
        "MC4CAQAwBQYDK2VwBCIEIJ",
        "abcdefghijklmnopqrstuv",
        "-----END-----",
    ]
    secrets = Secrets({"DEPLOY_KEY": "\n".join(lines)})
    cut = secrets.cut(b"-----BEGIN PRIVATE KEY-----\r\nMC4CAQAwBQYDK2VwBCIEIJ\r\n")
    assert cut == b"-----BEGIN PRIVATE KEY-----\r\n[redacted:DEPLOY_KEY]\r\n"


def test_a_secret_inside_another_leaves_no_rest() -> None:
    secrets = Secrets({"A_TOKEN": "abcdefgh", "B_TOKEN": "abcdefghijkl"})
    assert secrets.cut(b"abcdefghijkl abcdefgh") == b"[redacted:B_TOKEN] [redacted:A_TOKEN]"


@pytest.mark.parametrize("kept", [4, 7, 15])
def test_the_beginning_of_a_secret_at_the_end_of_a_cut_log_goes_too(kept: int) -> None:
    secrets = Secrets({"A_TOKEN": "abcdefghijklmnop", "OTHER": "bcd-12345678"})
    written = b"the token is " + b"abcdefghijklmnop"[:kept]
    assert secrets.cut(written, broken_off=True) == b"the token is [redacted:A_TOKEN]"
    assert secrets.cut(written) == written
    assert secrets.cut(b"no secret here", broken_off=True) == b"no secret here"


def test_mild_values_are_cut_and_allowed_in_evidence() -> None:
    secrets = Secrets({"DATA": "/volumes/data", "A_TOKEN": "abcdefgh"}, mild={"DATA"})
    assert secrets.cut(b"/volumes/data abcdefgh") == b"[redacted:DATA] [redacted:A_TOKEN]"
    assert secrets.found_in(b"/volumes/data") == ()
    assert secrets.found_in(b"/volumes/data abcdefgh") == ("A_TOKEN",)


def test_a_log_of_the_largest_size_and_many_secrets_are_quick() -> None:
    secrets = Secrets({f"TOKEN_{number}": f"{number:04}-abcdefghijklmnop/{number}" for number in range(20)})
    began = time.process_time()
    secrets.cut(b"progress 1/2 running 0001-abcdefghij\n" * (8 << 20 >> 5))
    assert time.process_time() - began < 5.0


@given(st.binary(max_size=60), st.text(min_size=8, max_size=20), st.binary(max_size=60))
def test_a_secret_never_survives(before: bytes, value: str, after: bytes) -> None:
    known = secrets_of({"SOME_TOKEN": value})
    secrets = Secrets(known)
    cut = secrets.cut(before + value.strip().encode() + after)
    if known:
        # What is left over could only spell the secret together with the marker itself.
        assert secrets.found_in(cut.replace(b"[redacted:SOME_TOKEN]", b"\x00")) == ()
    else:
        assert cut == before + value.strip().encode() + after


@given(st.binary())
def test_without_secrets_nothing_changes(data: bytes) -> None:
    assert Secrets({}).cut(data, broken_off=True) == data
    assert Secrets({}).found_in(data) == ()
