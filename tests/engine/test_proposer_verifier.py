"""The article's regime on the shipped models: a masked diffusion proposer, a verifier with sink and window.

Where the window covers the sequence, the bounded verifier sees all that the whole one sees, so the output is
that of plain decoding, token for token; likewise for a target whose weights are packed, against itself. With
a window much smaller than the sequence it is not, or these tests would show nothing.
"""

from __future__ import annotations

from functools import cache

import pytest

from engine.config import Engine, Options, open_engine
from engine.evaluation.arms import Outcome, plain, speculate
from engine.evaluation.prompts import SHIPPED_SETS, Prompt, encode, load_prompts
from engine.target.folder import SHIPPED

PROPOSER = f"masked-diffusion:{SHIPPED / 'proposer'}"
TOKENS = 96
COVERING, SMALL = "sink-window:4,1024", "sink-window:4,16"


@cache
def engine(kv: str, quantize: str | None) -> Engine:
    return open_engine(Options(drafter=PROPOSER, block="8", kv=kv, quantize=quantize))


def both(kv: str, quantize: str | None, prompt: Prompt) -> tuple[Outcome, Outcome]:
    """What the proposer and the bounded verifier give, and mlx-lm's plain loop on the same weights."""
    opened = engine(kv, quantize)
    target = opened.target
    tokens = encode(prompt, target.tokenizer, target.target.vocab_size, target.context)
    found = speculate(opened, tokens, TOKENS, opened.new_draft_length())
    return found, plain(target, tokens, TOKENS, 2048)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", SHIPPED_SETS)
@pytest.mark.parametrize("quantize", [None, "8,64", "4,64"])
def test_every_shipped_prompt_continues_as_in_plain_decoding(quantize: str | None, kind: str):
    different = []
    for prompt in load_prompts(kind):
        found, expected = both(COVERING, quantize, prompt)
        if (found.tokens, found.text, found.finish) != (expected.tokens, expected.text, expected.finish):
            different.append(prompt.id)
    assert different == []


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize(("quantize", "kind"), [(None, "code"), ("8,64", "retrieval"), ("4,64", "chat")])
def test_a_prompt_continues_as_in_plain_decoding(quantize: str | None, kind: str):
    [prompt] = load_prompts(kind, limit=1)
    found, expected = both(COVERING, quantize, prompt)
    assert (found.tokens, found.text, found.finish) == (expected.tokens, expected.text, expected.finish)
    assert sum(item.accepted for item in found.rounds) > 0


@pytest.mark.slow
def test_a_window_that_does_not_cover_the_sequence_changes_the_output():
    pairs = [both(SMALL, None, prompt) for prompt in load_prompts("retrieval", limit=3)]
    assert any(found.tokens != expected.tokens for found, expected in pairs)


@pytest.mark.slow
def test_the_packed_target_says_so_and_is_another_model():
    packed, whole = (engine(COVERING, quantize) for quantize in ("4,64", None))
    assert packed.target.card.quantization == "affine 4-bit group 64"
    assert packed.target.card.parameters == whole.target.card.parameters
    assert packed.target.target.model is not whole.target.target.model
