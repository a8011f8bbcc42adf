"""Reasoning, tool calls and stop strings are told apart as the text grows, however it is cut into tokens."""

from __future__ import annotations

from typing import Any

import pytest

from engine.server.parsing import OutputParser, ParsedText
from engine.stops import Stops
from engine.target.loading import load_target
from tests.engine.server import by_heart


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Of a model with reasoning and tools."""
    return load_target(by_heart.FOLDER).tokenizer


def said(tokenizer: Any, text: str, *, stops: tuple[str, ...] = (), **switches: Any) -> ParsedText:
    """All of a text, fed token by token."""
    parser = OutputParser(tokenizer, Stops((2, 7), stops, tokenizer), **switches)
    whole = ParsedText()
    pieces = [parser.add([token]) for token in tokenizer.encode(text, add_special_tokens=False)]
    for piece in [*pieces, parser.finish()]:
        whole.content += piece.content
        whole.reasoning += piece.reasoning
        whole.calls += piece.calls
    return whole


def test_plain_text_is_content(tokenizer: Any):
    assert said(tokenizer, "a < b and <tool_ca").content == "a < b and <tool_ca"


def test_reasoning_is_separated(tokenizer: Any):
    found = said(tokenizer, "<think>why</think>so")
    assert (found.reasoning, found.content) == ("why", "so")
    begun = said(tokenizer, "why</think>so", state="reasoning")
    assert (begun.reasoning, begun.content) == ("why", "so")
    cut = said(tokenizer, "<think>why not")
    assert (cut.reasoning, cut.content) == ("why not", "")


def test_calls_are_parsed_and_invalid_ones_stay_text(tokenizer: Any):
    good = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    found = said(tokenizer, f"Let me see. {good}{good}")
    assert found.content == "Let me see. "
    assert [(call.function.name, call.function.arguments) for call in found.calls] == [("f", '{"x": 1}')] * 2
    assert [call.index for call in found.calls] == [0, 1]
    assert len({call.id for call in found.calls}) == 2
    for bad in ("{not json}", "[1, 2]", '{"arguments": {}}', '{"name": 3}', "", "null"):
        found = said(tokenizer, f"<tool_call>{bad}</tool_call>!")
        assert (found.content, found.calls) == (f"{bad}!", [])


def test_a_call_that_was_cut_short_is_no_call_unless_it_is_whole(tokenizer: Any):
    whole = said(tokenizer, '<tool_call>{"name": "f", "arguments": {}}')
    assert [call.function.name for call in whole.calls] == ["f"]
    half = said(tokenizer, '<tool_call>{"name": "f", "argu')
    assert (half.calls, half.content) == ([], '{"name": "f", "argu')


def test_a_stop_string_cuts_the_text_where_it_begins(tokenizer: Any):
    assert said(tokenizer, "one two three", stops=("two",)).content == "one "
    assert said(tokenizer, "one tw", stops=("two",)).content == "one tw"


def test_plain_passes_marks_on(tokenizer: Any):
    text = "<think>why</think><tool_call>x</tool_call>"
    assert said(tokenizer, text, plain=True).content == text
