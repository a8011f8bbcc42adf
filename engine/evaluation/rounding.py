"""Where our output leaves plain decoding's, and how differently this model rounds in blocks.

Blocked and single products add in different orders; where the two best logits are closer together than that
makes, the arms may choose differently. Measured after all timing, along the rounds that were run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from engine.config import Engine
from engine.device import read_float, wait
from engine.evaluation.arms import plain_steps
from engine.session import Session
from engine.target.loading import LoadedTarget
from evidence_format.model import Arm, Divergence, Rounding

ROUNDING_TEXTS = 3
MADE_UP_BLOCKS = (2, 4, 8, 16)


def compare_with_plain(
    engine: Engine, encoded: Sequence[Sequence[int]], arms: Sequence[Arm]
) -> dict[str, Any]:
    """The ``rounding`` and ``divergences`` of a report; ``arms`` are plain decoding and, if any, ours.

    Rounding is measured along the rounds (made up without drafts) of the longest texts and all that diverge.
    """
    divergences = [] if len(arms) == 1 else find_divergences(engine, encoded, *arms)
    divergent = {found.prompt_id for found in divergences}
    prompts = dict(zip((row.prompt_id for row in arms[0].samples), encoded, strict=True))
    ours = {row.prompt_id: row for row in arms[-1].samples}
    longest = sorted(arms[0].samples, key=lambda row: len(row.tokens), reverse=True)
    runs = []
    for place, plain_row in enumerate(longest):
        identifier = plain_row.prompt_id
        if place < ROUNDING_TEXTS or identifier in divergent:
            rounds = [(item.block, item.accepted) for item in ours[identifier].rounds]
            if len(arms) == 1:
                rounds = [(block, block - 1) for block in MADE_UP_BLOCKS]
            runs.append(Run(prompts[identifier], plain_row.tokens[:-1], rounds))
    error = block_error(engine.target, runs, engine.options.prefill_chunk)
    rounding = Rounding.model_validate(error) if error["positions"] else None
    return {"divergences": divergences, "rounding": rounding}


def find_divergences(
    engine: Engine, encoded: Sequence[Sequence[int]], baseline: Arm, system: Arm
) -> list[Divergence]:
    """The first differing position of every prompt whose tokens differ, with plain decoding's gap there."""
    ours = {row.prompt_id: row.tokens for row in system.samples}
    found = []
    for row, prompt in zip(baseline.samples, encoded, strict=True):
        mine, theirs = ours[row.prompt_id], row.tokens
        pairs = zip(mine, theirs, strict=False)
        position = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
        if position is None:
            continue
        gap = plain_gap(engine.target, prompt, position, engine.options.prefill_chunk)
        place: dict[str, Any] = {"arm": system.name, "prompt_id": row.prompt_id, "position": position}
        tokens: dict[str, Any] = {"plain_token": theirs[position], "speculative_token": mine[position]}
        found.append(Divergence(**place, **tokens, plain_gap=gap))
    return found


@dataclass(frozen=True)
class Run:
    """A prompt, what was generated, and how many drafts each block confirmed on the way."""

    prompt: Sequence[int]
    tokens: Sequence[int]  # of plain decoding; up to a divergence also of the other arm
    rounds: Sequence[tuple[int, int]]  # block and accepted drafts of each round


def block_error(target: LoadedTarget, runs: Sequence[Run], chunk: int) -> dict[str, float | int]:
    """Largest difference between the logits of the blocks that were run and of single-token forwards."""
    worst, positions = 0.0, 0
    for run in runs:
        for block, single in paired_logits(target, run, chunk):
            error = read_float(mx.abs(block - single).astype(mx.float32).max())
            worst, positions = max(worst, error), positions + block.shape[1]
    return {"max_abs_logit_error": worst, "positions": positions}


def paired_logits(target: LoadedTarget, run: Run, chunk: int) -> Iterator[tuple[mx.array, mx.array]]:
    """Of each round the logits [1, k, V] at the positions kept: of blocks, and of single-token forwards."""
    headroom = max((block for block, _ in run.rounds), default=1)
    singles = make_prompt_cache(target.target.model)
    with Session(target.target, None, headroom=headroom) as session:
        for start in range(0, len(run.prompt), chunk):
            part = run.prompt[start : start + chunk]
            session.prefill(part)
            target.target.forward(mx.array([part]), singles, None)
            wait([cache.state for cache in singles])
        done = 0
        for block, accepted in run.rounds:
            kept = min(accepted + 1, len(run.tokens) - done)
            if kept < 1:
                break
            tokens = run.tokens[done : done + block]
            fed = [*tokens, *[tokens[-1]] * (block - len(tokens))]  # drafts after the kept ones do not matter
            session.transaction.begin(len(session.uncached) + block)
            together, _ = session.forward(mx.array([[*session.uncached, *fed]], mx.int32))
            together = together[:, -block:][:, :kept]
            alone = []
            for token in tokens[:kept]:
                logits, _ = target.target.forward(mx.array([[token]]), singles, None)
                wait(logits)
                alone.append(logits)
            wait(together)
            session.commit(tokens[:kept], None)
            yield together, mx.concatenate(alone, axis=1)
            done += kept


def plain_gap(target: LoadedTarget, prompt: Sequence[int], position: int, chunk: int) -> float:
    """Difference of plain decoding's two best logits at a generated position (0: the first token)."""
    model = target.target.model
    *_, (_, scores) = plain_steps(model, prompt, position + 1, chunk, make_prompt_cache(model))
    best = mx.sort(scores.astype(mx.float32))[-2:]
    return read_float(best[1] - best[0])
