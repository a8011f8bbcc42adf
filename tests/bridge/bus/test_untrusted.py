"""Text from the bus cannot drive a terminal, and shows nobody's credentials."""

from __future__ import annotations

import time
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.bus.untrusted import clean, without_credentials


@given(st.text(max_size=200))
def test_nothing_a_terminal_obeys_is_left(text: str):
    cleaned = clean(text)
    assert not [c for c in cleaned if (ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0]
    assert not set(cleaned) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    assert clean(cleaned) == cleaned


def test_escapes_go_and_words_stay():
    assert clean("\x1b[31mred\x1b[0m \x1b]0;title\x07text\rover") == "red text\nover"
    assert clean("a" * 50, limit=10) == "a" * 9 + "…"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:secret@example.org/r.git", "https://example.org/r.git"),
        ("https://secret@example.org/r.git", "https://example.org/r.git"),
        ("https://:secret@example.org", "https://example.org"),
        ("https://me:se%40cr%3Aet@example.org:8443/a@1", "https://example.org:8443/a@1"),
        ("ssh://me:secret@[::1]:22/r.git", "ssh://[::1]:22/r.git"),
        (
            "'https://me:secret@a/r' or <https://secret@b/r>, says git",
            "'https://a/r' or <https://b/r>, says git",
        ),
        ("https://a/r\nhttps://me:secret@b/r", "https://a/r\nhttps://b/r"),
        ("git-remote-http::https://me:secret@a/r", "git-remote-http::https://a/r"),
        # Written wrongly, and nevertheless somebody's password.
        ("https://me:sec@ret@example.org/r", "https://example.org/r"),
        ("https://me:sec ret@example.org/r", "https://example.org/r"),
        ("https://me:sec/ret@example.org/r", "https://example.org/r"),
        ("https://me:sec?ret#s@example.org/r", "https://example.org/r"),
        ("https://me:'sec\"ret@example.org/r", "https://example.org/r"),
    ],
)
def test_credentials_are_not_shown(text: str, shown: str):
    assert without_credentials(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "https://example.org/r.git",
        "https://example.org:8443/a@1/r.git",
        "https://example.org/?mail=me@example.org",
        "git@example.org:team/r.git",
        "write to me@example.org: see https://example.org/help",
        "fatal: unable to access 'https://example.org:1/': ask admin@example.org",
    ],
)
def test_what_is_no_credential_stays(text: str):
    assert without_credentials(text) == text


@given(st.text(max_size=30), st.text(min_size=1, max_size=30), st.sampled_from(["https", "http", "ssh"]))
def test_no_encoded_password_survives(name: str, word: str, scheme: str):
    secret = quote(word, safe="")
    shown = without_credentials(f"x {scheme}://{quote(name, safe='')}:{secret}@h.example/r y")
    assert shown == f"x {scheme}://h.example/r y"
    assert without_credentials(shown) == shown


@pytest.mark.parametrize("part", ["://", "://a:", "://a:b", "x://", "://a:b/", "@", "://@"])
def test_a_server_cannot_make_the_search_slow(part: str):
    began = time.monotonic()
    without_credentials(part * (60_000 // len(part)))
    assert time.monotonic() - began < 1.0
