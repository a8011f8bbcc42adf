"""The values of a policy file by kind, each read or refused at its line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from bridge.errors import PolicyError
from bridge.protocol.sanitize import unsafe_character
from bridge.runner.policy.lines import Key, Lines, dotted

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
UNITS |= {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
MOST_NAMES = 1000
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,3})?) ?([A-Za-z]{1,3})")


class Values:
    """Reads values of one file.

    Every method takes the value's whole key and the value itself, and raises `PolicyError`, at the line,
    for one of another kind.

    Args:
        lines: Of the file.
    """

    def __init__(self, lines: Lines) -> None:
        self.lines = lines

    def fault(self, key: Key, message: str, remedy: str | None = None) -> PolicyError:
        """The error that a value is wrong, to be raised."""
        return PolicyError(f"policy {self.lines.place(key)}: {dotted(key)} {message}", remedy)

    def table(self, key: Key, value: object, what: str) -> Mapping[str, Any]:
        """A table."""
        table: dict[str, Any] = self._kind(key, value, dict, what)
        return table

    def known(self, key: Key, table: Mapping[str, Any], keys: tuple[str, ...]) -> None:
        """Refuse a key that no table of this kind has."""
        for name in table:
            if name not in keys:
                place = self.lines.place((*key, name))
                where = f" in [{dotted(key)}]" if key else ""
                raise PolicyError(
                    f"policy {place}: unknown key {ascii(name)[:100]}{where}",
                    f"known keys: {', '.join(keys)}",
                )

    def switch(self, key: Key, value: object) -> bool:
        """True or false."""
        switch: bool = self._kind(key, value, bool, "true or false")
        return switch

    def number(self, key: Key, value: object, what: str, least: int, most: int) -> int:
        """A whole number of `what` (its unit, for people), from `least` to `most`."""
        number: int = self._kind(key, value, int, f"a number of {what}")
        if not least <= number <= most:
            raise self.fault(key, f"must be {least} to {most} {what}, got {number}")
        return number

    def size(self, key: Key, value: object, least: int, most: int) -> int:
        """Bytes: a whole number of them, or a text like ``8 GiB``."""
        if type(value) is int:
            return self.number(key, value, "bytes", least, most)
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[2] not in UNITS:
            raise self.fault(
                key,
                f'must be a number of bytes or a text like "8 GiB", got {_shown(value)}',
                f"units: {', '.join(UNITS)}",
            )
        return self.number(key, int(float(match[1]) * UNITS[match[2]]), "bytes", least, most)

    def text(self, key: Key, value: object, what: str) -> str:
        """A text on one line without control characters."""
        text: str = self._kind(key, value, str, what)
        if not text.strip() or unsafe_character(text) is not None:
            raise self.fault(key, f"must be {what}, got {_shown(text)}")
        return text

    def texts(
        self, key: Key, value: object, what: str, why_not: Callable[[str], str | None] = lambda _: None
    ) -> tuple[str, ...]:
        """A list of texts, each once; `why_not` says what is wrong with one of them, None: nothing."""
        found: list[str] = []
        for item in self._kind(key, value, list, what):
            text = self._kind(key, item, str, what)
            if not text.strip() or unsafe_character(text) is not None:
                raise self.fault(key, f"must be {what}, got {_shown(text)} in it")
            if (reason := why_not(text)) is not None:
                raise self.fault(key, f"names {_shown(text)}: {reason}")
            if text in found:
                raise self.fault(key, f"names {_shown(text)} twice")
            found.append(text)
        if len(found) > MOST_NAMES:
            raise self.fault(key, f"has {len(found)} entries, but at most {MOST_NAMES} are read")
        return tuple(found)

    def _kind(self, key: Key, value: object, kind: type, what: str) -> Any:
        # Types are compared, not instances: true is no number of seconds.
        if type(value) is not kind:
            raise self.fault(key, f"must be {what}, got {_shown(value)}")
        return value


def _shown(value: object) -> str:
    text = repr(value)
    return ascii(value)[:120] if len(text) > 120 or unsafe_character(text) else text
