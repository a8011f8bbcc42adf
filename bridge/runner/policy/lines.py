"""Which line of the policy file says what: for errors in it, and for the owner who asks why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bridge.toml import statements

# The key of a decision: ``("presets", "probe", "timeout_s")``.
Key = tuple[str, ...]
_SHOWN = 200


@dataclass(frozen=True)
class Line:
    """One line of a file, a longer statement brought onto it."""

    number: int
    text: str


class Lines:
    """The lines of one policy file.

    Args:
        source: The file.
        text: What is in it, if it is TOML; errors are then found at their lines.
    """

    def __init__(self, source: Path, text: str = "") -> None:
        self.source = source
        self._text = text

    def at(self, key: Key) -> Line | None:
        """Where a key, or the nearest table around it, is written; None: nowhere."""
        best: Line | None = None
        length = 0
        for statement in statements(self._text):
            within = statement.path[: len(key)] == key[: len(statement.path)]
            common = min(len(statement.path), len(key))
            if within and common > length:
                best, length = Line(statement.number, _one_line(statement.text)), common
        return best

    def place(self, key: Key) -> str:
        """``/…/policy.toml:12``, or the file alone where the key is not in it."""
        line = self.at(key)
        return str(self.source) if line is None else f"{self.source}:{line.number}"

    def shown(self, key: Key) -> str | None:
        """``policy.toml:12: allow_presets = ["probe"]``; None: the file does not say it."""
        line = self.at(key)
        return None if line is None else f"{self.source.name}:{line.number}: {line.text}"


def dotted(key: Iterable[str]) -> str:
    """A key as it is written: ``presets.probe.timeout_s``."""
    return ".".join(key)


def _one_line(text: str) -> str:
    line = " ".join(part.strip() for part in text.splitlines())
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"
