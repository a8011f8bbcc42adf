"""Text that came over the bus, made safe to show, and JSON, made safe to read.

`clean` removes what a terminal would obey and what is invisible: the ways to hide words from people that a
program reads all the same. It does not judge what the text says.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 8  # of nested JSON

# One alternative a family of ECMA-48: CSI; the string controls OSC, DCS, SOS, PM and APC up to their
# terminator (or the end of the line when it is missing); two- and three-character escapes.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
# What a terminal obeys or a reader cannot see: Unicode's classes Cc, Cs, Zl, Zp and Cf, without the few of Cf
# that show (Arabic and Kaithi number signs, Syriac abbreviations), and every Default_Ignorable_Code_Point.
_HARMFUL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad"  # controls but line feed and tab; the soft hyphen
    r"\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"  # joiners, fillers, Mongolian selectors
    r"\u200b-\u200f\u2028-\u202e\u2060-\u206f"  # zero width, bidirectional, line separators
    r"\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"  # fillers, variation selectors, annotations
    r"\ud800-\udfff"  # unpaired surrogates
    r"\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"  # layout of rare scripts
    r"\U000e0000-\U000e0fff]"  # tags and more variation selectors
)
_UNSAFE = re.compile(rf"[\n\t]|{_HARMFUL.pattern}")
# What is before the last @ of a URL's authority; and the same where a character that ends the authority
# was left unencoded in the password (what follows the colon is then no port).
_CREDENTIALS = re.compile(r"(?<=://)(?:[^/?#\n]*|[^/?#@:\s]*:(?![0-9]+[/?#\s'\"]|[0-9]+$)\S{0,200})@")


def clean(text: str) -> str:
    r"""The text without anything a terminal would obey.

    Newlines and tabs stay; a carriage return, which would overwrite the line, becomes ``\n``. Other control,
    bidirectional, invisible and unpaired surrogate characters are dropped.
    """
    return _HARMFUL.sub("", _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n"))


def clean_line(text: str, *, limit: int = 500) -> str:
    """Like `clean`, on one line: every run of white space becomes one space."""
    return " ".join(clean(text).split())[:limit]


def one_line(text: str) -> str:
    """Like `clean`, on one line and otherwise as it was: each newline or tab becomes a space."""
    return clean(text).replace("\n", " ").replace("\t", " ")


def unsafe_character(text: str) -> str | None:
    """The first character that has no place in a one-line text: control, invisible, unpaired."""
    found = _UNSAFE.search(text)
    return None if found is None else found[0]


def quoted(value: object, limit: int = 120) -> str:
    """A hostile value for a message: as Python writes it, in ASCII, at most `limit` characters."""
    text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def without_credentials(text: str) -> str:
    """The text without ``user:password@`` and ``token@`` in its URLs; rather too much goes than less."""
    return _CREDENTIALS.sub("", text)


def load_strict(data: bytes, limit: int) -> dict[str, Any]:
    """Parse hostile JSON; a ValueError: too long or deep, not UTF-8, not one object, or with a key twice."""
    if len(data) > limit:
        raise ValueError(f"{len(data)} bytes, but at most {limit} are read")
    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
        depth = _depth(document)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error})") from None
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if not isinstance(document, dict):
        raise ValueError(f"must be a JSON object, got {type(document).__name__}")  # noqa: TRY004 - its callers catch one type
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for key, value in pairs:
        if key in keys:
            raise ValueError(f"the key {quoted(key, 80)} appears twice")
        keys[key] = value
    return keys


def _depth(value: object) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)
