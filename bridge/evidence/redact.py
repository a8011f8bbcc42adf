"""Secrets kept out of what is published: which values are secret, cutting them from logs, finding them.

A value is found as it is and in JSON, Python, HTML, URL, hexadecimal, and base64 at any offset of a longer
text. Not covered: short values, base64 broken into lines, and what a job encodes in a way of its own.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Collection, Iterator, Mapping
from urllib.parse import quote, quote_plus

SHORTEST = 8  # characters; a shorter value turns up in innocent text
SHORTEST_LINE = 16  # of a value of several lines, such as a private key, each longer line is a secret too
SHORTEST_START = 4  # of a secret that was cut off at the end of a text

# TOKENIZERS_PARALLELISM and KEYBOARD are no secrets.
_SECRET_NAME = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW(OR)?D|PASSPHRASE|CREDENTIAL|(?:^|_|API|ACCESS|PRIVATE)KEYS?(?:_|$)|(?:^|_)PAT(?:_|$)",
    re.IGNORECASE,
)


def is_secret_name(name: str) -> bool:
    """Whether a variable's name says that its value is secret."""
    return _SECRET_NAME.search(name) is not None


def secrets_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables whose names say that they are secret, as far as their values are long enough to tell."""
    return {name: value for name, value in environment.items() if is_secret_name(name) and _is_long(value)}


class Secrets:
    """Values that must not be published, by the names that replace them; short ones are ignored.

    `mild` names those that are cut from logs, but allowed in evidence.
    """

    def __init__(self, values: Mapping[str, str], *, mild: Collection[str] = ()) -> None:
        self._mild = frozenset(mild)
        found = {form: name for name, value in values.items() if _is_long(value) for form in _forms(value)}
        # Longest first, so that a secret inside another does not leave the rest of it.
        self._names = dict(sorted(found.items(), key=lambda item: len(item[0]), reverse=True))

    def cut(self, data: bytes, *, broken_off: bool = False) -> bytes:
        """`data` with every form of every secret replaced by ``[redacted:NAME]``.

        Where it was `broken_off`, its end may be the beginning of a secret, which goes, too.
        """
        if broken_off:
            ends = {form[:end]: form for form in self._names for end in range(SHORTEST_START, len(form))}
            if end := max(filter(data.endswith, ends), key=len, default=b""):
                data = data.removesuffix(end) + self._marker(ends[end])
        if not (present := [form for form in self._names if form in data]):
            return data
        return re.sub(b"|".join(map(re.escape, present)), lambda match: self._marker(match[0]), data)

    def cut_text(self, text: str, *, broken_off: bool = False) -> str:
        """Like `cut`, of a text."""
        return self.cut(text.encode("utf-8", "replace"), broken_off=broken_off).decode("utf-8", "replace")

    def found_in(self, data: bytes) -> tuple[str, ...]:
        """The names of the secrets that `data` holds in any form, sorted; none that is mild."""
        return tuple(sorted({name for form, name in self._names.items() if form in data} - self._mild))

    def _marker(self, form: bytes) -> bytes:
        return b"[redacted:" + self._names[form].encode("utf-8", "replace") + b"]"


def _is_long(value: str) -> bool:
    return len(value.strip()) >= SHORTEST


def _forms(value: str) -> set[bytes]:
    """The ways a secret may be written: as it is, encoded, and line by line."""
    stripped = value.strip()
    raw = stripped.encode("utf-8", "surrogateescape")  # environment values may hold any bytes
    texts = [json.dumps(stripped, ensure_ascii=flag)[1:-1] for flag in (True, False)]
    texts += [text.replace("/", "\\/") for text in texts]  # as some writers of JSON escape it
    texts += [repr(stripped)[1:-1], html.escape(stripped), html.escape(stripped, quote=False)]
    for url in (quote(raw, safe=""), quote(raw), quote_plus(raw)):
        texts += [url, re.sub("%..", lambda match: match[0].lower(), url)]
    lines = [line.strip() for line in stripped.splitlines() if not line.startswith("-----")]
    texts += [line for line in lines if len(line) >= SHORTEST_LINE]
    forms = {text.encode("utf-8", "surrogateescape") for text in texts}
    return forms | {raw, raw.hex().encode(), raw.hex().upper().encode(), *_base64(raw)}


def _base64(raw: bytes) -> Iterator[bytes]:
    """Base64 of a value by itself, and what a value makes of a longer text's, wherever it begins there.

    Of a value after `before` bytes, characters count that no neighbour has a part in.
    """
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield encode(raw).rstrip(b"=")
        for before in range(3):
            first, end = -(-8 * before // 6), 8 * (before + len(raw)) // 6
            yield encode(b"\0" * before + raw + b"\0\0")[first:end]
