"""Runaway repetition: the definition that engine and gate share by its words and by a test of both.

A tail of at least LOOP_TOKENS tokens that repeats a cycle of up to SHORT_CYCLE tokens three times, or one of
up to LONG_CYCLE tokens four times, is a loop. So is an output of at least WINDOWED_TOKENS tokens in which
fewer than DISTINCT_SHARE of the WINDOW-token windows differ: code from templates repeats lines, but hardly
ever sixteen tokens in a row, while a loop of c tokens leaves only c different windows.
"""

from __future__ import annotations

LOOP_TOKENS, SHORT_CYCLE, LONG_CYCLE = 48, 16, 64
WINDOWED_TOKENS, WINDOW, DISTINCT_SHARE = 96, 16, 0.3


def degeneration(tokens: tuple[int, ...]) -> str | None:
    """How an output degenerates into repetition, or None when it does not."""
    for cycle in range(1, LONG_CYCLE + 1):
        tail = _periodic_tail(tokens, cycle)
        repeats = 3 if cycle <= SHORT_CYCLE else 4
        if tail >= max(LOOP_TOKENS, repeats * cycle):
            return f"the last {tail} of {len(tokens)} tokens repeat a cycle of {cycle}"
    if len(tokens) >= WINDOWED_TOKENS:
        windows = [tokens[i : i + WINDOW] for i in range(len(tokens) - WINDOW + 1)]
        share = len(set(windows)) / len(windows)
        if share < DISTINCT_SHARE:
            return f"only {share:.0%} of the {WINDOW}-token windows in {len(tokens)} tokens differ"
    return None


def _periodic_tail(tokens: tuple[int, ...], cycle: int) -> int:
    """Length of the longest tail that repeats its first `cycle` tokens, those included; 0 without repeat."""
    start = len(tokens) - 1
    while start >= cycle and tokens[start] == tokens[start - cycle]:
        start -= 1
    matched = len(tokens) - 1 - start
    return matched + cycle if matched else 0
