"""On the shipped pair a needle beyond the window is found through exact rows, lost through noise or zeros."""

from __future__ import annotations

from functools import cache

import pytest

from engine.config import Engine, Options, open_engine
from engine.decode import decode
from engine.evaluation.prompts import Prompt, encode, load_prompts

ANSWER = 4  # tokens
COUNT = 8
BEYOND = 0.7  # depth up to which a needle lies beyond a window of 64 tokens


@cache
def engine_of(kv: str) -> Engine:
    return open_engine(Options(drafter="none", kv=kv))


def prompts() -> list[Prompt]:
    needles = [prompt for prompt in load_prompts("retrieval") if prompt.needle]
    return [prompt for prompt in needles if prompt.needle and prompt.needle.depth < BEYOND][::2][:COUNT]


@cache
def answers(kv: str) -> list[list[int]]:
    engine = engine_of(kv)
    target = engine.target
    found = []
    for prompt in prompts():
        tokens = encode(prompt, target.tokenizer, target.target.vocab_size, target.context)
        steps = decode(
            target.target,
            None,
            tokens,
            max_tokens=ANSWER,
            policy=engine.policy,
            restoration=engine.restoration,
        )
        found.append([token for step in steps for token in step.tokens])
    return found


def recall(kv: str) -> float:
    hits = 0
    for prompt, tokens in zip(prompts(), answers(kv), strict=True):
        assert prompt.needle is not None
        hits += engine_of(kv).target.tokenizer.decode(tokens) == prompt.needle.answer
    return hits / COUNT


@pytest.mark.slow
def test_exact_rows_give_the_tokens_of_the_full_cache() -> None:
    assert answers("restored:exact") == answers("native")
    assert recall("native") == 1


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("source", ["noise", "zeros"])
def test_rows_without_meaning_destroy_recall(source: str) -> None:
    assert recall(f"restored:{source}") == 0


@pytest.mark.slow
def test_the_shipped_projector_finds_most_needles() -> None:
    assert recall("restored:learned") >= 0.75
