"""Greedy text with logits processors is mlx-lm's, token for token, at every block length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

from engine.config import Engine, Options, open_engine
from engine.decode import Processor, decode
from engine.draft_length import AdaptiveDraftLength, FixedDraftLength
from engine.drafters.prompt_lookup import PromptLookup
from engine.evaluation.prompts import encode, load_prompts
from engine.target.loading import SHIPPED_DRAFTER
from engine.target.model import Target
from tests.engine import families, tiny

FAMILIES = ("llama", "gemma3_text", "gpt_oss", "qwen3_5")
PROMPT = [7, 8, 9, 50, 7, 8, 60, 70, 9, 50, 7]
BLOCKS = (1, 2, 3, 5, 8, 16)
COUNT = 40


def grammar(tokens: mx.array, logits: mx.array) -> mx.array:
    """After a token only those whose number has another remainder by 3 may follow."""
    last = tokens[-1]
    return mx.where(mx.arange(logits.shape[-1]) % 3 == last % 3, -mx.inf, logits)


def steps_of_a_phrase(tokens: mx.array, logits: mx.array) -> mx.array:
    """Where the phrase 11 12 13 has begun it must go on; it begins after every even token."""
    last = tokens[-1]
    follows = mx.where(last == 11, 12, mx.where(last == 12, 13, mx.where(last % 2 == 0, 11, -1)))
    return mx.where((follows >= 0) & (mx.arange(logits.shape[-1]) != follows), -mx.inf, logits)


PROCESSORS: dict[str, Callable[[], list[Processor]]] = {
    "repetition": lambda: make_logits_processors(repetition_penalty=1.5),
    "presence": lambda: make_logits_processors(presence_penalty=3.0, presence_context_size=9),
    "frequency": lambda: make_logits_processors(frequency_penalty=2.0),
    "bias": lambda: make_logits_processors(logit_bias={12: 9.0, 50: -20.0, 77: 6.5}),
    "grammar": lambda: [grammar],
    "phrase": lambda: [steps_of_a_phrase],
    "all": lambda: [
        *make_logits_processors({12: 3.0}, repetition_penalty=1.2, presence_penalty=1, frequency_penalty=0.5),
        grammar,
    ],
}


def mlx_lm_tokens(model: Any, prompt: Sequence[int], count: int, processors: list[Processor]) -> list[int]:
    """mlx-lm's greedy continuation with the same processors."""
    steps = generate_step(mx.array(list(prompt)), model, max_tokens=count, logits_processors=processors)
    return [int(token) for token, _ in steps]


@cache
def target_of(family: str) -> Target:
    return Target(families.build(family))


@cache
def expected(family: str, name: str) -> list[int]:
    return mlx_lm_tokens(target_of(family).model, PROMPT, COUNT, PROCESSORS[name]())


def ours(
    target: Target, drafter: Any, prompt: Sequence[int], name: str, draft_length: Any, count: int
) -> list[int]:
    steps = decode(
        target, drafter, prompt, max_tokens=count, draft_length=draft_length, processors=PROCESSORS[name]()
    )
    return [token for step in steps for token in step.tokens]


@pytest.mark.sampled(0, 6)
@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_processor_changes_the_text_and_leaves_mlx_lms(family: str, name: str):
    truth = expected(family, name)
    assert truth != tiny.plain_tokens(target_of(family).model, PROMPT, COUNT), "the processor does nothing"
    for block in BLOCKS:
        drafter = tiny.ScriptedDrafter(PROMPT + truth, 0.2, seed=block)
        assert ours(target_of(family), drafter, PROMPT, name, FixedDraftLength(block), COUNT) == truth, block


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", PROCESSORS)
def test_drafts_from_the_text_and_the_adaptive_pace_change_nothing(name: str):
    for draft_length in (FixedDraftLength(6), AdaptiveDraftLength(8)):
        found = ours(target_of("gemma3_text"), PromptLookup(), PROMPT, name, draft_length, COUNT)
        assert found == expected("gemma3_text", name)


def test_a_processor_is_asked_once_a_row_with_the_tokens_before_it():
    """Rows of a block are given drafts as if they had been emitted; nothing is asked twice."""
    asked: list[list[int]] = []

    def noting(tokens: mx.array, logits: mx.array) -> mx.array:
        assert logits.shape == (1, tiny.VOCAB)
        asked.append([int(token) for token in tokens.tolist()])
        return logits

    target = target_of("llama")
    truth = tiny.plain_tokens(target.model, PROMPT, 13)
    drafter = tiny.ScriptedDrafter(PROMPT + truth)
    list(
        decode(target, drafter, PROMPT, max_tokens=13, draft_length=FixedDraftLength(4), processors=[noting])
    )
    assert asked == [PROMPT + truth[:count] for count in range(13)]


@pytest.fixture(scope="module")
def shipped() -> Engine:
    return open_engine(Options(drafter=str(SHIPPED_DRAFTER)))


@pytest.mark.sampled(0, 4)
@pytest.mark.parametrize(
    ("name", "block"), [("repetition", 8), ("frequency", 16), ("bias", 5), ("grammar", 3), ("all", 2)]
)
def test_the_shipped_pair_gives_mlx_lms_text(shipped: Engine, name: str, block: int):
    target = shipped.target
    assert shipped.drafter is not None
    for kind in ("code", "chat"):
        [prompt] = load_prompts(kind, limit=1)
        tokens = encode(prompt, target.tokenizer, target.target.vocab_size, target.context)
        truth = mlx_lm_tokens(target.target.model, tokens, COUNT, PROCESSORS[name]())
        assert (
            ours(target.target, shipped.drafter.drafter, tokens, name, FixedDraftLength(block), COUNT)
            == truth
        )
