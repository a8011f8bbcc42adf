"""The training forward of `gemma3_text`: mlx-lm's mathematics, laid out for whole sequences on a CPU.

Sliding layers attend block by block (own block and the previous one) instead of over a masked square, and the
exponentials come from `fastops`. Parameters are those of the stock mlx-lm model. No caches, no generation.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from tools.demo_models.fastops import gelu, softmax

MASKED = -100.0  # added to scores; `softmax` gives zero to anything 51 below the maximum


def embedding_scale(hidden_size: int) -> float:
    """The factor Gemma applies to embeddings: sqrt(hidden), rounded to bfloat16 as mlx-lm does."""
    rounded: Any = mx.array(hidden_size**0.5, mx.bfloat16).astype(mx.float32)
    return float(rounded.item())


def causal_mask(length: int) -> mx.array:
    """Additive mask [length, length]: position i sees 0..i."""
    return mx.where(mx.arange(length)[:, None] >= mx.arange(length)[None], 0.0, MASKED)


def local_mask(length: int, window: int) -> mx.array:
    """Additive mask [blocks, window, 2 * window] for blocks that see themselves and the previous block.

    Position i sees the `window` positions i - window + 1 .. i. The first block has no previous one.
    """
    query = mx.arange(window)[:, None] + window
    key = mx.arange(2 * window)[None]
    mask = mx.where((query >= key) & (query < key + window), 0.0, MASKED)
    first = (mx.arange(length // window) == 0)[:, None, None]
    return mx.where(first & (key < window)[None], MASKED, mask[None])


def full_attention(q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> mx.array:
    """Causal attention: q [B, H, T, D] already scaled, k and v [B, KV, T, D]; returns [B, H, T, D]."""
    batch, heads, length, dim = q.shape
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], length, dim)
    weights: mx.array = softmax(grouped @ k[:, :, None].swapaxes(-1, -2) + mask)
    return (weights @ v[:, :, None]).reshape(batch, heads, length, dim)


def local_attention(q: mx.array, k: mx.array, v: mx.array, mask: mx.array, window: int) -> mx.array:
    """Sliding attention in blocks of `window`; shapes as in `full_attention`, T a multiple of `window`."""
    batch, heads, length, dim = q.shape
    groups, blocks = k.shape[1], length // window

    def with_previous(x: mx.array) -> mx.array:
        x = x.reshape(batch, groups, 1, blocks, window, dim)
        before = mx.concatenate([mx.zeros_like(x[:, :, :, :1]), x[:, :, :, :-1]], axis=3)
        return mx.concatenate([before, x], axis=4)

    grouped = q.reshape(batch, groups, heads // groups, blocks, window, dim)
    weights: mx.array = softmax(grouped @ with_previous(k).swapaxes(-1, -2) + mask)
    return (weights @ with_previous(v)).reshape(batch, heads, length, dim)


def forward(model: Any, tokens: mx.array, taps: tuple[int, ...] = ()) -> tuple[mx.array, list[mx.array]]:
    """Logits [B, T, V] of `tokens` [B, T] and the outputs [B, T, H] of the layers named in `taps`.

    Args:
        model: a `mlx_lm.models.gemma3_text.Model` with a tied head.
        tokens: T must be a multiple of the sliding window.
        taps: 0-based decoder layers, in ascending order.

    Raises:
        ValueError: T is not a multiple of the sliding window.
    """
    args = model.args
    batch, length = tokens.shape
    window, heads, groups = args.sliding_window, args.num_attention_heads, args.num_key_value_heads
    if length % window:
        raise ValueError(f"the length {length} is not a multiple of the sliding window {window}")
    h = model.model.embed_tokens(tokens) * embedding_scale(args.hidden_size)
    everywhere, nearby = causal_mask(length), local_mask(length, window)
    tapped = []
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        x = layer.input_layernorm(h)

        def split(y: mx.array, count: int) -> mx.array:
            return y.reshape(batch, length, count, args.head_dim).transpose(0, 2, 1, 3)

        q = attention.rope(attention.q_norm(split(attention.q_proj(x), heads))) * attention.scale
        k = attention.rope(attention.k_norm(split(attention.k_proj(x), groups)))
        v = split(attention.v_proj(x), groups)
        if attention.is_sliding:
            attended = local_attention(q, k, v, nearby, window)
        else:
            attended = full_attention(q, k, v, everywhere)
        merged = attended.transpose(0, 2, 1, 3).reshape(batch, length, -1)
        h = h + layer.post_attention_layernorm(attention.o_proj(merged))
        x = layer.pre_feedforward_layernorm(h)
        mlp = layer.mlp
        hidden = mlp.down_proj(gelu(mlp.gate_proj(x)) * mlp.up_proj(x))
        h = h + layer.post_feedforward_layernorm(hidden)
        if index in taps:
            tapped.append(h)
    return model.model.embed_tokens.as_linear(model.model.norm(h)), tapped
