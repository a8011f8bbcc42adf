"""Chi-square tests without a statistics library, and the exact distributions they compare with.

The distributions come from the model's own forward without caches and from mlx-lm's filters; nothing of the
engine's decoding or sampling is in them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import product
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from engine.sampling import Sampling

SIGNIFICANT = 1e-5  # with fixed seeds a sound sampler stays far above it


def assert_drawn_from(
    values: Sequence[Hashable], probabilities: Sequence[float] | Mapping[Hashable, float]
) -> None:
    """Values are draws from a distribution, given by value (a sequence stands for 0, 1, 2 …)."""
    expected = probabilities if isinstance(probabilities, Mapping) else dict(enumerate(probabilities))
    counts = Counter(values)
    impossible = {value for value in counts if expected.get(value, 0.0) < 1e-9}
    assert not impossible, f"drawn, though their probability is 0: {sorted(map(str, impossible))[:5]}"
    chance, statistic, freedom = p_value(counts, expected, len(values))
    assert chance > SIGNIFICANT, (
        f"chi-square {statistic:.1f} at {freedom} degrees of freedom: p = {chance:.2g}"
    )


def p_value(
    counts: Mapping[Hashable, int], expected: Mapping[Hashable, float], total: int
) -> tuple[float, float, int]:
    """Pearson's test; cells expected less than five times are pooled. (p, statistic, degrees of freedom)."""
    cells: list[tuple[float, float]] = []
    pooled = [0.0, 0.0]
    for value, share in expected.items():
        cell = (float(counts.get(value, 0)), share * total)
        if cell[1] < 5:
            pooled[0] += cell[0]
            pooled[1] += cell[1]
        else:
            cells.append(cell)
    if pooled[1] > 0:
        cells.append((pooled[0], pooled[1]))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = len(cells) - 1
    return upper_tail(statistic, freedom), statistic, freedom


def upper_tail(statistic: float, freedom: int) -> float:
    """P(X ≥ statistic) for chi-square X, by Wilson and Hilferty's normal approximation (1931)."""
    if freedom < 1:
        return 1.0
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return math.erfc(z / math.sqrt(2)) / 2


def mlx_lm_distribution(logits: mx.array, sampling: Sampling) -> mx.array:
    """What mlx-lm's `make_sampler` draws from: its own filters in its order, then the temperature; [N, V]."""
    scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if 0 < sampling.top_p < 1:
        scores = apply_top_p(scores, sampling.top_p)
    if sampling.min_p != 0:
        scores = apply_min_p(scores, sampling.min_p)
    if sampling.top_k > 0:
        scores = apply_top_k(scores, sampling.top_k)
    return mx.softmax(scores * (1 / sampling.temperature), axis=-1)


def joint_distribution(
    model: Any,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    length: int = 3,
    processors: Sequence[Callable[[mx.array, mx.array], mx.array]] = (),
) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of ``length`` tokens, by enumerating all of them."""
    vocabulary = int(model(mx.array([list(prompt)])).shape[-1])
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for depth in range(length):
        texts = mx.array([[*prompt, *path] for path in product(range(vocabulary), repeat=depth)])
        rows = model(texts)[:, -1]  # [V^depth, V]
        for processor in processors:
            rows = mx.concatenate([processor(text, rows[i : i + 1]) for i, text in enumerate(texts)])
        shares = mlx_lm_distribution(rows, sampling).tolist()
        joint = {
            (*path, token): chance * share
            for (path, chance), row in zip(joint.items(), shares, strict=True)
            for token, share in enumerate(row)
        }
    return joint


def uniform_ranks(
    model: Any,
    prompt: Sequence[int],
    tokens: Sequence[int],
    sampling: Sampling,
    jitter: Sequence[float],
) -> list[float]:
    """Where each drawn token lies in its distribution given all before it, likeliest first (Rosenblatt 1952).

    Independent and uniform in [0, 1) if and only if every token was drawn from its distribution given all
    before it; ``jitter``, uniform numbers, spreads each token over its share.
    """
    logits = model(mx.array([[*prompt, *tokens[:-1]]]))[0, len(prompt) - 1 :]  # [N, V]
    shares = mlx_lm_distribution(logits, sampling).tolist()
    return [
        min(sum(share for share in row if share > row[token]) + row[token] * spread, 1 - 1e-9)
        for row, token, spread in zip(shares, tokens, jitter, strict=True)
    ]
