"""The DFlash drafter network: parameters, the forward over one block, and what it remembers of a sequence.

DFlash (Chen et al. 2026, arXiv 2602.06036) drafts a whole block in one forward. The hidden states of a few
target layers at the committed positions are the *context*: concatenated, projected by ``fc``, normalised
once, and offered to every layer as extra keys and values. The *block* is [bonus, mask, mask, …], embedded
with the target's table; its rows attend to the context and to each other, and the target's own head turns
the rows after the first into drafts.

Parameters carry the published names. What DFlash 2 adds is in `engine.networks.dflash2`. Embedding, head and
acceptance live with the target and the drafter logic.
"""

from collections.abc import Callable
from functools import lru_cache

import mlx.core as mx
from mlx import nn

from engine.cache.ring import widened
from engine.networks.dflash_config import DFlashConfig
from engine.networks.rotary import Angles, Rotary

__all__ = ["SPARE", "Context", "DFlash", "DFlashConfig"]

SPARE = 64  # rows a sliding layer keeps beyond its window when its buffer grows, so that it can go back
ACTIVATIONS = {"silu": nn.silu, "gelu_pytorch_tanh": nn.gelu_approx, "gelu": nn.gelu}


class LayerContext:
    """Keys and values of one layer's committed positions, oldest first.

    Rows of the block being drafted are written behind them as scratch and overwritten by the next call, so
    nothing a draft does has to be undone. The buffer grows by steps; a sliding layer uses only the newest
    ``keep`` rows and drops older ones, but for `SPARE`, when the buffer is full.
    """

    step = 256

    def __init__(self, keep: int | None) -> None:
        self.keep = keep
        self.length = 0  # committed rows in the buffer
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def extend(self, keys: mx.array, values: mx.array, new: int) -> tuple[mx.array, mx.array, int]:
        """Append rows [1, KV heads, new + block, head dim], the first ``new`` of which are committed.

        Returns:
            Keys and values to attend to, and how many of their rows are context.
        """
        count = keys.shape[2]
        if self.keys is None or self.length + count > self.keys.shape[2]:
            held = self.length if self.keep is None else min(self.length, self.keep + SPARE)
            self.keys = self._grown(self.keys, keys, held)
            self.values = self._grown(self.values, values, held)
            self.length = held
        assert self.values is not None  # noqa: S101 - set with the keys
        total = self.length + count
        self.keys[..., self.length : total, :] = keys
        self.values[..., self.length : total, :] = values
        self.length += new
        first = 0 if self.keep is None else max(0, self.length - self.keep)
        return self.keys[..., first:total, :], self.values[..., first:total, :], self.length - first

    def _grown(self, buffer: mx.array | None, rows: mx.array, held: int) -> mx.array:
        """The newest ``held`` rows of a buffer, with free ones for ``rows`` behind them."""
        kept = None if buffer is None or not held else buffer[..., self.length - held : self.length, :]
        return widened(kept, -(-(held + rows.shape[2]) // self.step) * self.step, rows)

    def surplus(self, new: int) -> int:
        """How many of ``new`` rows to come no later query can see; those need not be computed."""
        return 0 if self.keep is None else max(0, new - self.keep - SPARE)

    def can_forget(self, count: int, positions: int) -> bool:
        """Whether, without its newest ``count`` rows, it holds all a query after ``positions`` may see."""
        needed = positions if self.keep is None else min(positions, self.keep)
        return self.length - count >= needed

    def mark(self) -> Callable[[], None]:
        """Note the rows held; what is returned brings them back. Of all rows, none but the newest ever go."""
        length = self.length
        rows = None if self.keep is None else (_handle(self.keys), _handle(self.values))

        def back() -> None:
            self.length = length
            if rows is not None:
                self.keys, self.values = map(_handle, rows)

        return back

    @property
    def nbytes(self) -> int:
        """Resident bytes of the buffers."""
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes


def _handle(rows: mx.array | None) -> mx.array | None:
    """Rows under a name of their own: writing into an array changes what all others see."""
    return None if rows is None else mx.array(rows)


class Context:
    """What the network remembers of one sequence: a `LayerContext` for each layer, all at one position."""

    def __init__(self, config: DFlashConfig) -> None:
        windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
        self.layers = [LayerContext(None if window is None else window - 1) for window in windows]
        self.offset = 0  # committed positions seen so far = absolute position of the next context row

    def rewind(self, count: int) -> bool:
        """Forget the last ``count`` positions; False, and no change, where rows they uncover are gone."""
        left = self.offset - count
        if left < 0 or not all(layer.can_forget(count, left) for layer in self.layers):
            return False
        for layer in self.layers:
            layer.length -= count
        self.offset = left
        return True

    def mark(self) -> Callable[[], None]:
        """Note the positions seen; what is returned goes back to them."""
        offset, layers = self.offset, [layer.mark() for layer in self.layers]

        def back() -> None:
            self.offset = offset
            for layer in layers:
                layer()

        return back

    @property
    def nbytes(self) -> int:
        """Resident bytes of all layers."""
        return sum(layer.nbytes for layer in self.layers)


class RMSNorm(nn.RMSNorm):
    """RMS norm in two kernels on a CPU, where mlx's own is seven operations; Metal has one kernel for it."""

    def __call__(self, rows: mx.array) -> mx.array:
        """[..., D] to [..., D]."""
        norm = mx.fast.rms_norm if mx.metal.is_available() else _compiled_norm
        normal: mx.array = norm(rows, self.weight, self.eps)
        return normal


@mx.compile
def _compiled_norm(rows: mx.array, weight: mx.array, eps: float) -> mx.array:
    exact = rows.astype(mx.float32)
    scale = mx.rsqrt(mx.mean(mx.square(exact), axis=-1, keepdims=True) + eps)
    return (exact * scale * weight).astype(rows.dtype)


class Attention(nn.Module):
    """Block rows attend to the context and to the block."""

    def __init__(self, config: DFlashConfig, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is untyped here
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, dim
        self.window, self.causal = config.window(layer), config.causal(layer)
        self.scale = dim**-0.5
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
        queries = self.q_norm(self.q_proj(block).reshape(1, length, self.heads, self.head_dim))
        queries = rotary.rotate(queries, angles.skip(new))
        keys, values, seen = memory.extend(*self._keys_values(rows, rotary, angles), new)
        output = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale, mask=self._mask(length, seen)
        )
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(1, length, -1))

    def absorb(self, context: mx.array, rotary: Rotary, angles: Angles, memory: LayerContext) -> None:
        """Add context rows [1, S, hidden] without drafting; ``angles`` are those of the S positions."""
        if surplus := memory.surplus(context.shape[1]):
            context, angles = context[:, surplus:], angles.skip(surplus)
            memory.length = 0  # all earlier rows are out of every window too
        memory.extend(*self._keys_values(context, rotary, angles), context.shape[1])

    def _keys_values(self, rows: mx.array, rotary: Rotary, angles: Angles) -> tuple[mx.array, mx.array]:
        shape = (1, rows.shape[1], self.kv_heads, self.head_dim)
        keys = rotary.rotate(self.k_norm(self.k_proj(rows).reshape(shape)), angles)
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
    """Gated feed-forward: down(act(gate(x)) · up(x)), the product in one kernel."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is untyped here
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        activation = ACTIVATIONS[config.hidden_act]
        self.product = mx.compile(lambda gate, up: activation(gate) * up)

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
        """Draft one block, first adding the context rows that are new.

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
        """Add committed positions without drafting; ``ahead`` more count towards the sequence's length."""
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
