"""A model's text without its reasoning: what an answer may be sought in.

Reasoning is what stands between the marks of a literal table, the marks included. The first mark may be
missing because the chat template wrote it into the prompt, the last because the text was cut short.
"""

from __future__ import annotations

# (begin, end) of reasoning.
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


def without_reasoning(text: str, opened: int | None = None) -> str:
    """The text without reasoning, and then without white space around it.

    Args:
        text: What a model wrote.
        opened: Which of `MARKS` the prompt had begun, if it had.
    """
    rest = text
    for number, (begin, end) in enumerate(MARKS):
        head, mark, tail = rest.partition(end)
        if number == opened or (mark and begin not in head):
            rest = tail
        rest = _cut(rest, begin, end)
    return text if rest == text else rest.strip()


def _cut(text: str, begin: str, end: str) -> str:
    """The text without what stands between two marks, however often; the last end may be missing."""
    kept, at = [], 0
    while (start := text.find(begin, at)) >= 0:
        kept.append(text[at:start])
        stop = text.find(end, start)
        if stop < 0:
            return "".join(kept)
        at = stop + len(end)
    return "".join([*kept, text[at:]])


def opened_variants(text: str) -> frozenset[str]:
    """What may be left of a text whose reasoning the prompt had begun."""
    return frozenset(without_reasoning(text, number) for number in range(len(MARKS)))
