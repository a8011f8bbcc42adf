"""The hours in which the owner lets jobs begin, by the machine's local time.

``mon-fri 22:00-06:00`` is the night after each of these days; ``sat,sun`` are whole days; ``08:00-12:30`` is
every day.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY = 24 * 60
_SPAN = re.compile(r"(?P<days>[a-z,-]+)?(?: (?=\d)|$|(?=\d))(?:(?P<start>\d\d:\d\d)-(?P<end>\d\d:\d\d))?")


def check_span(text: str) -> str:
    """The text itself, if it is a span of hours.

    Raises:
        ValueError: It is not.
    """
    _parse(text)
    return text


def is_within(spans: Sequence[str], local: datetime) -> bool:
    """Whether one of the spans holds a moment of the machine's local time."""
    minute, day = local.hour * 60 + local.minute, local.weekday()
    for days, start, end in map(_parse, spans):
        if day in days and start <= minute < end:
            return True
        if (day - 1) % 7 in days and minute + _DAY < end:  # since yesterday
            return True
    return False


def _parse(text: str) -> tuple[frozenset[int], int, int]:
    """Days (Monday is 0), first minute, and the minute after the last one; past 1440 on the next day."""
    match = _SPAN.fullmatch(text)
    if match is None or not (match["days"] or match["start"]):
        raise ValueError(f"{text!r}: write days, times or both, like 'mon-fri 22:00-06:00' or 'sat,sun'")
    days = _days(match["days"]) if match["days"] else frozenset(range(7))
    if match["start"] is None:
        return days, 0, _DAY
    start, end = _minute(match["start"]), _minute(match["end"])
    if start in (end, _DAY):
        raise ValueError(f"{text!r} is empty: leave the times out for the whole day")
    return days, start, end if end > start else end + _DAY


def _days(text: str) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if first not in DAYS or (dash and last not in DAYS):
            raise ValueError(f"{part!r} is no day: write {', '.join(DAYS)}, or a range of them")
        start = DAYS.index(first)
        length = (DAYS.index(last) - start) % 7 if dash else 0
        found |= {(start + step) % 7 for step in range(length + 1)}
    return frozenset(found)


def _minute(text: str) -> int:
    hour, minute = int(text[:2]), int(text[3:])
    if minute > 59 or hour * 60 + minute > _DAY:
        raise ValueError(f"{text} is no time of a day")
    return hour * 60 + minute
