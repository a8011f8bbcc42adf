"""Speculative tokens are those of mlx-lm's plain greedy decoding; what may excuse a difference is measured.

A block and single tokens are rounded differently. Where plain decoding's two best logits lie closer together
than that rounding moves them, both choices are right, and from there on the texts are different texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from engine.decode import Step
from engine.evaluation.arms import plain_steps
from engine.evaluation.rounding import Run, block_error
from engine.target.loading import LoadedTarget
from engine.target.model import Target


@dataclass(frozen=True)
class Tie:
    """A difference that rounding explains: where, and both sides of the comparison, in logits."""

    place: int
    gap: float  # of plain decoding's two best log-probabilities
    error: float  # the most that blocks and single tokens differed by on the way there

    @property
    def explained(self) -> bool:
        """Whether rounding can turn the choice."""
        return self.gap < self.error


def tokens_of(steps: Sequence[Step]) -> list[int]:
    """All tokens handed out."""
    return [token for step in steps for token in step.tokens]


def compare(
    target: Target, prompt: Sequence[int], truth: Sequence[int], steps: Sequence[Step], chunk: int = 2048
) -> Tie | None:
    """Compare a finished run with plain decoding; None where they are the same.

    Raises:
        AssertionError: they differ and rounding does not explain it.
    """
    found = tokens_of(steps)
    if found == list(truth):
        return None
    place = next((i for i, (ours, plain) in enumerate(zip(found, truth, strict=False)) if ours != plain), -1)
    assert place >= 0, f"{len(found)} tokens, not {len(truth)}: look at where the text is cut"
    tie = measure(target, prompt, truth[:place], steps, chunk)
    verdict = (
        f"token {place} is {found[place]}, not {truth[place]}; the two best logits lie {tie.gap:.3g} apart, "
        f"blocks differ from single tokens by up to {tie.error:.3g}"
    )
    assert tie.explained, f"{verdict}: no tie, so a cache, a mask or the acceptance is wrong"
    return tie


def measure(
    target: Target, prompt: Sequence[int], common: Sequence[int], steps: Sequence[Step], chunk: int
) -> Tie:
    """Rounding of the rounds that led through ``common``, and how near a tie the token behind it is."""
    loaded = LoadedTarget(target, tokenizer=None, card=cast(Any, None), context=None)
    rounds = [(step.round.block, step.round.accepted) for step in steps if step.round is not None]
    error = block_error(loaded, [Run(prompt, common, rounds)], chunk)["max_abs_logit_error"]
    model, place = target.model, len(common)
    *_, (_, scores) = plain_steps(model, prompt, place + 1, chunk, make_prompt_cache(model))
    best = mx.sort(scores)[-2:]
    gap = (best[1] - best[0]).item()
    return Tie(place, gap, error)
