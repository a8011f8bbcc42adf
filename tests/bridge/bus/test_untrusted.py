"""Text from the bus cannot drive a terminal."""

from __future__ import annotations

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


def test_credentials_are_not_shown():
    assert "secret" not in without_credentials("https://user:secret@example.org/r.git")
