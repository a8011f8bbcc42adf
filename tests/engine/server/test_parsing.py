"""Reasoning, tool calls and stop strings are told apart as the text grows, however it is cut into tokens."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_lm.tool_parsers import qwen3_coder

from engine.server.parsing import OutputParser, ParsedText
from engine.stops import Stops
from engine.target.loading import load_target
from tests.engine.server import by_heart


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Of a model with reasoning and tools."""
    return load_target(by_heart.FOLDER).tokenizer


def said(
    tokenizer: Any, text: str, *, stops: tuple[str, ...] = (), cut: bool = False, **switches: Any
) -> ParsedText:
    """All of a text, fed token by token."""
    parser = OutputParser(tokenizer, Stops((2, 7), stops, tokenizer), **switches)
    whole = ParsedText()
    pieces = [parser.add([token]) for token in tokenizer.encode(text, add_special_tokens=False)]
    for piece in [*pieces, parser.finish(cut=cut)]:
        whole += piece
    return whole


def calls_in(parsed: ParsedText) -> list[tuple[str, str, bool]]:
    """Name and arguments of each call, and whether it came to its end."""
    return [(head.name, piece.text, piece.complete) for head, piece in parsed.calls]


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
    assert calls_in(found) == [("f", '{"x": 1}', True)] * 2
    assert [head.index for head, _ in found.calls] == [0, 1]
    assert len({head.id for head, _ in found.calls}) == 2
    for bad in ("{not json}", "[1, 2]", '{"arguments": {}}', '{"name": 3}', "", "null"):
        found = said(tokenizer, f"<tool_call>{bad}</tool_call>!")
        assert (found.content, found.calls) == (f"{bad}!", [])


def test_a_call_that_was_cut_short_is_no_call_unless_it_is_whole(tokenizer: Any):
    whole = said(tokenizer, '<tool_call>{"name": "f", "arguments": {}}')
    assert calls_in(whole) == [("f", "{}", True)]
    half = said(tokenizer, '<tool_call>{"name": "f", "argu')
    assert (half.calls, half.content) == ([], '{"name": "f", "argu')


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Os', [("weather", '{"city": "Os', False)]),
        ('<tool_call>{"name": "weather", "arguments": {}}', [("weather", "{}", True)]),
        ('<tool_call>{"name": "weather", "argu', [("weather", "", False)]),
        ('<tool_call>{"name": "wea', []),
        ("<tool_call>", []),
        ("<tool_cal", []),
        ("<", []),
    ],
)
def test_a_call_that_was_cut_off_is_a_call_once_its_tool_is_known(tokenizer: Any, text: str, calls: Any):
    found = said(tokenizer, text, cut=True, tools=[by_heart.WEATHER])
    assert (calls_in(found), found.content) == (calls, "")


def test_of_other_families_a_call_comes_whole_or_with_the_text_there_is():
    tokenizer = load_target(by_heart.FOLDER).tokenizer
    tokenizer._tool_parser = qwen3_coder.parse_tool_call
    begun = "<tool_call>\n<function=weather>\n<parameter=city>\nOs"
    whole = f"{begun}lo\n</parameter>\n</function>\n"
    tools = {"tools": [by_heart.WEATHER]}
    assert calls_in(said(tokenizer, f"{whole}</tool_call>", **tools)) == [
        ("weather", '{"city": "Oslo"}', True)
    ]
    found = said(tokenizer, begun, cut=True, **tools)
    ((name, text, complete),) = calls_in(found)
    assert (name, complete, found.content) == ("weather", False, "")
    assert text.endswith("<parameter=city>\nOs")
    longer = {"type": "function", "function": {"name": "weather_at"}}
    for text in ("<function=weath", "<function=weather", "<function=weather_a"):  # either of the two
        found = said(tokenizer, f"<tool_call>\n{text}", cut=True, tools=[by_heart.WEATHER, longer])
        assert calls_in(found) == []
    text = "<tool_call>\n<function=weather_at>\n<param"
    found = said(tokenizer, text, cut=True, tools=[by_heart.WEATHER, longer])
    assert [name for name, *_ in calls_in(found)] == ["weather_at"]


def test_arguments_are_passed_on_as_they_are_written(tokenizer: Any):
    written = '{"a": {"b": "}\\"{"}, "c": [1, {}]}'
    head, tail = '<tool_call>{ "name" : "f", "arguments": ', ', "more": {}}</tool_call>'
    assert calls_in(said(tokenizer, head + written + tail)) == [("f", written, True)]
    wrong = '{"city": Oslo}'
    assert calls_in(said(tokenizer, f"{head}{wrong}}}</tool_call>")) == [("f", wrong, True)]


def test_arguments_that_are_no_object_come_at_the_end_of_the_call(tokenizer: Any):
    for written, told in (('"{\\"x\\": 1}"', '{"x": 1}'), ("[1]", "[1]"), ("null", "null")):
        text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
        assert calls_in(said(tokenizer, text)) == [("f", told, True)]
    turned = '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>'
    assert calls_in(said(tokenizer, turned)) == [("f", '{"x": 1}', True)]


def test_pieces_keep_their_order(tokenizer: Any):
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    found = said(tokenizer, f"<think>why</think>before{call}after{call}")
    assert [piece.kind for piece in found.pieces] == ["reasoning", "content", "call", "content", "call"]
    one = said(tokenizer, f"before{call}after{call}", most_calls=1)
    assert [piece.kind for piece in one.pieces] == ["content", "call", "content"]


def test_a_stop_string_cuts_the_text_where_it_begins(tokenizer: Any):
    assert said(tokenizer, "one two three", stops=("two",)).content == "one "
    assert said(tokenizer, "one tw", stops=("two",)).content == "one tw"


def test_plain_passes_marks_on(tokenizer: Any):
    text = "<think>why</think><tool_call>x</tool_call>"
    assert said(tokenizer, text, plain=True).content == text
