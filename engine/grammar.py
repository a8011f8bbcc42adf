"""Grammars: which tokens may follow, by JSON Schema or Lark, as a logits processor of the round loop.

Masks are llguidance's. A text may end where the grammar says it is complete and nowhere else; ``max_tokens``
may cut it before. No schema is fetched from anywhere. Speculation stays exact: every row of a block is masked
as the drafts before it require, and a draft that leaves the grammar has no probability in its own row, so
that the rows behind it are never looked at.
"""

import json
import re
import sys
from array import array
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from engine import grammar_trial
from engine.child import printed_by
from engine.device import read_tail
from engine.errors import ConfigurationError, GenerationError, wrap_errors
from engine.grammar_trial import new_matcher

LONGEST = 65_536  # characters of a schema or grammar
# Tokens by their ids, which the trial's vocabulary of bytes does not have: one of its own replaces them.
NAMED, STAND_IN = re.compile(r"<\[[0-9]{1,7}\]>"), "<[257]>"
REMEMBERED = 32  # compiled grammars of a vocabulary
# Between JSON's tokens: nothing, a space, or a new line and its indentation. More would let a model go on
# with blanks for ever. Other styles a schema may ask llguidance for make texts that do not satisfy it.
JSON_STYLE = {
    "whitespace_pattern": r"( |\r?\n[ \t]{0,32})",
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}


class Vocabulary:
    """A model's tokens as llguidance needs them; made once a model, for it takes up to seconds.

    Vocabularies, grammars and processors may be made in any thread and used in another.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """Read mlx-lm's wrapper of a fast tokenizer; rows of the head without a token are never allowed."""
        self.ends = tuple(sorted(tokenizer.eos_token_ids))
        refused = "this model's tokenizer cannot follow grammars"
        with wrap_errors(lambda why: ConfigurationError(f"{refused}: {why}")):
            self._tokenizer = from_tokenizer(tokenizer._tokenizer, vocab_size, list(self.ends))
        self.ends_only = mx.array([[index in self.ends for index in range(vocab_size)]])  # bool [1, V]
        self.compiled = lru_cache(REMEMBERED)(self._compiled)

    def _compiled(self, source: str) -> LLMatcher:
        """A matcher of a grammar in llguidance's own JSON, to be copied and not used."""
        program = [sys.executable, "-I", str(Path(grammar_trial.__file__))]
        printed = printed_by(program, given=NAMED.sub(STAND_IN, source))
        if printed is None:
            raise _unusable("it takes too much time or memory to prepare, or is nested too deeply")
        with wrap_errors(_unusable):
            _check(json.loads(printed))
            matcher = new_matcher(self._tokenizer, source)
            _check(matcher.get_error())
        return matcher


class Grammar:
    """What a text has to be; serves any number of texts."""

    def __init__(self, vocabulary: Vocabulary, source: str) -> None:
        """Compile a grammar in llguidance's own JSON; ConfigurationError where it cannot be used."""
        self._vocabulary = vocabulary
        self._matcher = vocabulary.compiled(source)

    @classmethod
    def json_schema(cls, vocabulary: Vocabulary, schema: Mapping[str, Any]) -> "Grammar":
        """JSON that satisfies a schema; ConfigurationError for one that cannot be enforced or satisfied."""
        with wrap_errors(_unusable):
            text = _checked_length(json.dumps(schema, allow_nan=False))
            source = LLMatcher.grammar_from_json_schema(
                text,
                overrides=JSON_STYLE,  # type: ignore[arg-type]  # its type has no name outside of stubs
            )
        return cls(vocabulary, nameless(source))

    @classmethod
    def json_object(cls, vocabulary: Vocabulary) -> "Grammar":
        """Any JSON object."""
        return cls.json_schema(vocabulary, {"type": "object"})

    @classmethod
    def lark(cls, vocabulary: Vocabulary, text: str) -> "Grammar":
        """A context-free grammar in llguidance's dialect of Lark; ``<[ID]>`` names a token by its id."""
        with wrap_errors(_unusable):
            source = LLMatcher.grammar_from_lark(_checked_length(text))
        return cls(vocabulary, source)

    def processor(self, prompt_length: int) -> "Mask":
        """A logits processor for one text, which begins behind so many tokens."""
        return Mask(self._vocabulary, self._matcher.deep_copy(), prompt_length)


class Mask:
    """A logits processor of the round loop: forbids what would leave the grammar, in one text.

    It has to be called as the loop does: row by row, each with one token more than the last, and from where a
    round's first row was with tokens that stay.
    """

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher, prompt_length: int) -> None:
        self._vocabulary, self._matcher, self._prompt_length = vocabulary, matcher, prompt_length
        self._known: list[int] = []  # generated tokens as of the last row, drafts among them
        self._settled = 0  # so many of them will not change
        self._consumed = 0  # so many of them the matcher has read

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Mask logits [1, V] after prompt and text so far [N]; tokens not known yet are waited for."""
        self._follow(tokens)
        if self._consumed < len(self._known):  # behind a token that ended the text or left the grammar
            return mx.where(self._vocabulary.ends_only, logits, -mx.inf)
        words = array("I", self._matcher.compute_bitmask())
        if self._matcher.is_error():
            why = _words(self._matcher.get_error(), "the model has no token for what has to come")
            raise GenerationError(f"the grammar cannot be followed further: {why}")
        packed = mx.array(words)  # type: ignore[arg-type]  # the stub does not know the buffer protocol
        allowed = (packed[:, None] >> mx.arange(32, dtype=mx.uint32)) & 1  # [words, 32], low bit first
        return mx.where(allowed.reshape(1, -1)[:, : logits.shape[-1]] == 1, logits, -mx.inf)

    def _follow(self, tokens: mx.array) -> None:
        """Bring the matcher to the end of these tokens, or as near as it goes."""
        count, before = int(tokens.shape[0]) - self._prompt_length, len(self._known)
        start = before
        if count != before + 1:  # the first row of a round: of the last one's drafts some were refused
            start = min(self._settled, count)
            self._settled = count
        fresh = read_tail(tokens, self._prompt_length + start)
        pairs = enumerate(zip(self._known[start:], fresh, strict=False))
        shorter = min(before - start, len(fresh))
        same = start + next((index for index, (old, new) in pairs if old != new), shorter)
        self._known[same:] = fresh[same - start :]
        if self._consumed > same:
            self._matcher.rollback(self._consumed - same)
            self._consumed = same
        fresh = self._known[self._consumed :]  # an end is not told to the matcher
        ends = (index for index, token in enumerate(fresh) if token in self._vocabulary.ends)
        self._consumed += self._matcher.try_consume_tokens(fresh[: next(ends, len(fresh))])


def regex_rule(regex: str) -> str:
    """A regular expression as the right side of a rule in Lark; ConfigurationError for one that is none."""
    with wrap_errors(_unusable):
        source = json.loads(LLMatcher.grammar_from_regex(_checked_length(regex)))
        return str(source["grammars"][0]["lark_grammar"]).removeprefix("start: ")


def nameless(text: str) -> str:
    """The same JSON with no string that looks like the name of a token, since the trial replaces these."""
    return text.replace("<[", r"\u003c[")


def _unusable(why: str) -> ConfigurationError:
    return ConfigurationError(f"the grammar cannot be used: {why}")


def _checked_length(text: str) -> str:
    if len(text) > LONGEST:
        raise _unusable(f"it has {len(text)} characters, more than {LONGEST}")
    return text


def _check(reason: str) -> None:
    if reason:
        raise ValueError(_words(reason, "no text satisfies it"))


def _words(reason: str, nothing: str) -> str:
    """What llguidance says, or ``nothing`` where by its name for that nothing may follow."""
    said = reason.removesuffix("<non-verbose/>").strip()
    return nothing if said == "NoExtensionBias" else said
