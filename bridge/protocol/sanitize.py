"""Text that came over the bus, made safe to show.

Logs, heartbeats, results and a server's own messages can be written by anyone with push rights. `clean`
removes what a terminal would obey (escape sequences, control and bidirectional characters) and what is
invisible (zero-width characters, tags, variation selectors: the ways to hide words from people that a program
reads all the same). It does not judge what the text says: `bridge.render.marked` tells a reader that acts on
words whose words they are.
"""

from __future__ import annotations

import re

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


def clean(text: str, *, limit: int | None = None) -> str:
    r"""The text without anything a terminal would obey.

    Newlines and tabs stay; ``\r\n`` becomes ``\n`` and a lone carriage return (which would overwrite the
    line) becomes ``\n`` too. Other control, bidirectional, invisible and unpaired surrogate characters are
    dropped.

    Args:
        text: What was read from the bus.
        limit: Most characters to return; a longer text ends in ``…``.
    """
    text = _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    text = _HARMFUL.sub("", text)
    if limit is not None and len(text) > limit:
        return text[: max(0, limit - 1)] + "…"
    return text


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
    """The text with ``user:password@`` and ``token@`` removed from every URL in it.

    Where a URL was written wrongly, rather too much goes than too little.
    """
    return _CREDENTIALS.sub("", text)
