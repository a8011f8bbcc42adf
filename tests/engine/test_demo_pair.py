"""The shipped pair: token identity with mlx-lm's greedy decoding on every shipped prompt."""

from __future__ import annotations

import pytest

from engine.config import Engine, Options, open_engine
from engine.evaluation.arms import plain, speculate
from engine.evaluation.prompts import SHIPPED_SETS, encode, load_prompts

TOKENS = 96


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_engine(Options())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", SHIPPED_SETS)
def test_every_shipped_prompt_continues_as_mlx_lm_would(engine: Engine, kind: str):
    target, pace = engine.target, engine.new_pace()
    different = []
    for prompt in load_prompts(kind):
        tokens = encode(prompt, target.tokenizer, target.target.vocab_size, target.context)
        expected = plain(target, tokens, TOKENS, 2048)
        found = speculate(engine, tokens, TOKENS, pace)
        if (found.tokens, found.text, found.finish) != (expected.tokens, expected.text, expected.finish):
            different.append(prompt.id)
    assert different == []


def test_the_shipped_drafter_fits_the_shipped_target_and_is_used(engine: Engine):
    assert engine.drafter is not None
    [prompt] = load_prompts("code", limit=1)
    target = engine.target
    tokens = encode(prompt, target.tokenizer, target.target.vocab_size, target.context)
    outcome = speculate(engine, tokens, 64, engine.new_pace())
    blocks = [item for item in outcome.rounds if item.block > 1]
    assert blocks
    assert sum(item.accepted for item in blocks) > 0
