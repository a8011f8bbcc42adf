"""Texts and stop strings are those of a tokenizer that decodes everything at once, for every kind of one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.detokenize import IncrementalDecoder, TextStream, text_of
from engine.stops import Stops
from tests.engine import tokenizers

OTHER_STOPS = ("zzzz", " ", "\ufffd", "好", "\n", "e ", " 's")


@pytest.fixture(scope="module", params=tokenizers.KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizers.load(request.param, tmp_path_factory.mktemp("tokenizers") / request.param)


def draw_tokens(data: st.DataObject, tokenizer: Any) -> list[int]:
    """Any tokens, pieces of readable text, or both."""
    readable = tokenizers.ids(tokenizer, tokenizers.FEW)
    at = data.draw(st.integers(0, len(readable) - 1))
    text = readable[at : at + data.draw(st.integers(0, 12))]
    odd = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=6))
    where = data.draw(st.integers(0, len(text)))
    return [*text[:where], *odd, *text[where:]]


def draw_stops(data: st.DataObject, whole: str) -> list[str]:
    """Parts of the text and others."""
    parts = st.builds(lambda at, size: whole[at : at + size], st.integers(0, len(whole)), st.integers(1, 5))
    drawn = data.draw(st.lists(parts | st.sampled_from(OTHER_STOPS), max_size=4))
    return [stop for stop in drawn if stop]


@pytest.mark.sampled(5, 1)
@given(st.data())
def test_stop_strings_are_found_where_decoding_everything_finds_them(tokenizer: Any, data: st.DataObject):
    tokens = draw_tokens(data, tokenizer)
    texts = draw_stops(data, tokenizer.decode(tokens))
    found, text = tokenizers.oracle(tokenizer, tokens, texts)
    for order in (texts, texts[::-1]):
        stops = Stops((), order, tokenizer)
        assert stops.find(tokens) == found
        stops.start()
        one_by_one = (count for count, token in enumerate(tokens, 1) if stops.find([token]))
        assert next(one_by_one, None) == found
        assert text_of(tokenizer, tokens, stops) == text


@pytest.mark.sampled(3, 1)
@given(st.data())
def test_streamed_text_is_the_whole_text_in_pieces(tokenizer: Any, data: st.DataObject):
    tokens = draw_tokens(data, tokenizer)
    whole = tokenizer.decode(tokens)
    stream, shown, at = TextStream(tokenizer, Stops()), "", 0
    while at < len(tokens):
        size = data.draw(st.integers(1, 5))
        shown += stream.add(tokens[at : at + size])
        assert whole.startswith(shown)
        assert stream.given == len(shown)
        at += size
    assert shown + stream.finish() == whole
    assert stream.begins == sorted(stream.begins)


@pytest.mark.sampled(5, 1)
@given(st.data())
def test_a_text_behind_a_prompt_is_what_it_adds_to_the_whole(tokenizer: Any, data: st.DataObject):
    tokens = draw_tokens(data, tokenizer)
    prompt = tokenizers.ids(tokenizer, data.draw(st.sampled_from(["capital", "The one and one", "3 is one"])))
    whole, before = tokenizer.decode([*prompt, *tokens]), tokenizer.decode(prompt)
    text = text_of(tokenizer, tokens, Stops(), prompt)
    assert before + text == whole
    stops = Stops((), draw_stops(data, text), tokenizer)
    stops.start(prompt)
    assert stops.find(tokens) == tokenizers.oracle(tokenizer, tokens, stops.texts, prompt)[0]


def test_the_first_space_is_kept_behind_a_prompt(tokenizer: Any):
    prompt, whole = (tokenizers.ids(tokenizer, text) for text in ("the capital", "the capital Paris"))
    tokens = whole[len(prompt) :]
    assert whole[: len(prompt)] == prompt
    assert text_of(tokenizer, tokens, Stops(), prompt) == " Paris"
    for stop in (" Paris", " ", "Paris"):
        stops = Stops((), [stop], tokenizer)
        stops.start(prompt)
        assert stops.find(tokens) == 1, stop
        assert text_of(tokenizer, tokens, stops, prompt) == " Paris"[: " Paris".index(stop)]


def test_tokens_begin_where_their_text_does(tokenizer: Any):
    prompt = tokenizers.ids(tokenizer, "one")
    tokens = tokenizers.ids(tokenizer, "one Paris, 你好 é two")[len(prompt) :]
    stream = TextStream(tokenizer, Stops(), prompt)
    text = stream.add(tokens) + stream.finish()
    ends = [*stream.begins[1:], len(text)]
    pieces = [text[begin:end] for begin, end in zip(stream.begins, ends, strict=True)]
    assert "".join(pieces) == text
    for token, piece in zip(tokens, pieces, strict=True):
        alone = text_of(tokenizer, [token], Stops(), prompt)
        assert piece == alone or "\ufffd" in alone or piece in alone


def test_text_is_final_as_soon_as_nothing_can_change_it(tmp_path: Any):
    tokenizer = tokenizers.load("byte-level", tmp_path / "tokenizer")
    decoder = IncrementalDecoder(tokenizer)
    smile = tokenizers.ids(tokenizer, "🙂")
    assert [decoder.add(token) for token in tokenizers.ids(tokenizer, "a ")] == ["a", " "]
    assert [decoder.add(token) for token in smile] == ["", "", "", "🙂"]


def test_a_bad_byte_makes_the_bytes_before_it_unreadable(tmp_path: Any):
    tokenizer = tokenizers.load("sentencepiece", tmp_path / "tokenizer")
    numbers = {token: number for token, number in tokenizer.get_vocab().items() if token.startswith("<0x")}
    smile = [numbers[f"<0x{value:02X}>"] for value in "🙂".encode()]
    letter = tokenizers.ids(tokenizer, "a")
    assert text_of(tokenizer, [*smile, *letter], Stops()) == "🙂a"
    assert text_of(tokenizer, [*smile, numbers["<0xFF>"], *letter], Stops()) == "\ufffd" * 5 + "a"


def test_every_byte_of_a_byte_level_tokenizer_is_itself(tmp_path: Any):
    from tokenizers.pre_tokenizers import ByteLevel

    tokenizer = tokenizers.load("byte-level", tmp_path / "tokenizer")
    vocabulary, letters = tokenizer.get_vocab(), ByteLevel.alphabet()
    assert len(letters) == 256
    texts = [text_of(tokenizer, [vocabulary[letter]], Stops()) for letter in letters]
    assert texts == [tokenizer.decode([vocabulary[letter]]) for letter in letters]
    assert sorted(text for text in texts if text != "\ufffd") == [chr(value) for value in range(128)]
