"""The hours in which the owner lets jobs begin, by the machine's own clock on the wall.

``mon-fri 22:00-06:00`` is the night after each of these days; ``sat,sun`` are whole days; ``08:00-12:30`` is
every day. Where clocks are set forward or back, an hour is what the clock shows. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
EXAMPLE = "mon-fri 22:00-06:00"
_DAY = 24 * 60
_SPAN = re.compile(r"(?P<days>[a-z,-]+)?(?: (?=\d)|$|(?=\d))(?:(?P<start>\d\d:\d\d)-(?P<end>\d\d:\d\d))?")


class HoursError(ValueError):
    """A text says no hours; the message says why."""


@dataclass(frozen=True)
class Span:
    """Some hours of some days.

    Attributes:
        text: As the owner wrote it.
        days: On which it begins, Monday is 0.
        start: Minute of the day.
        end: Minute after the last one, counted from the same midnight; past 1440 on the next day.
    """

    text: str
    days: frozenset[int]
    start: int
    end: int

    def holds(self, local: datetime) -> bool:
        """Whether a moment of the machine's clock is within."""
        minute, day = local.hour * 60 + local.minute, local.weekday()
        today = day in self.days and self.start <= minute < self.end
        return today or ((day - 1) % 7 in self.days and minute + _DAY < self.end)


def read_span(text: str) -> Span:
    """The hours that a text says.

    Raises:
        HoursError: It says none.
    """
    match = _SPAN.fullmatch(text)
    if match is None or not (match["days"] or match["start"]):
        raise HoursError(f"write days, times or both, like {EXAMPLE!r}, 'sat,sun' or '08:00-12:30'")
    days = _days(match["days"]) if match["days"] else frozenset(range(7))
    if match["start"] is None:
        return Span(text, days, 0, _DAY)
    start, end = _minute(match["start"]), _minute(match["end"])
    if start in (end, _DAY):
        raise HoursError("it is empty: leave the times out for the whole day")
    return Span(text, days, start, end if end > start else end + _DAY)


def within(spans: Sequence[Span], local: datetime) -> bool:
    """Whether any of them holds a moment of the machine's clock."""
    return any(span.holds(local) for span in spans)


def shown(spans: Sequence[Span]) -> str:
    """For people: ``mon-fri 22:00-06:00, sat,sun``."""
    return ", ".join(span.text for span in spans) or "never"


def _days(text: str) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if first not in DAYS or (dash and last not in DAYS):
            raise HoursError(f"{part!r} is no day: write {', '.join(DAYS)}, or a range of them")
        begin = DAYS.index(first)
        length = (DAYS.index(last) - begin) % 7 if dash else 0
        found |= {(begin + step) % 7 for step in range(length + 1)}
    return frozenset(found)


def _minute(text: str) -> int:
    hour, minute = int(text[:2]), int(text[3:])
    if minute > 59 or hour * 60 + minute > _DAY:
        raise HoursError(f"{text} is no time of a day")
    return hour * 60 + minute
