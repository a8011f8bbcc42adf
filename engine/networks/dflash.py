"""The DFlash drafter network: parameters and the forward over one block.

DFlash (Chen et al. 2026, arXiv 2602.06036) drafts a whole block in one forward. The hidden states of a few
target layers at the committed positions are the *context*: concatenated, projected by ``fc``, normalised
once, and offered to every layer as extra keys and values. The *block* is [bonus, mask, mask, …], embedded
with the target's table; its rows attend to the context and to each other, and the target's own head turns
the rows after the first into drafts.

Parameters carry the published names. What DFlash 2 adds is in `engine.networks.dflash2`. Embedding, head and
acceptance live with the target and the drafter logic.
"""

from functools import lru_cache

import mlx.core as mx
from mlx import nn

from engine.networks.context import SPARE, Context, LayerContext
from engine.networks.dflash_config import DFlashConfig
from engine.networks.norm import RMSNorm, gated
from engine.networks.rotary import Angles, Rotary

__all__ = ["Context", "DFlash", "DFlashConfig"]


class Attention(nn.Module):
    """Block rows attend to the context and to the block."""

    def __init__(self, config: DFlashConfig, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is untyped here
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, dim
        self.window, self.causal = config.window(layer), config.causal(layer)
        self.scale, self.eps = dim**-0.5, config.rms_norm_eps
        self.q_proj = nn.Linear(hidden, self.heads * dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=bias)
        self.q_norm = RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, eps=config.rms_norm_eps)

    def __call__(
        self, block: mx.array, context: mx.array, rotary: Rotary, angles: Angles, memory: LayerContext
    ) -> mx.array:
        """One layer's attention.

        Args:
            block: normalised block rows [1, B, hidden].
            context: new context rows [1, S, hidden], S may be 0.
            rotary: the rotary embedding.
            angles: those of the S + B positions.
            memory: earlier context rows; extended by S.

        Returns:
            [1, B, hidden].
        """
        length, new = block.shape[1], context.shape[1]
        rows = mx.concatenate([context, block], axis=1) if new else block  # [1, S + B, hidden]
        queries = self.q_proj(block).reshape(1, length, self.heads, self.head_dim)
        queries = rotary.normalise_and_rotate(queries, self.q_norm.weight, self.eps, angles.skip(new))
        keys, values, seen = memory.extend(*self._keys_values(rows, rotary, angles), new)
        output = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale, mask=self._mask(length, seen)
        )
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(1, length, -1))

    def absorb(self, context: mx.array, rotary: Rotary, angles: Angles, memory: LayerContext) -> None:
        """Take in context rows [1, S, hidden] without drafting; ``angles`` are those of the S positions."""
        if surplus := memory.surplus(context.shape[1]):
            context, angles = context[:, surplus:], angles.skip(surplus)
            memory.length = 0  # all earlier rows are out of every window too
        memory.extend(*self._keys_values(context, rotary, angles), context.shape[1])

    def _keys_values(self, rows: mx.array, rotary: Rotary, angles: Angles) -> tuple[mx.array, mx.array]:
        shape = (1, rows.shape[1], self.kv_heads, self.head_dim)
        keys = rotary.normalise_and_rotate(
            self.k_proj(rows).reshape(shape), self.k_norm.weight, self.eps, angles
        )
        return keys, self.v_proj(rows).reshape(shape).transpose(0, 2, 1, 3)

    def _mask(self, length: int, seen: int) -> mx.array | str | None:
        """Which of ``seen`` context rows and ``length`` block rows each block row sees (True: sees)."""
        if self.window is None or seen + length <= self.window:  # the window hides nothing
            return "causal" if self.causal else None
        return _window_mask(length, seen, self.window, self.causal)


@lru_cache(maxsize=64)
def _window_mask(length: int, seen: int, window: int, causal: bool) -> mx.array:
    """Bool [length, seen + length]. ``seen`` stays at window - 1 once reached: few masks serve a sequence."""
    query = mx.arange(seen, seen + length)[:, None]
    key = mx.arange(seen + length)[None]
    visible = query - key < window
    return visible & (key <= query) if causal else visible & (key - query < window)


class MLP(nn.Module):
    """Gated feed-forward: down(act(gate(x)) · up(x))."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is untyped here
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.product = gated(config.hidden_act)

    def __call__(self, rows: mx.array) -> mx.array:
        """[1, B, hidden] to [1, B, hidden]."""
        return self.down_proj(self.product(self.gate_proj(rows), self.up_proj(rows)))


class Layer(nn.Module):
    """Pre-norm transformer layer over the block rows."""

    def __init__(self, config: DFlashConfig, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is untyped here
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(
        self, rows: mx.array, context: mx.array, rotary: Rotary, angles: Angles, memory: LayerContext
    ) -> mx.array:
        """See `Attention.__call__`."""
        rows = rows + self.self_attn(self.input_layernorm(rows), context, rotary, angles, memory)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class DFlash(nn.Module):
    """The whole drafter network, without embedding and head (they are the target's)."""

    layer_class: type[Layer] = Layer

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is untyped here
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [self.layer_class(config, index) for index in range(config.num_hidden_layers)]
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rope = Rotary(config.rotary, config.head_dim)

    def __call__(self, embeddings: mx.array, taps: mx.array, context: Context) -> mx.array:
        """Draft one block, first taking in the context rows that are new.

        Args:
            embeddings: the block's embeddings as the target's first layer receives them, times
                ``input_embedding_scale``, [1, B, hidden].
            taps: concatenated target layer outputs of the new committed positions,
                [1, S, len(target_layer_ids)·hidden]; S may be 0.
            context: the sequence so far; on return it holds S more positions.

        Returns:
            Normalised hidden states of the block rows, [1, B, hidden].
        """
        length = embeddings.shape[1]
        if taps.shape[1] > SPARE:  # many rows: a sliding layer need not compute those it cannot see
            self.absorb(taps, context, ahead=length)
            taps = taps[:, :0]
        features, new = self._features(taps), taps.shape[1]
        end = context.offset + new + length
        angles = self.rope.angles(context.offset, new + length, end)
        rows = embeddings
        for layer, memory in zip(self.layers, context.layers, strict=True):
            rows = layer(rows, features, self.rope, angles, memory)
        context.offset += new
        hidden: mx.array = self.norm(rows)
        return hidden

    def absorb(self, taps: mx.array, context: Context, *, ahead: int = 0) -> None:
        """Take in committed positions without drafting.

        Args:
            taps: as in `__call__`.
            context: as in `__call__`.
            ahead: positions that follow and count towards the length of the sequence.
        """
        features, new = self._features(taps), taps.shape[1]
        angles = self.rope.angles(context.offset, new, context.offset + new + ahead)
        for layer, memory in zip(self.layers, context.layers, strict=True):
            layer.self_attn.absorb(features, self.rope, angles, memory)
        context.offset += new

    def _features(self, taps: mx.array) -> mx.array:
        """Context rows [1, S, hidden] from taps [1, S, K*hidden]."""
        if not taps.shape[1]:
            return mx.zeros((1, 0, self.config.hidden_size), taps.dtype)
        features: mx.array = self.hidden_norm(self.fc(taps))
        return features

    def shape_logits(self, logits: mx.array) -> mx.array:
        """Scale and soft-cap what the target's head gives for the drafter's rows."""
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = mx.tanh(logits / cap) * cap
        return logits
