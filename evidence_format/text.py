"""Texts and tokens of a report: digests, quoting for messages, repetition, reasoning removed from answers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache

LIMIT = 80
LOOP_TOKENS, SHORT_CYCLE, LONG_CYCLE = 48, 16, 64
WINDOWED_TOKENS, WINDOW, DISTINCT_SHARE = 96, 16, 0.3

# (begin, end) of reasoning. The chat template may write the first into the prompt; a cut text lacks the last.
MARKS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("<|channel>thought", "<channel|>"),
)
BARE_SETS = ("code", "chat")  # sets whose prompts ask nothing but their content


def shown(value: object) -> str:
    """Quote a value from a report in at most 80 ASCII characters; containers by their type and size only."""
    if isinstance(value, dict):
        return f"an object of {len(value)} fields"
    if isinstance(value, list | tuple):
        return f"an array of {len(value)} entries"
    text = ascii(value[: LIMIT + 1] if isinstance(value, str) else value)
    return text if len(text) <= LIMIT else text[: LIMIT - 3] + "..."


def several(values: Sequence[str], limit: int = 5) -> str:
    """Quote the first few values, and say how many more there are."""
    more = f" and {len(values) - limit} more" if len(values) > limit else ""
    return ", ".join(map(shown, values[:limit])) + more


def text_digest(text: str) -> str:
    """sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def tokens_digest(tokens: Sequence[int]) -> str:
    """sha256 of the tokens as ASCII decimals joined by single spaces."""
    return text_digest(" ".join(map(str, tokens)))


def prompt_set(prompt_id: str) -> str:
    """The set a prompt belongs to: its id without the number at the end."""
    return re.sub(r"[-_.:/]?[0-9]+\Z", "", prompt_id)


def degeneration(tokens: Sequence[int]) -> str | None:
    """How an output degenerates into repetition, or None when it does not.

    A tail of at least 48 tokens that repeats a cycle of up to 16 tokens three times, or one of up to 64
    tokens four times, is a loop. So is an output of at least 96 tokens in which fewer than 0.3 of the
    16-token windows differ: code repeats lines, but hardly ever sixteen tokens in a row.
    """
    if (loop := _loop(tokens)) is not None:
        return f"the last {loop[0]} of {len(tokens)} tokens repeat a cycle of {loop[1]}"
    if len(tokens) >= WINDOWED_TOKENS:
        windows = [tuple(tokens[i : i + WINDOW]) for i in range(len(tokens) - WINDOW + 1)]
        share = len(set(windows)) / len(windows)
        if share < DISTINCT_SHARE:
            return f"only {share:.0%} of the {WINDOW}-token windows in {len(tokens)} tokens differ"
    return None


@lru_cache(maxsize=10_000)  # of each row it is asked several times
def loop_start(tokens: tuple[int, ...]) -> int | None:
    """Where a text that degenerates begins to say nothing new, or None where it does not degenerate.

    A cycle has been said once by then. Of windows, the first that was there before.
    """
    if degeneration(tokens) is None:
        return None
    if (loop := _loop(tokens)) is not None:
        return len(tokens) - loop[0] + loop[1]
    seen: set[tuple[int, ...]] = set()
    for start in range(len(tokens) - WINDOW + 1):
        window = tuple(tokens[start : start + WINDOW])
        if window in seen:
            return start
        seen.add(window)
    return len(tokens)


def final_number(text: str) -> str | None:
    """The number a worked answer ends with: behind ``####``, else the last before another question.

    Written without separators and needless zeros, so that equal numbers are equal texts.
    """
    answer = text.split("\nQuestion:", 1)[0]
    _, marked, behind = answer.partition("####")
    found = re.findall(r"-?[0-9][0-9,]*(?:\.[0-9]+)?", behind if marked else answer)
    if not found:
        return None
    number = format(Decimal((found[0] if marked else found[-1]).replace(",", "")), "f")
    return number.rstrip("0").rstrip(".") if "." in number else number


def _loop(tokens: Sequence[int]) -> tuple[int, int] | None:
    """The length of the tail that loops, and of its cycle."""
    for cycle in range(1, LONG_CYCLE + 1):
        tail = _periodic_tail(tokens, cycle)
        if tail >= max(LOOP_TOKENS, (3 if cycle <= SHORT_CYCLE else 4) * cycle):
            return tail, cycle
    return None


def _periodic_tail(tokens: Sequence[int], cycle: int) -> int:
    """Length of the longest tail that repeats its first `cycle` tokens, those included."""
    start = len(tokens)
    while start > cycle and tokens[start - 1] == tokens[start - 1 - cycle]:
        start -= 1
    return len(tokens) - start + cycle


def without_reasoning(text: str, opened: int | None = None) -> str:
    """The text without reasoning; `opened`: which of `MARKS` the prompt ended with, if any."""
    rest = text
    for number, (begin, end) in enumerate(MARKS):
        head, mark, tail = rest.partition(end)
        if number == opened or (mark and begin not in head):
            rest = tail
        rest = re.sub(rf"{re.escape(begin)}.*?(?:{re.escape(end)}|\Z)", "", rest, flags=re.DOTALL)
    return text if rest == text else rest.strip()


def opened_variants(text: str) -> frozenset[str]:
    """What may be left of a text whose reasoning the prompt opened."""
    return frozenset(without_reasoning(text, number) for number in range(len(MARKS)))
