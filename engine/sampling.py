"""How the next token is drawn: temperature, top-p, min-p, top-k, a seed. Distributions, not decoding.

The distribution is the one mlx-lm's `make_sampler` draws from (top-p, then min-p, then top-k, all before the
temperature), so plain sampling by mlx-lm and speculative sampling here draw from the same thing.
"""

import secrets
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from engine.errors import ConfigurationError

STRIDE = (
    0x9E3779B97F4A7C15  # between the seeds of neighbouring positions: seeds of texts are often neighbours
)
COLDEST = 1e-6  # logits divided by much less overflow


@dataclass(frozen=True)
class Sampling:
    """The switches of sampling; temperature 0 is greedy and makes the others meaningless."""

    temperature: float = 0.0  # logits are divided by it
    top_p: float = 1.0  # keep the smallest set of most likely tokens whose probabilities reach it
    min_p: float = 0.0  # drop tokens less likely than this share of the likeliest
    top_k: int = 0  # keep so many of the most likely tokens; 0 keeps all
    seed: int | None = None  # start of the random numbers; None: a new one each time

    def check(self) -> None:
        """Raise ConfigurationError where a value does not make sense."""
        if self.temperature != 0 and not COLDEST <= self.temperature <= 100:
            raise ConfigurationError(
                f"temperature must be 0 or lie in {COLDEST:f} to 100, not {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top-p must lie in (0, 1], not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ConfigurationError(f"min-p must lie in [0, 1], not {self.min_p}")
        if self.top_k < 0:
            raise ConfigurationError(f"top-k must be at least 0, not {self.top_k}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigurationError(f"the seed must lie in 0 to 2^63 - 1, not {self.seed}")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


class Sampler:
    """Draws tokens by `Sampling`'s switches, with random numbers of its own."""

    def __init__(self, sampling: Sampling, *, by_position: bool = False) -> None:
        """Draw one number after another, or ``by_position`` those of each position of the text.

        By position, a seed gives the same text however it is decoded: in blocks of any length, in a batch.
        """
        sampling.check()
        if sampling.greedy:
            raise ConfigurationError("nothing is drawn at temperature 0")
        self.sampling, self.by_position = sampling, by_position
        self.seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self._key = mx.random.key(self.seed)

    def distribution(self, logits: mx.array) -> mx.array:
        """Probabilities, float32 of the shape of ``logits`` [N, V], after every filter."""
        scores = logits.astype(mx.float32)
        scores = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
        options = self.sampling
        if options.top_p < 1:
            scores = apply_top_p(scores, options.top_p)
        if options.min_p > 0:
            scores = apply_min_p(scores, options.min_p)
        if 0 < options.top_k < scores.shape[-1]:
            scores = apply_top_k(scores, options.top_k)
        return mx.softmax(scores / options.temperature, axis=-1)

    def draw(self, probabilities: mx.array) -> mx.array:
        """One token for each row [N, V] of probabilities, int32 [N]; lazy."""
        return mx.random.categorical(mx.log(probabilities), key=self.key()).astype(mx.int32)

    def draw_at(self, logits: mx.array, position: int) -> mx.array:
        """The tokens at a position of the text and those after it, one a row of logits [N, V]: int32 [N]."""
        scores = mx.log(self.distribution(logits))
        keys = [mx.random.key((self.seed + STRIDE * (position + row)) % 2**64) for row in range(len(scores))]
        drawn = [mx.random.categorical(scores[row], key=key) for row, key in enumerate(keys)]
        return mx.stack(drawn).astype(mx.int32)

    def key(self) -> mx.array:
        """A key that was not used yet."""
        self._key, key = mx.random.split(self._key)
        return key
