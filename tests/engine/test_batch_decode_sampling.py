"""Tokens drawn together are those a seed gives alone, distributed as the target's."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import pytest

from engine import acceptance
from engine.batch_decode import Request, decode_batch
from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.drafters.base import Draft
from engine.sampling import Sampler, Sampling
from engine.target.model import Target
from tests.engine import tiny
from tests.engine.batches import (
    LENGTHS,
    drafter_of,
    gather,
    mostly_slow,
    prompt_of,
    run,
    target_of,
    tokens_of,
)
from tests.engine.random_drafters import make
from tests.engine.statistics import assert_drawn_from, joint_distribution

ALWAYS_DRAFTING = ("dflash", "dflash2", "autoregressive", "prompt-lookup+dflash")


@pytest.mark.sampled(8, 8)
@pytest.mark.parametrize(
    ("block", "family", "kind"), mostly_slow((1, 4), ("llama", "gemma3_text", "qwen3_next"), ALWAYS_DRAFTING)
)
def test_a_seed_gives_the_text_it_gives_alone(family: str, kind: str, block: int):
    def sampler(index: int) -> Sampler | None:  # one of them is greedy
        return None if index == 2 else Sampler(Sampling(temperature=0.8, top_p=0.95, seed=index))

    counts = (28, 23, 26, 28)
    requests = [
        Request(prompt_of(length), count, sampler=sampler(index))
        for index, (length, count) in enumerate(zip(LENGTHS, counts, strict=True))
    ]
    found = run(family, kind, FixedDraftLength(block), requests)
    for index, request in enumerate(requests):
        alone = decode(
            target_of(family),
            drafter_of(kind, family),
            request.prompt,
            max_tokens=request.max_tokens,
            sampler=sampler(index),
            draft_length=FixedDraftLength(block),
        )
        assert tokens_of(found[index]) == tokens_of(list(alone)), f"sequence {index}"


@cache
def four_tokens() -> Target:
    """Four tokens, so that every continuation is likely enough to be counted."""
    changes = {"vocab_size": 4, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny.build("llama", seed=3, num_hidden_layers=2, intermediate_size=32, **changes)
    model.lm_head.weight = 0.5 * model.lm_head.weight
    return Target(model)


def draws_of(count: int) -> list[tuple[int, ...]]:
    """The first three tokens of many sequences decoded batch_decode, each with a seed of its own."""
    prompt, drafts = [0, 1, 2, 3, 1, 0, 2, 1], make("prompt-lookup", four_tokens())
    found: list[tuple[int, ...]] = []
    for start in range(0, count, 50):
        samplers = [Sampler(Sampling(temperature=1.0, seed=start + i)) for i in range(50)]
        requests = [Request(prompt, 3 + i % 3, sampler=sampler) for i, sampler in enumerate(samplers)]
        rounds = decode_batch(four_tokens(), drafts, requests, draft_length=FixedDraftLength(3))
        found += [tuple(tokens_of(steps)[:3]) for steps in gather(rounds, 50)]
    return found


@pytest.mark.slow
def test_drawn_tokens_have_the_targets_joint_distribution():
    exact = joint_distribution(four_tokens().model, [0, 1, 2, 3, 1, 0, 2, 1], Sampling(temperature=1.0))
    assert_drawn_from(draws_of(600), exact)


@pytest.mark.slow
def test_a_wrong_acceptance_fails_the_same_test(monkeypatch: pytest.MonkeyPatch):
    def careless(draft: Draft, logits: mx.array, sampler: Sampler) -> mx.array:
        following = sampler.draw(sampler.distribution(logits)[-1:])
        return mx.concatenate([mx.array([len(draft)], mx.int32), draft.tokens, following])

    monkeypatch.setattr(acceptance, "pack_sampled", careless)
    exact = joint_distribution(four_tokens().model, [0, 1, 2, 3, 1, 0, 2, 1], Sampling(temperature=1.0))
    with pytest.raises(AssertionError, match="chi-square"):
        assert_drawn_from(draws_of(600), exact)
