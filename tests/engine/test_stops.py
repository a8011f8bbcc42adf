"""Texts end at stop tokens and stop strings, to the token and to the character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.utils import load_tokenizer

from engine.detokenize import TextStream, text_of
from engine.errors import ConfigurationError
from engine.stops import Stops
from tests.engine import tiny


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.save_tokenizer(Path(folder))
    return load_tokenizer(folder, eos_token_ids=[tiny.EOS])


def ids(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def test_a_stop_token_ends_the_text_and_is_counted():
    stops = Stops({7})
    assert stops.find([5, 6]) is None
    assert stops.find([5, 7, 7, 8]) == 2


def test_a_stop_string_is_found_across_rounds_at_the_token_that_completes_it(tokenizer):
    stops = Stops(texts=["END", "stop"], tokenizer=tokenizer)
    first, second = ids(tokenizer, "so far E"), ids(tokenizer, "ND and more")
    assert stops.find(first) is None
    assert stops.find(second) == 2
    stops.start()
    assert stops.find(second) is None, "a new text must not remember the one before"


def test_the_text_ends_before_the_stop_string_however_it_arrives(tokenizer):
    text = "one two three four"
    tokens = ids(tokenizer, text)
    for stop, shown in [("three", "one two "), ("two t", "one "), ("five", text), ("r", "one two th")]:
        stops = Stops(texts=[stop], tokenizer=tokenizer)
        for size in (1, 2, 5, 30):
            stream = TextStream(tokenizer, stops)
            pieces = [stream.add(tokens[at : at + size]) for at in range(0, len(tokens), size)]
            assert "".join(pieces) + stream.finish() == shown, (stop, size)
        assert text_of(tokenizer, tokens, stops) == shown


@given(st.text(alphabet="abé ", max_size=20), st.lists(st.text("abé", min_size=1, max_size=3), max_size=3))
def test_streamed_text_is_the_text_up_to_the_first_stop_string(tokenizer, text, texts):
    stops = Stops(texts=texts, tokenizer=tokenizer)
    stream = TextStream(tokenizer, stops)
    shown = "".join(stream.add([token]) for token in ids(tokenizer, text)) + stream.finish()
    whole = text_of(tokenizer, ids(tokenizer, text), Stops())
    expected = whole
    for length in range(len(whole) + 1):  # the first stop string to be complete ends the text
        ends = [whole[:length].find(stop) for stop in texts if stop in whole[:length]]
        if ends:
            expected = whole[: min(ends)]
            break
    assert shown == expected


def test_what_cannot_be_found_is_refused(tokenizer):
    with pytest.raises(ConfigurationError, match="must not be empty"):
        Stops(texts=["a", ""], tokenizer=tokenizer)
    with pytest.raises(ConfigurationError, match="need a tokenizer"):
        Stops(texts=["a"])
