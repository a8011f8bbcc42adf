"""How likely each emitted token was, and which tokens were likeliest in its place.

Natural logarithms of the softmax, in float32, of the logits that processors leave, before temperature and
filters, as mlx-lm reports them. Worked out in graph; the host gets them as integers behind the tokens.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import isinf

import mlx.core as mx

from engine.errors import ConfigurationError

MOST = 20  # of the likeliest tokens, at each position


@dataclass(frozen=True)
class TokenLogprob:
    """One emitted token."""

    token: int
    logprob: float  # at most 0
    # ids and log-probabilities of the likeliest in falling order, of equals the lower id first; tokens
    # without any probability are left out
    top: tuple[tuple[int, float], ...]


class Logprobs:
    """The records of rows of logits, to one array and back."""

    def __init__(self, count: int, vocabulary: int) -> None:
        if not 0 <= count <= MOST:
            raise ConfigurationError(f"logprobs must be from 0 to {MOST}, not {count}")
        self._count = min(count, vocabulary)

    def pack(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Records of tokens [N], each of its row of logits [N, V]: int32 [N * (1 + 2 * count)].

        A row is the token's log-probability, those of the likeliest, and the ids of these.
        """
        scores = logits.astype(mx.float32)
        total = mx.logsumexp(scores, axis=-1, keepdims=True)
        scores = mx.where(mx.isinf(scores), scores, scores - total)  # where all are -inf, total is too
        own = mx.take_along_axis(scores, tokens[:, None], axis=-1)  # [N, 1]
        if not self._count:
            return own.view(mx.int32).reshape(-1)
        bits = (scores + 0.0).view(mx.int32)  # floats are ordered as their bits, negative ones the other way
        order = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(mx.int64)
        size = scores.shape[-1]
        keys = order * size + (size - 1 - mx.arange(size, dtype=mx.int64))  # no two are equal
        best = mx.sort(mx.topk(keys, self._count, axis=-1), axis=-1)[:, ::-1]
        ids = (size - 1 - best % size).astype(mx.int32)
        found = mx.concatenate([own, mx.take_along_axis(scores, ids, axis=-1)], axis=-1)
        return mx.concatenate([found.view(mx.int32), ids], axis=-1).reshape(-1)

    def unpack(self, tokens: Sequence[int], numbers: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """The records of the first rows packed, one for each token."""
        width, count = 1 + 2 * self._count, self._count
        records = []
        for index, token in enumerate(tokens):
            row = numbers[index * width : (index + 1) * width]
            own, *likeliest = array("f", array("i", row[: 1 + count]).tobytes())
            top = zip(row[1 + count :], likeliest, strict=True)
            records.append(TokenLogprob(token, own, tuple(pair for pair in top if not isinf(pair[1]))))
        return tuple(records)
