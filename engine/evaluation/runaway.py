"""Runaway repetition: does an output end in a loop, or consist of one?

The definition, which a reader of reports applies again to the tokens of every row: a tail of at least 48
tokens that repeats a cycle of up to 16 tokens three times, or one of up to 64 tokens four times, is a loop.
So is an output of at least 96 tokens in which fewer than 0.3 of the windows of 16 tokens differ: code from
templates repeats lines, but hardly ever sixteen tokens in a row.
"""

from collections.abc import Sequence

TAIL, SHORT_CYCLE, LONG_CYCLE = 48, 16, 64
SHORT_REPEATS, LONG_REPEATS = 3, 4
FEWEST, WINDOW, DISTINCT_SHARE = 96, 16, 0.3


def runs_away(tokens: Sequence[int]) -> bool:
    """Whether an output degenerates into repetition."""
    return ends_in_loop(tokens) or repeats_windows(tokens)


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Whether the last tokens repeat one cycle, often enough and long enough."""
    for cycle in range(1, min(LONG_CYCLE, len(tokens) - 1) + 1):
        repeats = SHORT_REPEATS if cycle <= SHORT_CYCLE else LONG_REPEATS
        needed = max(TAIL, repeats * cycle)
        if len(tokens) >= needed and _same_as_before(tokens, cycle, needed - cycle):
            return True
    return False


def repeats_windows(tokens: Sequence[int]) -> bool:
    """Whether few of the windows of a long output differ."""
    if len(tokens) < FEWEST:
        return False
    windows = [tuple(tokens[start : start + WINDOW]) for start in range(len(tokens) - WINDOW + 1)]
    return len(set(windows)) / len(windows) < DISTINCT_SHARE


def _same_as_before(tokens: Sequence[int], cycle: int, count: int) -> bool:
    """Whether each of the last ``count`` tokens equals the one a cycle before it."""
    last = range(len(tokens) - count, len(tokens))
    return all(tokens[index] == tokens[index - cycle] for index in last)
