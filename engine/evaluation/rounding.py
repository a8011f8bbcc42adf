"""How differently this model rounds in a block and one token at a time, and how near ties plain decoding was.

Blocked and single products add in different orders, so their logits differ in the last bits; where the two
best logits lie closer together than that, the arms may rightly choose differently. Measured after all timing.
"""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from engine.cache.transaction import Transaction, new_caches
from engine.evaluation.arms import plain_steps
from engine.host import read_float
from engine.loading import LoadedTarget


def block_error(
    target: LoadedTarget,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    blocks: Sequence[int],
    chunk: int,
) -> dict[str, float | int]:
    """Largest difference between logits of a block forward and of single-token forwards of the same tokens.

    Args:
        target: the model.
        texts: pairs of prompt and its continuation by plain decoding.
        blocks: block lengths to compare; a continuation shorter than a block is skipped for it.
        chunk: prompt positions per forward.

    Returns:
        ``max_abs_logit_error`` and the number of ``positions`` compared.
    """
    worst, positions = 0.0, 0
    for prompt, continuation in texts:
        caches = new_caches(target.target.model, max(blocks))
        transaction = Transaction(caches)
        for start in range(0, len(prompt), chunk):
            target.target.forward(mx.array([prompt[start : start + chunk]]), caches, None)
            mx.eval([cache.state for cache in caches])
        done = 0
        for block in blocks:
            tokens = list(continuation[done : done + block])
            if len(tokens) < block:
                break
            transaction.begin(block)
            together, _ = target.target.forward(mx.array([tokens]), caches, None)
            mx.eval(together)
            transaction.commit(0)
            singles = []
            for token in tokens:
                logits, _ = target.target.forward(mx.array([[token]]), caches, None)
                mx.eval(logits)
                singles.append(logits)
            error = mx.abs(together - mx.concatenate(singles, axis=1)).astype(mx.float32).max()
            worst = max(worst, read_float(error))
            positions += block
            done += block
    return {"max_abs_logit_error": worst, "positions": positions}


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
