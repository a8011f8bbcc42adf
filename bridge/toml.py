"""TOML files of the owner's, read within bounds, and the line on which each of their keys stands.

The standard parser gives values without places, recurses as deep as a file nests, and takes quadratic time
for a key of many parts; so the text is walked once before it is parsed, and what is too deep is refused.
"""

from __future__ import annotations

import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_DEPTH = 16  # of brackets in one statement
_INTEGERS = 1 << 63
MAX_DOTS = 64  # outside texts, on one line: parts of a key, or numbers


class TomlError(ValueError):
    """The bytes are not TOML that is read here; the message says why, in words that end no sentence."""


# Texts first, a long one with the quotes that may stand before its end; a short one ends with its line.
_TOKEN = re.compile(
    r'"""(?:\\[\s\S]|[^\\])*?"""(?:"{0,2})'
    r"|'''[\s\S]*?'''(?:'{0,2})"
    r'|"(?:\\.|[^"\\\n])*"?'
    r"|'[^'\n]*'?"
    r"|#[^\n]*|[\[\]{}.\n]|[^\"'#\[\]{}.\n]+"
)
_DEPTHS = {"[": 1, "{": 1, "]": -1, "}": -1}


@dataclass(frozen=True)
class Statement:
    """One table header or one ``key = value`` of a file.

    Attributes:
        number: The line it begins on, counted from 1.
        text: As it stands there, without the comment lines before it.
        path: The whole key; of an inline table of one key, that of its inner key.
    """

    number: int
    text: str
    path: tuple[str, ...]


def read(path: Path, limit: int, check: Callable[[os.stat_result], None] = lambda _: None) -> bytes:
    """The bytes of a file, one more than `limit` where it is larger; a pipe or device is never waited for.

    Args:
        path: The file.
        limit: Most bytes that `parse` will take.
        check: Asked about the very file that is read, before it is; its errors pass through.

    Raises:
        TomlError: It is no plain file.
        OSError: It cannot be read.
    """
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise TomlError("not a plain file")
        check(status)
        return file.read(limit + 1)


def parse(data: bytes, limit: int) -> dict[str, Any]:
    """The document in a file's bytes.

    Raises:
        TomlError: They are more than `limit`, not UTF-8, nested too deep, not TOML, or hold a number that
            is none.
    """
    if len(data) > limit:
        raise TomlError(f"more than {limit} bytes, and at most {limit} are read")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TomlError(f"not UTF-8 (byte {error.start})") from None
    for _ in _pieces(text):
        pass  # walked for its bounds
    document = _loads(text)
    _check_numbers(document)
    return document


def statements(text: str) -> Iterator[Statement]:
    """Every statement of a text that `parse` takes, in order."""
    table: tuple[str, ...] = ()
    for number, piece in _pieces(text):
        path = _only_path(_loads(piece))
        if piece.startswith("["):
            table = path
            yield Statement(number, piece, path)
        else:
            yield Statement(number, piece, (*table, *path))


def _loads(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a plain ValueError
        raise TomlError(f"not TOML ({error})") from None


def _check_numbers(value: Any) -> None:
    """Refuse numbers that bound nothing, and whole numbers of more than TOML's 64 bits."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_numbers(item)
    elif isinstance(value, float) and not math.isfinite(value):  # nothing is below or above nan
        raise TomlError(f"{value} is no number that is read here")
    elif isinstance(value, int) and abs(value) >= _INTEGERS:
        raise TomlError("a whole number has more than 64 bits")


def _only_path(document: Any) -> tuple[str, ...]:
    """The keys down to where a document branches or ends."""
    path: list[str] = []
    while isinstance(document, list) and document and isinstance(document[0], dict):
        document = document[0]
    while isinstance(document, dict) and len(document) == 1:
        ((key, document),) = document.items()
        path.append(key)
    return tuple(path)


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    """The text of each statement with the number of its first line, blank and comment lines left out.

    A statement ends at the end of a line outside texts and brackets, so this needs no grammar beyond those.
    """
    begun, first, number, depth, dots = 0, 1, 1, 0, 0
    for token in _TOKEN.finditer(text):
        word = token[0]
        number += word.count("\n")
        depth = max(0, depth + _DEPTHS.get(word, 0))
        dots = 0 if word == "\n" else dots + (word == ".")
        if depth > MAX_DEPTH or dots > MAX_DOTS:
            raise TomlError(f"line {number} is nested too deep")
        if word == "\n" and depth == 0:
            yield from _piece(first, text[begun : token.end()])
            begun, first = token.end(), number
    yield from _piece(first, text[begun:])


def _piece(first: int, text: str) -> Iterator[tuple[int, str]]:
    stripped = text.strip()
    if stripped and not stripped.startswith("#"):
        yield first, stripped
