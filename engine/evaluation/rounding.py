"""How differently this model rounds in a block and one token at a time, and how near ties plain decoding was.

Blocked and single products add in different orders, so their logits differ in the last bits; where the two
best logits lie closer together than that, the arms may rightly choose differently. Measured after all timing,
along the rounds that were run: what a block leaves in the caches is rounded differently too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from engine.device import read_float, wait
from engine.evaluation.arms import plain_steps
from engine.session import Session
from engine.target.loading import LoadedTarget


@dataclass(frozen=True)
class Run:
    """A prompt, what was generated, and how many drafts each block confirmed on the way."""

    prompt: Sequence[int]
    tokens: Sequence[int]  # of plain decoding; up to a divergence also of the other arm
    rounds: Sequence[tuple[int, int]]  # block and accepted drafts of each round


def block_error(target: LoadedTarget, runs: Sequence[Run], chunk: int) -> dict[str, float | int]:
    """Largest difference between the logits of the blocks that were run and of single-token forwards.

    Args:
        target: the model.
        runs: texts with their rounds; rounds are followed as far as the text goes.
        chunk: prompt positions per forward.

    Returns:
        ``max_abs_logit_error`` and the number of ``positions`` compared.
    """
    worst, positions = 0.0, 0
    for run in runs:
        for together, alone in paired_logits(target, run, chunk):
            error = read_float(mx.abs(together - alone).astype(mx.float32).max())
            worst, positions = max(worst, error), positions + together.shape[1]
    return {"max_abs_logit_error": worst, "positions": positions}


def paired_logits(target: LoadedTarget, run: Run, chunk: int) -> Iterator[tuple[mx.array, mx.array]]:
    """Logits of a text's blocks, run through our session, and of single-token forwards on mlx-lm's caches.

    Args:
        target: the model.
        run: the text with its rounds, which are followed as far as the text goes.
        chunk: prompt positions per forward.

    Yields:
        Of each round the logits at the k positions kept: [1, k, V] of the block, [1, k, V] one by one.
    """
    headroom = max((block for block, _ in run.rounds), default=1)
    singles = make_prompt_cache(target.target.model)
    with Session(target.target, None, headroom=headroom) as session:
        for start in range(0, len(run.prompt), chunk):
            part = run.prompt[start : start + chunk]
            session.take_in(part)
            target.target.forward(mx.array([part]), singles, None)
            wait([cache.state for cache in singles])
        done = 0
        for block, accepted in run.rounds:
            kept = min(accepted + 1, len(run.tokens) - done)
            if kept < 1:
                break
            yield _round(target, session, singles, run.tokens[done : done + block], (block, kept))
            done += kept


def _round(
    target: LoadedTarget,
    session: Session,
    singles: list[object],
    tokens: Sequence[int],
    lengths: tuple[int, int],
) -> tuple[mx.array, mx.array]:
    """One block of the session, and as many single steps as are kept of it; both computed."""
    block, kept = lengths
    fed = [*tokens, *[tokens[-1]] * (block - len(tokens))]  # what was drafted behind does not matter
    session.transaction.begin(len(session.carried) + block)
    together, _ = session.forward(mx.array([[*session.carried, *fed]], mx.int32))
    together = together[:, -block:][:, :kept]
    alone = []
    for token in tokens[:kept]:
        logits, _ = target.target.forward(mx.array([[token]]), singles, None)
        wait(logits)
        alone.append(logits)
    wait(together)
    session.commit(tokens[:kept], None)
    return together, mx.concatenate(alone, axis=1)


def plain_gap(target: LoadedTarget, prompt: Sequence[int], position: int, chunk: int) -> float:
    """Difference of plain decoding's two best logits at a generated position (0: the first token)."""
    model = target.target.model
    for index, (_, scores) in enumerate(
        plain_steps(model, prompt, position + 1, chunk, make_prompt_cache(model))
    ):
        if index == position:
            best = mx.sort(scores.astype(mx.float32))[-2:]
            return read_float(best[1] - best[0])
    raise ValueError(f"plain decoding did not reach position {position}")
