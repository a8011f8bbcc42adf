"""Text that came over the bus, made safe to show.

Logs, heartbeats, results and a server's own messages can be written by anyone with push rights. `clean`
removes what a terminal would obey (escape sequences, control and bidirectional characters); it does not
judge what the text says, so a reader that acts on words must still be told that they are not the runner's
owner's.
"""

from __future__ import annotations

import re
import unicodedata

# One alternative a family of ECMA-48: CSI; the string controls OSC, DCS, SOS, PM and APC up to their
# terminator (or the end of the line when it is missing); two- and three-character escapes.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
_BIDIRECTIONAL = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
# What stands before the last @ of a URL's authority; and the same where a character that ends the authority
# was left unencoded in the password (what follows the colon is then no port).
_CREDENTIALS = re.compile(r"(?<=://)(?:[^/?#\n]*|[^/?#@:\s]*:(?![0-9]+[/?#\s'\"]|[0-9]+$)\S{0,200})@")


def clean(text: str, *, limit: int | None = None) -> str:
    r"""The text without anything a terminal would obey.

    Newlines and tabs stay; ``\r\n`` becomes ``\n`` and a lone carriage return (which would overwrite the
    line) becomes ``\n`` too. Other control, bidirectional and unpaired surrogate characters are dropped.

    Args:
        text: What was read from the bus.
        limit: Most characters to return; a longer text ends in ``…``.
    """
    text = _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    text = "".join(character for character in text if _is_harmless(character))
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
    """The first character that does not belong in a one-line text: control, bidirectional, unpaired."""
    return next((c for c in text if c in "\n\t" or not _is_harmless(c)), None)


def quoted(value: object, limit: int = 120) -> str:
    """A hostile value for a message: as Python writes it, in ASCII, at most `limit` characters."""
    text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def clean_bytes(data: bytes) -> str:
    """Like `clean`, from bytes; what is not UTF-8 becomes U+FFFD."""
    return clean(data.decode("utf-8", "replace"))


def without_credentials(text: str) -> str:
    """The text with ``user:password@`` and ``token@`` removed from every URL in it.

    Where a URL was written wrongly, rather too much goes than too little.
    """
    return _CREDENTIALS.sub("", text)


def _is_harmless(character: str) -> bool:
    if character in "\n\t":
        return True
    if character in _BIDIRECTIONAL:
        return False
    return unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp")
