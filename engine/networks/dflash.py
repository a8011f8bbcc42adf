"""The DFlash drafter network: parameters and the forward over one block.

DFlash (Chen et al. 2026, arXiv 2602.06036) drafts a whole block in one forward. The hidden states of a few
target layers at the committed positions are the *context*: concatenated, projected by ``fc``, normalised
once, and offered to every layer as extra keys and values. The *block* is [bonus, mask, mask, …], embedded
with the target's table; its rows attend to the context and to each other, and the target's own head turns
the rows after the first into drafts.

Parameters carry the published names. DFlash 2 (dynamic convolutions, candidate selector) is refused here.
Embedding, head and acceptance live with the target and the drafter logic.
"""

import mlx.core as mx
from mlx import nn
from mlx_lm.models.rope_utils import initialize_rope

from engine.networks.dflash_config import DFlashConfig

__all__ = ["Context", "DFlash", "DFlashConfig"]

ACTIVATIONS = {"silu": nn.silu, "gelu_pytorch_tanh": nn.gelu_approx, "gelu": nn.gelu}


class LayerContext:
    """Keys and values of one layer's committed context rows, oldest first.

    Rows are written into a buffer that grows by steps; a sliding layer uses only the newest ``keep`` rows
    and drops older ones when the buffer is full. Rows of the current block are written behind the committed
    ones as scratch and overwritten by the next call.
    """

    step = 256

    def __init__(self, keep: int | None) -> None:
        self.keep = keep
        self.length = 0  # committed rows in the buffer
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def extend(self, keys: mx.array, values: mx.array, new: int) -> tuple[mx.array, mx.array, int]:
        """Append rows, the first ``new`` of which are committed.

        Args:
            keys: [1, KV heads, new + block, head dim]; values alike.
            values: see keys.
            new: number of context rows among them.

        Returns:
            Keys and values to attend to, and how many of their rows are context.
        """
        total = self.length + keys.shape[2]
        if self.keys is None or self.values is None or total > self.keys.shape[2]:
            self._make_room(keys, values)
            total = self.length + keys.shape[2]
        assert self.keys is not None  # noqa: S101 - _make_room has just set them
        assert self.values is not None  # noqa: S101
        self.keys[..., self.length : total, :] = keys
        self.values[..., self.length : total, :] = values
        self.length += new
        first = 0 if self.keep is None else max(0, self.length - self.keep)
        return self.keys[..., first:total, :], self.values[..., first:total, :], self.length - first

    def _make_room(self, keys: mx.array, values: mx.array) -> None:
        held = self.length if self.keep is None else min(self.length, self.keep)
        capacity = -(-(held + keys.shape[2]) // self.step) * self.step
        buffers = []
        for old, like in ((self.keys, keys), (self.values, values)):
            room = mx.zeros((*like.shape[:2], capacity - held, like.shape[3]), like.dtype)
            kept = [] if old is None or held == 0 else [old[..., self.length - held : self.length, :]]
            buffers.append(mx.concatenate([*kept, room], axis=2))
        self.keys, self.values = buffers
        self.length = held

    @property
    def nbytes(self) -> int:
        """Resident bytes of the buffers."""
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes


class Context:
    """What the drafter remembers of a sequence: one `LayerContext` per layer, all at the same position."""

    def __init__(self, config: DFlashConfig) -> None:
        windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
        self.layers = [LayerContext(None if window is None else window - 1) for window in windows]
        self.offset = 0  # committed positions seen so far = absolute position of the next context row

    @property
    def nbytes(self) -> int:
        """Resident bytes of all layers."""
        return sum(layer.nbytes for layer in self.layers)


class Attention(nn.Module):
    """Block rows attend to the context and to the block."""

    def __init__(self, config: DFlashConfig, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is untyped here
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, dim
        self.window, self.causal = config.window(layer), config.causal(layer)
        self.q_proj = nn.Linear(hidden, self.heads * dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)

    def __call__(
        self, block: mx.array, context: mx.array, rope: nn.Module, offset: int, memory: LayerContext
    ) -> mx.array:
        """One layer's attention.

        Args:
            block: normalised block rows [1, B, hidden].
            context: new context rows [1, S, hidden], S may be 0.
            rope: the rotary embedding.
            offset: absolute position of the first context row.
            memory: earlier context rows; extended by S.

        Returns:
            [1, B, hidden].
        """
        length = block.shape[1]
        context, offset = self._reachable(context, offset, memory)
        new = context.shape[1]
        rows = mx.concatenate([context, block], axis=1) if new else block  # [1, S + B, hidden]
        queries = self._split(self.q_norm, self.q_proj(block), self.heads)
        keys, values, seen = memory.extend(*self._keys_values(rows, rope, offset), new)
        output = mx.fast.scaled_dot_product_attention(
            rope(queries, offset=offset + new),
            keys,
            values,
            scale=self.head_dim**-0.5,
            mask=self._mask(length, seen),
        )
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(1, length, -1))

    def absorb(self, context: mx.array, rope: nn.Module, offset: int, memory: LayerContext) -> None:
        """Take in context rows without drafting; arguments as in `__call__`."""
        context, offset = self._reachable(context, offset, memory)
        memory.extend(*self._keys_values(context, rope, offset), context.shape[1])

    @staticmethod
    def _reachable(context: mx.array, offset: int, memory: LayerContext) -> tuple[mx.array, int]:
        """The new context rows some later query can see, and the position of the first of them."""
        surplus = 0 if memory.keep is None else context.shape[1] - memory.keep
        if surplus <= 0:
            return context, offset
        memory.length = 0  # all earlier rows are out of every window too
        return context[:, surplus:], offset + surplus

    def _keys_values(self, rows: mx.array, rope: nn.Module, offset: int) -> tuple[mx.array, mx.array]:
        keys = rope(self._split(self.k_norm, self.k_proj(rows), self.kv_heads), offset=offset)
        return keys, self._split(None, self.v_proj(rows), self.kv_heads)

    def _split(self, norm: nn.Module | None, rows: mx.array, heads: int) -> mx.array:
        rows = rows.reshape(1, rows.shape[1], heads, self.head_dim)
        return (rows if norm is None else norm(rows)).transpose(0, 2, 1, 3)

    def _mask(self, length: int, seen: int) -> mx.array | str | None:
        """Which of ``seen`` context rows and ``length`` block rows each block row sees (True: sees)."""
        if self.window is None or seen + length <= self.window:  # the window hides nothing
            return "causal" if self.causal else None
        query = mx.arange(seen, seen + length)[:, None]
        key = mx.arange(seen + length)[None]
        visible = query - key < self.window
        return visible & (key <= query) if self.causal else visible & (key - query < self.window)


class MLP(nn.Module):
    """Gated feed-forward: down(act(gate(x)) · up(x))."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is untyped here
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = ACTIVATIONS[config.hidden_act]

    def __call__(self, rows: mx.array) -> mx.array:
        """[1, B, hidden] to [1, B, hidden]."""
        return self.down_proj(self.activation(self.gate_proj(rows)) * self.up_proj(rows))


class Layer(nn.Module):
    """Pre-norm transformer layer over the block rows."""

    def __init__(self, config: DFlashConfig, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is untyped here
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(
        self, rows: mx.array, context: mx.array, rope: nn.Module, offset: int, memory: LayerContext
    ) -> mx.array:
        """See `Attention.__call__`."""
        rows = rows + self.self_attn(self.input_layernorm(rows), context, rope, offset, memory)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class DFlash(nn.Module):
    """The whole drafter network, without embedding and head (they are the target's)."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is untyped here
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [Layer(config, index) for index in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rope = initialize_rope(
            dims=config.head_dim,
            base=config.rope_theta,
            traditional=False,
            scaling_config=None if config.rope_scaling is None else dict(config.rope_scaling),
            max_position_embeddings=config.max_position_embeddings,
        )

    def __call__(self, embeddings: mx.array, taps: mx.array, context: Context) -> mx.array:
        """Draft one block, first taking in the context rows that are new.

        Args:
            embeddings: the block's raw target embeddings times ``input_embedding_scale``, [1, B, hidden].
            taps: concatenated target layer outputs of the new committed positions,
                [1, S, len(target_layer_ids)·hidden]; S may be 0.
            context: the sequence so far; on return it holds S more positions.

        Returns:
            Normalised hidden states of the block rows, [1, B, hidden].
        """
        features = self._features(taps)
        rows = embeddings
        for layer, memory in zip(self.layers, context.layers, strict=True):
            rows = layer(rows, features, self.rope, context.offset, memory)
        context.offset += taps.shape[1]
        hidden: mx.array = self.norm(rows)
        return hidden

    def absorb(self, taps: mx.array, context: Context) -> None:
        """Take in committed positions without drafting; ``taps`` as in `__call__`."""
        features = self._features(taps)
        for layer, memory in zip(self.layers, context.layers, strict=True):
            layer.self_attn.absorb(features, self.rope, context.offset, memory)
        context.offset += taps.shape[1]

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
