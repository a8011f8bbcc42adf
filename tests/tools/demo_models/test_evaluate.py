"""What counts as a loop, and what a drafter's rounds add up to."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.drafters.block import BlockDrafter
from engine.target.model import Target
from tools.demo_models import drafter, evaluate


@pytest.mark.parametrize("period", [1, 2, 7, 20, 40])
def test_a_repeating_end_is_a_loop(period: int) -> None:
    start = list(range(1000, 1040))
    assert evaluate.loop_period([*start, *(list(range(period)) * 130)[: 3 * max(period, 11)]]) == period


def test_text_that_varies_or_repeats_twice_is_no_loop() -> None:
    drawn = np.random.default_rng(0).integers(0, 1000, 128).tolist()
    assert evaluate.loop_period(drawn) == 0
    assert evaluate.loop_period([*range(500, 560), *range(30), *range(30)]) == 0
    assert evaluate.loop_period([5] * 10) == 0


def test_rounds_emit_every_token_after_the_first_and_no_more(tiny_target: Any) -> None:
    config = drafter.configuration({**vars(tiny_target.args), "num_hidden_layers": 9})
    config |= {"num_target_layers": 3}
    config["dflash_config"] = {"mask_token_id": 3, "target_layer_ids": [0, 2]}
    proposer = BlockDrafter(drafter.build(config, seed=4))
    target = Target(tiny_target)
    proposer.bind(target)
    prompt = np.random.default_rng(0).integers(8, 1280, 40).tolist()
    continuation = evaluate.greedy(tiny_target, [int(token) for token in prompt], 30)
    for block in (2, 8, 16):
        emitted = evaluate.rounds(target, proposer, prompt, continuation, block)
        assert sum(emitted) == len(continuation) - 1
        assert all(1 <= count <= block for count in emitted)


def test_greedy_follows_the_largest_logit(tiny_target: Any) -> None:
    prompt = list(range(50, 90))
    out = evaluate.greedy(tiny_target, prompt, 6)
    for i, token in enumerate(out):
        logits = tiny_target(mx.array([prompt + out[:i]]))[0, -1]
        assert (logits.max() - logits[token]).item() < 1e-4
