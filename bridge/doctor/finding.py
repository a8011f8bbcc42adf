"""One finding of ``doctor``: what was looked at, how bad it is, what was found, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is: `fail` means that the role cannot be played from here."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, how bad it is, what was found, and the fix (empty when ok)."""

    name: str
    level: Level
    looked_at: str
    finding: str
    fix: str = ""
