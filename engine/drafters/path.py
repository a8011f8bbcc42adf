"""The path of a DFlash 2 draft through its candidates: the likeliest step each time, or steps drawn.

What follows a candidate depends on the candidate alone, so the step behind every candidate is settled at
once, and walking the path is following pointers.
"""

import mlx.core as mx

from engine.drafters.base import Draft
from engine.networks.dflash2 import Candidates
from engine.sampling import Sampler


def likeliest_path(candidates: Candidates) -> Draft:
    """At each position the candidate with the highest score behind the one before."""
    taken = _walk(mx.argmax(candidates.scores, axis=-1))
    return Draft(_at(candidates.tokens, taken))


def drawn_path(candidates: Candidates, sampler: Sampler, vocabulary: int) -> Draft:
    """Each candidate drawn given the one before.

    The draws behind candidates that are not taken are independent of the others and simply not used.

    Args:
        candidates: k tokens at n positions.
        sampler: its filters and temperature shape each conditional distribution over the k candidates.
        vocabulary: number of tokens.

    Returns:
        Tokens [n], and q [n, vocabulary]: token i was drawn from q[i], zero outside the candidates.
    """
    tokens, scores = candidates
    n, k, _ = scores.shape
    chances = sampler.distribution(scores.reshape(n * k, k))
    taken = _walk(sampler.draw(chances).reshape(n, k))
    before = mx.concatenate([mx.zeros((1,), mx.int32), taken[:-1]])
    rows = chances.reshape(n, k, k)[mx.arange(n), before]  # [n, k]
    q = mx.put_along_axis(mx.zeros((n, vocabulary), mx.float32), tokens, rows, axis=-1)
    return Draft(_at(tokens, taken), q)


def _walk(following: mx.array) -> mx.array:
    """The indices taken, int32 [n]; ``following[i, j]`` is the one at i behind j at i - 1 (0 at first)."""
    n, k = following.shape
    # one table of pointers into itself: entry i * k + j leads to the entries of position i + 1
    table = (following.astype(mx.int32) + mx.arange(k, (n + 1) * k, k, dtype=mx.int32)[:, None]).reshape(-1)
    pointer, path = mx.array(0, mx.int32), []
    for _ in range(n):
        pointer = table[pointer]
        path.append(pointer)
    return mx.stack(path) % k


def _at(tokens: mx.array, taken: mx.array) -> mx.array:
    return mx.take_along_axis(tokens, taken[:, None], axis=-1)[:, 0]
