"""What a text leaves without its reasoning, as the engine means it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.evaluation.prompts import answer_of
from evidence_format.text import MARKS, opened_variants, without_reasoning

PIECES = [mark for pair in MARKS for mark in pair] + ["a", " ", "\n", "48", "21", "<", "think>"]


class Tail:
    """A tokenizer to which every prompt ends in one text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def decode(self, _tokens: Any) -> str:
        return self._text


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("plain", "plain"),
        (" spaced ", " spaced "),
        ("<think>hm</think>\n 48", "48"),
        ("48 <think>hm", "48"),
        ("hm</think>48", "48"),
        ("<think>a</think>4<think>b</think>8", "48"),
        ("[THINK]a[/THINK]48", "48"),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>48", "48"),
        ("<|channel>thought\na<channel|>48", "48"),
    ],
)
def test_reasoning_is_the_text_between_the_marks(text: str, left: str) -> None:
    assert without_reasoning(text) == left


@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=6), opened=st.none() | st.integers(0, len(MARKS) - 1)
)
def test_what_the_engine_leaves_is_a_variant_the_gate_takes(pieces: list[str], opened: int | None) -> None:
    text = "".join(pieces)
    tail = "user:" if opened is None else MARKS[opened][0]
    answer = answer_of(Tail(tail), [1], text)
    assert answer == without_reasoning(text, opened)
    assert answer in {without_reasoning(text), *opened_variants(text)}
