"""Constrained text: what may follow and nothing else, with speculation the same as without; always valid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import jsonschema
import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from engine.config import Engine, Options, open_engine
from engine.decode import Processor, Step, decode
from engine.draft_length import AdaptiveDraftLength, FixedDraftLength
from engine.drafters.autoregressive import Autoregressive
from engine.drafters.prompt_lookup import PromptLookup
from engine.errors import ConfigurationError, GenerationError
from engine.evaluation.prompts import encode, load_prompts
from engine.grammar import Grammar, Vocabulary
from engine.sampling import Sampler, Sampling
from engine.session import Session
from engine.stops import Stops
from engine.target.loading import LoadedTarget, load_target
from tests.engine import tiny
from tests.engine.server import by_heart
from tests.engine.statistics import assert_drawn_from, joint_distribution
from tests.engine.test_decode_sampling import CHOICES, DRAFTERS, PROMPT, small

SCHEMAS: dict[str, dict[str, Any]] = {
    "choice": {"enum": ["add", "remove", 17, None]},
    "pair": {
        "type": "object",
        "properties": {"kind": {"enum": ["add", "remove"]}, "count": {"type": "integer", "maximum": 99}},
        "required": ["kind"],
        "additionalProperties": False,
    },
    "record": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 10},
            "kind": {"enum": ["add", "remove", "list"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        },
        "required": ["name", "kind", "count", "tags"],
        "additionalProperties": False,
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"leaf": {"type": "boolean"}, "next": {"$ref": "#/$defs/end"}},
                "required": ["leaf", "next"],
                "additionalProperties": False,
            },
            "end": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-f]{2,4}$"}]},
        },
        "type": "array",
        "items": {"$ref": "#/$defs/node"},
        "minItems": 1,
        "maxItems": 2,
    },
}


SHORT = ("choice", "pair", "tree")  # also where a model of random weights writes byte by byte


@pytest.fixture(scope="module")
def shipped() -> Engine:
    return open_engine(Options())


@cache
def vocabulary_of(target: LoadedTarget) -> Vocabulary:
    return Vocabulary(target.tokenizer, target.target.vocab_size)


@pytest.fixture(scope="module")
def loaded(folders: Any) -> LoadedTarget:
    """A tiny random model whose tokens are bytes; its vocabulary is larger than its tokenizer's."""
    return load_target(folders[0])


def written(
    target: LoadedTarget, drafter: Any, prompt: Sequence[int], grammar: Grammar, count: int = 150, **more: Any
) -> list[Step]:
    return list(
        decode(
            target.target,
            drafter,
            prompt,
            max_tokens=count,
            stops=Stops(target.stops),
            processors=[grammar.processor(len(prompt))],
            **more,
        )
    )


def tokens_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def value_of(target: LoadedTarget, steps: Sequence[Step]) -> Any:
    """What the JSON says, which ended by itself."""
    *tokens, end = tokens_of(steps)
    assert steps[-1].finish == "stop"
    assert end in target.stops
    return json.loads(target.tokenizer.decode(tokens))


@pytest.mark.sampled(8, 8)
@pytest.mark.parametrize("kind", ["code", "chat"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_the_shipped_pair_writes_what_it_writes_without_a_drafter(shipped: Engine, name: str, kind: str):
    target, schema = shipped.target, SCHEMAS[name]
    assert shipped.drafter is not None
    [prompt] = load_prompts(kind, limit=1)
    tokens = encode(prompt, target.tokenizer, target.target.vocab_size, target.context)
    grammar = Grammar.json_schema(vocabulary_of(target), schema)
    plain = written(target, None, tokens, grammar, draft_length=FixedDraftLength(1))
    jsonschema.validate(value_of(target, plain), schema)
    for draft_length in (
        FixedDraftLength(2),
        FixedDraftLength(6),
        AdaptiveDraftLength(8),
        tiny.Alternating(1),
    ):
        found = written(target, shipped.drafter.drafter, tokens, grammar, draft_length=draft_length)
        assert tokens_of(found) == tokens_of(plain), draft_length


@pytest.mark.sampled(9, 4)
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", SHORT)
def test_drafts_that_leave_the_grammar_change_nothing(loaded: LoadedTarget, name: str, wrong: float):
    prompt = list(b"some words to begin with")
    grammar = Grammar.json_schema(vocabulary_of(loaded), SCHEMAS[name])
    plain = written(loaded, None, prompt, grammar)
    jsonschema.validate(value_of(loaded, plain), SCHEMAS[name])
    accepted = 0
    for block in (2, 5, 12):
        drafter = tiny.ScriptedDrafter(prompt + tokens_of(plain), wrong, seed=block)
        found = written(loaded, drafter, prompt, grammar, draft_length=FixedDraftLength(block))
        assert tokens_of(found) == tokens_of(plain), block
        accepted += sum(step.round.accepted for step in found if step.round)
    assert (accepted > 0) == (wrong < 1)


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("name", SCHEMAS)
def test_drawn_text_is_valid_at_any_temperature(shipped: Engine, name: str):
    target = shipped.target
    assert shipped.drafter is not None
    grammar = Grammar.json_schema(vocabulary_of(target), SCHEMAS[name])
    prompt = target.tokenizer.encode("def ")
    seen = set()
    for seed in range(4):
        sampler = Sampler(Sampling(temperature=1.5 if seed % 2 else 0.7, seed=seed))
        steps = written(
            target,
            shipped.drafter.drafter,
            prompt,
            grammar,
            draft_length=FixedDraftLength(5),
            sampler=sampler,
        )
        value = value_of(target, steps)
        jsonschema.validate(value, SCHEMAS[name])
        seen.add(json.dumps(value))
    assert len(seen) > 1 or name == "choice"  # which may be taken with near certainty


@pytest.mark.slow
def test_a_text_may_be_cut_but_ends_by_itself_only_where_it_is_complete(loaded: LoadedTarget):
    prompt = list(b"words")
    vocabulary = vocabulary_of(loaded)
    grammar = Grammar.json_schema(vocabulary, SCHEMAS["pair"])
    whole = tokens_of(written(loaded, None, prompt, grammar))
    for count in (1, 5, len(whole) - 1):
        for drafter in (None, tiny.ScriptedDrafter(prompt + whole)):
            steps = written(loaded, drafter, prompt, grammar, count=count)
            assert (tokens_of(steps), steps[-1].finish) == (whole[:count], "length")
    mask, level = grammar.processor(len(prompt)), mx.zeros((1, loaded.target.vocab_size))
    for count in range(len(whole)):
        allowed = allowed_by(mask, [*prompt, *whole[:count]], level)
        assert allowed & loaded.stops == (loaded.stops if count == len(whole) - 1 else set())
        assert max(allowed) < len(loaded.tokenizer.get_vocab()), "a row without a token"


def allowed_by(mask: Processor, tokens: Sequence[int], logits: mx.array) -> set[int]:
    row = mask(mx.array(list(tokens), mx.int32), logits)
    return {index for index, value in enumerate(row[0].tolist()) if value == 0}


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_masked_as_by_a_new_mask_whatever_was_drafted_before(loaded: LoadedTarget, seed: int):
    """Blocks of drafts, right, wrong, ending the text too early, refused anywhere."""
    random, prompt = tiny.seeded(seed), [9, 9, 9]
    grammar = Grammar.json_schema(vocabulary_of(loaded), SCHEMAS["record"])
    level = mx.zeros((1, loaded.target.vocab_size))
    mask, text, checked = grammar.processor(3), [], 0
    while len(text) < 60 and not set(text) & loaded.stops:
        path = [*text]
        for row in range(random.choice((1, 1, 3, 6))):
            allowed = allowed_by(mask, [*prompt, *path], level)
            assert allowed == allowed_by(grammar.processor(3), [*prompt, *path], level)
            checked += 1
            if row == 0:
                emitted = random.choice(sorted(allowed))
            likely = random.random() < 0.8
            path.append(
                random.choice(sorted(allowed)) if likely else random.randrange(loaded.target.vocab_size)
            )
        confirmed = 0
        while confirmed < len(path) - len(text) and random.random() < 0.6:
            here = allowed_by(grammar.processor(3), [*prompt, *path[: len(text) + confirmed]], level)
            if path[len(text) + confirmed] not in here:
                break
            confirmed += 1
        text = path[: len(text) + confirmed] if confirmed else [*text, emitted]
    assert checked > 20


def test_behind_its_end_a_text_only_ends_again(loaded: LoadedTarget):
    """Where the ends do not stop the loop, and after drafts that end too early."""
    grammar = Grammar.lark(vocabulary_of(loaded), 'start: "ab" "c"?')
    level, base = mx.zeros((1, loaded.target.vocab_size)), [9]
    a, b, c = loaded.tokenizer.encode("abc", add_special_tokens=False)
    mask = grammar.processor(1)
    assert allowed_by(mask, [*base], level) == {a}
    assert allowed_by(mask, [*base, a], level) == {b}
    assert allowed_by(mask, [*base, a, b], level) == {c, tiny.EOS, tiny.END}
    assert allowed_by(mask, [*base, a, b, tiny.EOS], level) == {tiny.EOS, tiny.END}
    assert allowed_by(mask, [*base, a, b, tiny.EOS, c], level) == {tiny.EOS, tiny.END}
    assert allowed_by(mask, [*base, a, b], level) == {c, tiny.EOS, tiny.END}
    assert allowed_by(mask, [*base, a, b, c], level) == {tiny.EOS, tiny.END}


def test_a_grammar_names_tokens_that_no_text_makes():
    """The marks of reasoning are tokens of their own, which only their numbers allow."""
    loaded = load_target(by_heart.FOLDER)
    begin, end = loaded.tokenizer.think_start_id, loaded.tokenizer.think_end_id
    grammar = Grammar.lark(vocabulary_of(loaded), f'start: (<[{begin}]> /(?s:.*)/ <[{end}]>)? "no"')
    [*no] = loaded.tokenizer.encode("no", add_special_tokens=False)
    level, mask = mx.zeros((1, loaded.target.vocab_size)), grammar.processor(0)
    first = allowed_by(mask, [], level)
    assert {begin, no[0]} <= first
    assert end not in first
    assert end in allowed_by(mask, [begin], level)
    after = allowed_by(mask, [begin, end], level)
    assert no[0] in after
    assert begin not in after
    with pytest.raises(ConfigurationError):
        Grammar.lark(vocabulary_of(loaded), "start: <[999999]>")


def test_any_object_and_other_alphabets(loaded: LoadedTarget):
    vocabulary = vocabulary_of(loaded)
    level = mx.zeros((1, loaded.target.vocab_size))
    [brace] = loaded.tokenizer.encode("{", add_special_tokens=False)
    assert allowed_by(Grammar.json_object(vocabulary).processor(0), [], level) == {brace}
    steps = written(
        loaded, None, [9], Grammar.lark(vocabulary, 'start: "Grüße, 世界"'), draft_length=FixedDraftLength(1)
    )
    assert loaded.tokenizer.decode(tokens_of(steps)[:-1]) == "Grüße, 世界"


def test_a_model_that_cannot_write_what_must_follow_is_told_apart(four_tokens: Vocabulary):
    mask = Grammar.lark(four_tokens, 'start: "a" "x"').processor(0)
    level = mx.zeros((1, 4))
    assert allowed_by(mask, [], level) == {0}
    with pytest.raises(GenerationError, match="followed further: the model has no token"):
        allowed_by(mask, [0], level)


@pytest.fixture(scope="module")
def four_tokens() -> Vocabulary:
    """``a``, ``b``, ``c`` and the end."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "c": 2, "<eos>": 3}, merges=[]))
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    return Vocabulary(TokenizerWrapper(tokenizer, eos_token_ids=[3]), 4)


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("kind", ["dflash", "dflash-near", "prompt-lookup"])
def test_drawn_text_has_the_distribution_that_the_grammar_leaves(four_tokens: Vocabulary, kind: str):
    """Three tokens, drawn with speculation, against the enumeration of all of them row by row."""
    grammar, target, sampling = Grammar.lark(four_tokens, "start: /(ab|b|cc?a)+/"), small(), Sampling(1.0)
    sampler, drawn = Sampler(Sampling(1.0, seed=3)), []
    with Session(target, DRAFTERS[kind](target), headroom=4) as session:
        for _ in range(500):
            steps = decode(
                target,
                session.drafter,
                PROMPT,
                max_tokens=3,
                sampler=sampler,
                draft_length=CHOICES["block 3"](),
                session=session,
                processors=[grammar.processor(len(PROMPT))],
            )
            drawn.append(tuple(tokens_of(list(steps))))

    def fresh_mask(tokens: mx.array, logits: mx.array) -> mx.array:
        return grammar.processor(len(PROMPT))(tokens, logits)

    left = joint_distribution(target.model, PROMPT, sampling, processors=[fresh_mask])
    assert_drawn_from(drawn, left)
    with pytest.raises(AssertionError):  # the grammar makes a difference that shows
        assert_drawn_from(drawn, joint_distribution(target.model, PROMPT, sampling))


def test_other_tokenizers_are_refused(loaded: LoadedTarget):
    class Slow:
        _tokenizer = object()
        eos_token_ids = (1,)

    with pytest.raises(ConfigurationError, match="tokenizer cannot follow grammars: Only fast tokenizers"):
        Vocabulary(Slow(), 300)
    with pytest.raises(ConfigurationError, match="vocab size too small"):
        Vocabulary(loaded.tokenizer, 100)
    endless = TokenizerWrapper(loaded.tokenizer._tokenizer)
    endless._eos_token_ids = set()
    with pytest.raises(ConfigurationError, match="eos_token list must not be empty"):
        Vocabulary(endless, 300)


@pytest.mark.slow
def test_every_drafter_may_be_used(loaded: LoadedTarget):
    prompt = list(b'{"name": "x", "kind": "add"}')
    grammar = Grammar.json_schema(vocabulary_of(loaded), SCHEMAS["pair"])
    plain = tokens_of(written(loaded, None, prompt, grammar))
    for drafter in (PromptLookup(), Autoregressive(loaded.target, block_size=4)):
        assert tokens_of(written(loaded, drafter, prompt, grammar, draft_length=FixedDraftLength(4))) == plain


def test_what_is_made_in_one_thread_is_used_in_another(loaded: LoadedTarget):
    def make() -> Processor:
        vocabulary = Vocabulary(loaded.tokenizer, loaded.target.vocab_size)
        return Grammar.lark(vocabulary, 'start: "ab"').processor(0)

    with ThreadPoolExecutor(1) as other:
        mask = other.submit(make).result()
    [a, b], level = loaded.tokenizer.encode("ab", add_special_tokens=False), mx.zeros((1, tiny.VOCAB))
    assert allowed_by(mask, [], level) == {a}
    assert allowed_by(mask, [a, a], level) == {tiny.EOS, tiny.END}
    assert allowed_by(mask, [a], level) == {b}
