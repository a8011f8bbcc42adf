"""What DFlash 2 adds to the network: dynamic convolutions along the block, and scores of candidates.

A convolution mixes each block row with the rows before it. Its kernel is a learned one for each channel plus
a dynamic one for each group of channels, projected from the normalised row; one convolution goes in front of
attention (or feed-forward) and one behind it, both with kernels from the row in front:

    y_t = Σ_j (base_j + dynamic_j(row_t)) · x_(t-j)        j = 0 … kernel size - 1, x = 0 before the block

The selector scores a candidate c at a position by the drafter's logit plus a bilinear term of low rank that
knows the token p before it:  logit(c) + Σ_r P[p]_r · (W h)_r · S[c]_r. The drafter chooses the path through
those scores.
"""

from typing import NamedTuple

import mlx.core as mx
from mlx import nn

from engine.networks.dflash import DFlash, Layer, LayerContext
from engine.networks.dflash_config import DFlashConfig, Second
from engine.networks.rotary import Angles, Rotary

CODEBOOKS = ("predecessor_codebook", "successor_codebook")


def build_network(config: DFlashConfig) -> DFlash:
    """The network of a configuration, DFlash or DFlash 2, weights random."""
    return DFlash(config) if config.second is None else DFlash2(config)


class Convolution(nn.Module):
    """A pair of grouped dynamic causal convolutions, in front of a sublayer and behind it."""

    def __init__(self, hidden: int, second: Second) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is untyped here
        self.size, self.width = second.conv_kernel_size, second.conv_group_size
        self.groups = hidden // self.width
        self.base_kernel = mx.zeros((2, self.size, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * self.size * self.groups, bias=False)

    def kernels(self, rows: mx.array) -> mx.array:
        """Kernels for block rows [1, B, hidden]: [2 (in front, behind), B, size, groups, width]."""
        dynamic = self.kernel_projection(rows).reshape(-1, 2, self.size, self.groups, 1).swapaxes(0, 1)
        return self.base_kernel.reshape(2, 1, self.size, self.groups, self.width) + dynamic

    def __call__(self, rows: mx.array, kernel: mx.array) -> mx.array:
        """Convolve block rows [1, B, hidden] with one of `kernels`, [B, size, groups, width]."""
        _, length, hidden = rows.shape
        padded = mx.pad(rows[0], [(self.size - 1, 0), (0, 0)])
        windows = mx.as_strided(  # [B, size, groups, width], the oldest row first
            padded, (length, self.size, self.groups, self.width), (hidden, hidden, self.width, 1)
        )
        return (kernel * windows[:, ::-1]).sum(axis=1).reshape(1, length, hidden)


class Layer2(Layer):
    """A layer with convolutions in front of and behind attention and feed-forward."""

    def __init__(self, config: DFlashConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert config.second is not None  # noqa: S101 - `build_network` sees to it
        self.attention_conv = Convolution(config.hidden_size, config.second)
        self.mlp_conv = Convolution(config.hidden_size, config.second)

    def __call__(
        self, rows: mx.array, context: mx.array, rotary: Rotary, angles: Angles, memory: LayerContext
    ) -> mx.array:
        # Only block rows are convolved, never context rows.
        normal = self.input_layernorm(rows)
        front, behind = self.attention_conv.kernels(normal)
        mixed = self.attention_conv(normal, front)
        mixed = self.self_attn(mixed, context, rotary, angles, memory)
        rows = rows + self.attention_conv(mixed, behind)
        normal = self.post_attention_layernorm(rows)
        front, behind = self.mlp_conv.kernels(normal)
        return rows + self.mlp_conv(self.mlp(self.mlp_conv(normal, front)), behind)


class Candidates(NamedTuple):
    """The best tokens of n positions and what each scores behind each possible predecessor."""

    tokens: mx.array  # int32 [n, k], in no particular order
    # [n, k, k]; [i, j] are those of the tokens at i if token j came at i - 1: at 0 the bonus, whatever j.
    scores: mx.array


class CandidateSelector(nn.Module):
    """Scores candidates along the path."""

    def __init__(self, config: DFlashConfig, second: Second) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is untyped here
        self.top_k = second.selector_top_k
        self.predecessor_codebook = nn.Embedding(config.vocab_size, second.selector_rank)
        self.successor_codebook = nn.Embedding(config.vocab_size, second.selector_rank)
        self.hidden_projection = nn.Linear(config.hidden_size, second.selector_rank, bias=False)

    def __call__(self, hidden: mx.array, logits: mx.array, bonus: mx.array) -> Candidates:
        """Score candidates by the masks' hidden states [n, hidden], their logits [n, V], the bonus [1]."""
        best = mx.argpartition(logits, logits.shape[-1] - self.top_k, axis=-1)[:, -self.top_k :]
        unary = mx.take_along_axis(logits, best, axis=-1)
        before = mx.concatenate([mx.repeat(bonus, self.top_k)[None].astype(best.dtype), best[:-1]])
        successors = self.successor_codebook(best) * self.hidden_projection(hidden)[:, None]  # [n, k, rank]
        pairs = self.predecessor_codebook(before) @ successors.swapaxes(-1, -2)  # [n, k before, k]
        return Candidates(best.astype(mx.int32), unary[:, None] + pairs)


class DFlash2(DFlash):
    """The DFlash 2 network."""

    layer_class = Layer2

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        assert config.second is not None  # noqa: S101 - `build_network` sees to it
        self.candidate_selector = CandidateSelector(config, config.second)

    @staticmethod
    def sanitize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Give the codebooks the ``.weight`` that published files leave out and saved state dicts do not."""
        bare = {f"candidate_selector.{name}" for name in CODEBOOKS}
        return {f"{name}.weight" if name in bare else name: value for name, value in weights.items()}
