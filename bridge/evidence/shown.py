"""A value from a report, quoted for a message: short, one line, ASCII.

Reports come from outside, so nothing of theirs reaches a message unquoted.
"""

from __future__ import annotations

LIMIT = 80


def shown(value: object) -> str:
    """`value` as at most 80 ASCII characters; containers by their type and size only."""
    if isinstance(value, dict):
        return f"an object of {len(value)} fields"
    if isinstance(value, list | tuple):
        return f"an array of {len(value)} entries"
    text = ascii(value[: LIMIT + 1] if isinstance(value, str) else value)
    return text if len(text) <= LIMIT else text[: LIMIT - 3] + "..."


def several(values: list[str], limit: int = 5) -> str:
    """The first few of `values`, quoted, and how many more there are."""
    text = ", ".join(shown(value) for value in values[:limit])
    more = len(values) - limit
    return f"{text} and {more} more" if more > 0 else text
