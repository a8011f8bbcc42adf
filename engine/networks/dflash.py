"""The DFlash drafter network: parameters, the forward over one block, and what it remembers of a sequence.

DFlash (Chen et al. 2026, arXiv 2602.06036) drafts a whole block in one forward. The hidden states of a few
target layers at the committed positions are the *context*: concatenated, projected by ``fc``, normalised
once, and offered to every layer as extra keys and values. The *block* is [bonus, mask, mask, …], embedded
with the target's table; its rows attend to the context and to each other, and the target's own head turns
the rows after the first into drafts. Parameters have the published names.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
from mlx import nn

from engine.cache.codecs.base import Codec
from engine.cache.policy import NATIVE, KVPolicy
from engine.cache.ring import widened
from engine.device import launch
from engine.networks.dflash_config import DFlashConfig
from engine.networks.rotary import Angles, Rotary

SPARE = 64  # rows a sliding layer keeps beyond its window when its buffer grows, so that it can go back
ACTIVATIONS = {"silu": nn.silu, "gelu_pytorch_tanh": nn.gelu_approx, "gelu": nn.gelu}


class LayerContext:
    """Keys and values of one layer's committed positions, oldest first.

    Rows of the block being drafted are written behind them as scratch and overwritten by the next call, so
    nothing a draft does has to be undone. The buffers grow by steps; a layer with a window uses only the
    first ``sink`` and the newest ``keep`` rows and drops others, but for `SPARE`, when the buffers are full.
    In a code, committed rows are encoded and decoded at every read; the block's rows are not kept.
    """

    step = 256

    def __init__(self, keep: int | None, sink: int = 0, codecs: Sequence[Codec] = ()) -> None:
        self.keep, self.sink = keep, sink
        self._codecs = codecs  # of keys and of values, or none
        self.length = 0  # committed rows in the buffers
        self.buffers: list[mx.array] = []  # keys and values, or the parts of their codes

    def extend(self, keys: mx.array, values: mx.array, new: int) -> tuple[mx.array, mx.array, int]:
        """Append rows [1, KV heads, new + block, head dim]; return all to attend to, of them the context."""
        if not self._codecs:
            self._write([keys, values])
            ahead = keys.shape[2] - new
            self.length += new
            seen_k, seen_v = (self._visible(buffer, ahead) for buffer in self.buffers)
        else:
            if new:
                pairs = zip(self._codecs, (keys, values), strict=True)
                self._write([part for codec, rows in pairs for part in codec.encode(rows[..., :new, :])])
                self.length += new
            parts = [self._visible(buffer, 0) for buffer in self.buffers]
            count = self._codecs[0].parts
            halves = (parts[:count], parts[count:])
            seen_k, seen_v = (
                mx.concatenate([codec.decode(tuple(half), rows.dtype), rows[..., new:, :]], axis=2)
                if half
                else rows
                for codec, half, rows in zip(self._codecs, halves, (keys, values), strict=True)
            )
        return seen_k, seen_v, min(self.length, self._most)

    @property
    def _most(self) -> int:
        return self.length if self.keep is None else self.sink + self.keep

    def _write(self, rows: Sequence[mx.array]) -> None:
        count = rows[0].shape[2]
        if not self.buffers or self.length + count > self.buffers[0].shape[2]:
            held = self.length if self.keep is None else min(self.length, self._most + SPARE)
            size = -(-(held + count) // self.step) * self.step
            kept = [self._rows(buffer, held) for buffer in self.buffers] if held else [None] * len(rows)
            self.buffers = [widened(old, size, each) for old, each in zip(kept, rows, strict=True)]
            self.length = held
        for buffer, each in zip(self.buffers, rows, strict=True):
            buffer[..., self.length : self.length + count, :] = each

    def _visible(self, buffer: mx.array, ahead: int) -> mx.array:
        return self._rows(buffer, min(self.length, self._most), ahead)

    def _rows(self, buffer: mx.array, count: int, ahead: int = 0) -> mx.array:
        """The pinned and the newest committed rows, ``count`` together, and ``ahead`` behind them."""
        pinned, first, end = min(self.sink, count), self.length - count, self.length + ahead
        if not pinned or not first:
            return buffer[..., first:end, :]
        return mx.concatenate([buffer[..., :pinned, :], buffer[..., first + pinned : end, :]], axis=2)

    def wanted(self, new: int) -> list[tuple[int, int]]:
        """Which of ``new`` rows to come a later query can see, as ranges; only these need be computed."""
        if self.keep is None or new <= self._most + SPARE:
            return [(0, new)]
        self.length = min(self.length, self.sink)  # all other rows are out of the window too
        pinned = self.sink - self.length
        return [each for each in ((0, pinned), (new - self.keep - SPARE, new)) if each[1] > each[0]]

    def can_forget(self, count: int, positions: int) -> bool:
        """Whether, without its newest ``count`` rows, it holds all a query after ``positions`` may see."""
        return self.length - count >= (positions if self.keep is None else min(positions, self._most))

    def fork(self) -> "LayerContext":
        """One more with the same rows, under handles of their own: writing into one changes no other."""
        other = LayerContext(self.keep, self.sink, self._codecs)
        other.length, other.buffers = self.length, [mx.array(buffer) for buffer in self.buffers]
        return other

    def state(self) -> tuple[int, list[mx.array]]:
        """Rows and buffers, without the free rows behind them."""
        return self.length, [buffer[..., : self.length, :] for buffer in self.buffers]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


class Context:
    """What the network remembers of one sequence: a `LayerContext` for each layer, all at one position."""

    def __init__(self, config: DFlashConfig, policy: KVPolicy = NATIVE) -> None:
        """A policy with a window bounds full layers, and narrows sliding ones without a sink."""
        codecs = [make(config.head_dim) for make in policy.codecs]
        self.layers = []
        for layer in range(config.num_hidden_layers):
            keep, sink = config.window(layer), 0
            if keep is not None:
                keep -= 1
            if policy.bound is not None:
                keep, sink = (policy.window, policy.sink) if keep is None else (min(keep, policy.window), 0)
            self.layers.append(LayerContext(keep, sink, codecs))
        self.offset = 0  # committed positions seen so far = absolute position of the next context row

    def rewindable(self, count: int) -> bool:
        """Whether the last ``count`` positions can be forgotten: the rows they uncover are there."""
        left = self.offset - count
        return left >= 0 and all(layer.can_forget(count, left) for layer in self.layers)

    def rewind(self, count: int) -> None:
        for layer in self.layers:
            layer.length -= count
        self.offset -= count

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


class RMSNorm(nn.RMSNorm):
    """RMS norm in two kernels on a CPU, where mlx's own is seven operations; Metal has one kernel for it."""

    def __call__(self, rows: mx.array) -> mx.array:
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
        """Of block rows [1, B, hidden]; S ≥ 0 new context rows extend ``memory``, ``angles`` are of S + B."""
        length, new = block.shape[1], context.shape[1]
        rows = mx.concatenate([context, block], axis=1) if new else block  # [1, S + B, hidden]
        queries = self.q_norm(self.q_proj(block).reshape(1, length, self.heads, self.head_dim))
        queries = rotary.rotate(queries, angles.part(new))
        keys, values, seen = memory.extend(*self._keys_values(rows, rotary, angles), new)
        output = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale, mask=self._mask(length, seen)
        )
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(1, length, -1))

    def together(
        self, blocks: mx.array, contexts: mx.array, rotary: Rotary, parts: Sequence["Part"], layer: int
    ) -> mx.array:
        """As `__call__`, of several sequences: block rows [1, ΣB, hidden], context rows [1, ΣS, hidden]."""
        queries = self.q_norm(self.q_proj(blocks).reshape(1, -1, self.heads, self.head_dim))
        behind = [(part.angles.part(part.new), part.length) for part in parts]
        before = [(part.angles.part(0, part.new), part.new) for part in parts if part.new]
        queries = rotary.rotate_parts(queries, behind)
        shape = (1, -1, self.kv_heads, self.head_dim)
        rows = mx.concatenate([contexts, blocks], axis=1)
        keys = rotary.rotate_parts(self.k_norm(self.k_proj(rows).reshape(shape)), [*before, *behind])
        values = self.v_proj(rows).reshape(shape).transpose(0, 2, 1, 3)
        outputs, context, block, split = [], 0, 0, contexts.shape[1]
        for part in parts:
            (first, last), (begin, end) = (context, context + part.new), (block, block + part.length)
            context, block = last, end
            own_k, own_v = (
                mx.concatenate([each[:, :, first:last], each[:, :, split + begin : split + end]], axis=2)
                for each in (keys, values)
            )
            seen_k, seen_v, seen = part.context.layers[layer].extend(own_k, own_v, part.new)
            mask = self._mask(part.length, seen)
            query = queries[:, :, begin:end]
            output = mx.fast.scaled_dot_product_attention(query, seen_k, seen_v, scale=self.scale, mask=mask)
            outputs.append(output)
        joined = mx.concatenate(outputs, axis=2).transpose(0, 2, 1, 3)
        return self.o_proj(joined.reshape(1, joined.shape[1], -1))

    def absorb(self, context: mx.array, rotary: Rotary, angles: Angles, memory: LayerContext) -> None:
        """Add context rows [1, S, hidden] without drafting; ``angles`` are those of the S positions."""
        for first, last in memory.wanted(context.shape[1]):
            part = self._keys_values(context[:, first:last], rotary, angles.part(first, last))
            memory.extend(*part, last - first)

    def _keys_values(self, rows: mx.array, rotary: Rotary, angles: Angles) -> tuple[mx.array, mx.array]:
        shape = (1, rows.shape[1], self.kv_heads, self.head_dim)
        keys = rotary.rotate(self.k_norm(self.k_proj(rows).reshape(shape)), angles)
        return keys, self.v_proj(rows).reshape(shape).transpose(0, 2, 1, 3)

    def _mask(self, length: int, seen: int) -> mx.array | str | None:
        if self.window is None or seen + length <= self.window:  # the window hides nothing
            return "causal" if self.causal else None
        return _window_mask(length, seen, self.window, self.causal)


@lru_cache(maxsize=64)
def _window_mask(length: int, seen: int, window: int, causal: bool) -> mx.array:
    """Bool [length, seen + length]. ``seen`` stays at window - 1 once reached: few masks serve a sequence."""
    query = mx.arange(seen, seen + length)[:, None]
    key = mx.arange(seen + length)[None]
    visible = query - key < window
    visible = visible & (key <= query) if causal else visible & (key - query < window)
    launch(visible)  # an array that is kept must not need the thread that made it
    return visible


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
        rows = rows + self.self_attn(self.input_layernorm(rows), context, rotary, angles, memory)
        return rows + self.mlp(self.post_attention_layernorm(rows))

    def together(
        self, rows: mx.array, contexts: mx.array, rotary: Rotary, parts: Sequence["Part"], layer: int
    ) -> mx.array:
        """As `__call__`, of several sequences; see `Attention.together`."""
        rows = rows + self.self_attn.together(self.input_layernorm(rows), contexts, rotary, parts, layer)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class Part(NamedTuple):
    """A sequence's part of what several draft together."""

    length: int  # block rows
    new: int  # context rows
    angles: Angles  # of both, the context's first
    context: Context


class DFlash(nn.Module):
    """The network without embedding and head, which are the target's."""

    layer_class: type[Layer] = Layer

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is untyped here
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [self.layer_class(config, index) for index in range(config.num_hidden_layers)]
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rope = Rotary(config.rotary, config.head_dim)

    def __call__(self, embeddings: mx.array, hidden_states: mx.array, context: Context) -> mx.array:
        """Draft one block: normalised hidden states of its rows, [1, B, hidden].

        ``embeddings`` [1, B, hidden] are what the target's first layer gets, but scaled; ``hidden_states``
        [1, S, K·hidden] are target layer outputs at S ≥ 0 new committed positions, which ``context`` holds
        on return.
        """
        length = embeddings.shape[1]
        if hidden_states.shape[1] > SPARE:  # many rows: a sliding layer need not compute those it cannot see
            self.absorb(hidden_states, context, ahead=length)
            hidden_states = hidden_states[:, :0]
        features, new = self._features(hidden_states), hidden_states.shape[1]
        end = context.offset + new + length
        angles = self.rope.angles(context.offset, new + length, end)
        rows = embeddings
        for layer, memory in zip(self.layers, context.layers, strict=True):
            rows = layer(rows, features, self.rope, angles, memory)
        context.offset += new
        hidden: mx.array = self.norm(rows)
        return hidden

    def together(self, blocks: Sequence[tuple[mx.array, mx.array, Context]]) -> mx.array:
        """Draft a block for each of several sequences, see `__call__`: [1, ΣB, hidden].

        What treats rows one by one is computed for all at once; each attends to its own context.
        """
        parts, waiting = [], []
        for embeddings, hidden_states, context in blocks:
            length, new = embeddings.shape[1], hidden_states.shape[1]
            if new > SPARE:
                self.absorb(hidden_states, context, ahead=length)
                new = 0
            waiting.append(hidden_states[:, :new])
            angles = self.rope.angles(context.offset, new + length, context.offset + new + length)
            parts.append(Part(length, new, angles, context))
        features = self._features(mx.concatenate(waiting, axis=1))
        rows = mx.concatenate([embeddings for embeddings, *_ in blocks], axis=1)
        for index, layer in enumerate(self.layers):
            rows = layer.together(rows, features, self.rope, parts, index)
        for part in parts:
            part.context.offset += part.new
        hidden: mx.array = self.norm(rows)
        return hidden

    def absorb(self, hidden_states: mx.array, context: Context, *, ahead: int = 0) -> None:
        features, new = self._features(hidden_states), hidden_states.shape[1]
        angles = self.rope.angles(context.offset, new, context.offset + new + ahead)
        for layer, memory in zip(self.layers, context.layers, strict=True):
            layer.self_attn.absorb(features, self.rope, angles, memory)
        context.offset += new

    def _features(self, hidden_states: mx.array) -> mx.array:
        """Context rows [1, S, hidden] from hidden states [1, S, K·hidden]."""
        if not hidden_states.shape[1]:
            return mx.zeros((1, 0, self.config.hidden_size), hidden_states.dtype)
        features: mx.array = self.hidden_norm(self.fc(hidden_states))
        return features

    def shape_logits(self, logits: mx.array) -> mx.array:
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = mx.tanh(logits / cap) * cap
        return logits
