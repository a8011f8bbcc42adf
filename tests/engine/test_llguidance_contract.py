"""What we rely on in llguidance. A new version must pass here first."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer

from engine.target.loading import load_target
from tests.engine import tiny

SCHEMA = {"type": "array", "items": {"enum": ["ab", "abc", 12]}, "maxItems": 4}
SIZE = tiny.VOCAB


@pytest.fixture(scope="module")
def tokenizer(folders: Any) -> LLTokenizer:
    loaded = load_target(folders[0])
    return from_tokenizer(loaded.tokenizer._tokenizer, SIZE, sorted(loaded.stops))


def matcher_of(tokenizer: LLTokenizer, schema: Any) -> LLMatcher:
    source = LLMatcher.grammar_from_json_schema(schema)
    return LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(verbose_errors=False))


def allowed(matcher: LLMatcher) -> list[int]:
    mask = matcher.compute_bitmask()
    return [index for index in range(8 * len(mask)) if mask[index // 8] >> index % 8 & 1]


def test_the_version_is_one_of_those_we_know():
    assert version("llguidance").startswith("1.")


def test_a_mask_has_whole_words_of_32_bits_and_none_for_rows_without_a_token(tokenizer: LLTokenizer):
    matcher = matcher_of(tokenizer, {"type": "string"})
    mask = matcher.compute_bitmask()
    assert len(mask) % 4 == 0
    assert 8 * len(mask) >= SIZE
    matcher.try_consume_tokens(tokenizer.tokenize_str('"'))
    assert max(allowed(matcher)) < len(tiny_tokens())


def tiny_tokens() -> range:
    """Special tokens and one a byte."""
    return range(7 + 256)


def test_every_end_is_allowed_where_the_text_is_complete_and_nowhere_else(tokenizer: LLTokenizer):
    matcher = matcher_of(tokenizer, SCHEMA)
    assert matcher.try_consume_tokens(tokenizer.tokenize_str('["ab"')) == 5
    assert not {tiny.EOS, tiny.END} & set(allowed(matcher))
    assert matcher.try_consume_tokens(tokenizer.tokenize_str("]")) == 1
    assert allowed(matcher) == [tiny.EOS, tiny.END]
    assert matcher.try_consume_tokens([tiny.EOS]) == 0  # at times 1, which is why ends are not told to it


def test_a_token_is_taken_in_if_and_only_if_the_mask_allows_it(tokenizer: LLTokenizer):
    matcher = matcher_of(tokenizer, SCHEMA)
    for text in ("[", '"', "a", "b", '"', ",", "1", "2"):
        mask = set(allowed(matcher)) - {tiny.EOS, tiny.END}
        taken = set()
        for token in tiny_tokens():
            if token not in (tiny.EOS, tiny.END) and matcher.try_consume_tokens([token]):
                taken.add(token)
                assert matcher.rollback(1)
        assert taken == mask
        assert matcher.try_consume_tokens(tokenizer.tokenize_str(text)) == 1


def test_what_is_refused_leaves_no_trace_and_what_was_taken_in_can_be_rolled_back(tokenizer: LLTokenizer):
    matcher, texts = matcher_of(tokenizer, SCHEMA), tokenizer.tokenize_str('["abc", 12]')
    masks = []
    for token in texts:
        masks.append(allowed(matcher))
        assert matcher.try_consume_tokens([token, 250, token]) == 1
        assert not matcher.is_error()
    assert matcher.is_stopped()
    for mask in reversed(masks):
        assert matcher.rollback(1)
        assert allowed(matcher) == mask
    assert matcher.try_consume_tokens(texts) == len(texts)
    assert matcher.rollback(len(texts))
    assert allowed(matcher) == masks[0]


def test_a_copy_goes_its_own_way(tokenizer: LLTokenizer):
    matcher = matcher_of(tokenizer, SCHEMA)
    before, copy = allowed(matcher), matcher.deep_copy()
    copy.try_consume_tokens(tokenizer.tokenize_str("["))
    assert allowed(matcher) == before != allowed(copy)


def test_a_bad_grammar_makes_no_exception_but_an_error_to_ask_for(tokenizer: LLTokenizer):
    matcher = matcher_of(tokenizer, {"type": "nope"})
    assert matcher.is_error()
    assert matcher.get_error() == "Invalid type: nope"
    empty = matcher_of(tokenizer, {"$ref": "#"})
    assert not empty.is_error()
    empty.compute_bitmask()
    assert empty.get_error().startswith("NoExtensionBias")


def test_options_given_beside_a_schema_go_before_its_own(tokenizer: LLTokenizer):
    own = {"type": "string", "not": {}, "x-guidance": {"lenient": True}}
    source = LLMatcher.grammar_from_json_schema(own, overrides={"lenient": False})
    assert "Unimplemented" in LLMatcher(tokenizer, source, log_level=0).get_error()


def test_there_is_a_tokenizer_of_bytes():
    assert LLTokenizer("byte").vocab_size > 256
