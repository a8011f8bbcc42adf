"""Tiny random models for every kind of cache, with the caches that engine and plain decoding use on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import ConcatenateKVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from engine.cache.policy import parse_policy
from engine.cache.ring import SlidingRing, WindowedKV
from engine.cache.transaction import new_caches
from tests.engine import families, tiny

WINDOW, SINK, VOCAB = tiny.WINDOW, 3, tiny.VOCAB
GROUP, BITS = 32, 8  # of quantized keys and values
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}

OTHERS: dict[str, dict[str, Any]] = {
    "mamba2": {
        **SIZES,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "num_hidden_layers": 3,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.0, float("inf")],
        "time_step_rank": "auto",
    },
    "falcon_h1": {
        **SIZES,
        **HEADS,
        "num_hidden_layers": 3,
        "mamba_d_head": 8,
        "mamba_d_ssm": 32,
        "mamba_d_state": 8,
        "mamba_n_heads": 4,
        "rope_theta": 10000.0,
    },
    "lfm2": {
        **SIZES,
        **HEADS,
        "num_hidden_layers": 4,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
        "rope_theta": 10000.0,
    },
    "kimi_linear": {
        **SIZES,
        **HEADS,
        "num_hidden_layers": 4,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "linear_attn_config": {
            "full_attn_layers": [2, 4],
            "kda_layers": [1, 3],
            "num_heads": 4,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 512,
        "num_experts": 0,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "rwkv7": {
        **SIZES,
        "norm_eps": 1e-5,
        "head_dim": 8,
        "num_hidden_layers": 3,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "recurrent_gemma": {
        **SIZES,
        **HEADS,
        "num_hidden_layers": 3,
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention", "recurrent"],
    },
    "nemotron_h": {
        **SIZES,
        **HEADS,
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "mamba_proj_bias": False,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "n_groups": 1,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "-", "*", "M"],
    },
    "baichuan_m1": {
        **SIZES,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "rope_theta": 10000.0,
        "sliding_window": WINDOW,
        "sliding_window_layers": [1],
        "conv_window": 2,
        "rms_norm_eps": 1e-5,
    },
    "llama4": {
        "text_config": {
            **SIZES,
            **HEADS,
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 48,
            "model_type": "llama4_text",
            "num_experts_per_tok": 1,
            "num_hidden_layers": 4,
            "num_local_experts": 2,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "use_qk_norm": True,
        },
    },
}


@cache
def model(family: str) -> Any:
    """A model of the family, made once; tests leave it as it was."""
    if family == "wide":  # heads wide enough for quantized groups
        return tiny.build("qwen3", hidden_size=128, head_dim=32)
    if family in families.FAMILIES:
        return families.build(family)
    code = import_module(f"mlx_lm.models.{family}")
    mx.random.seed(3)
    built = code.Model(code.ModelArgs.from_dict({"model_type": family} | OTHERS[family]))
    built.eval()
    # Vectors of ones and zeros become random ones, so that no state stays trivial.
    scaled = tree_map_with_path(lambda _, w: w + 0.1 * mx.random.normal(w.shape), built.parameters())
    built.update(scaled)
    mx.eval(built.parameters())
    return built


@dataclass(frozen=True)
class Kind:
    """A kind of cache: a model, our caches for it given the headroom, and those of plain decoding."""

    family: str
    ours: Callable[[Any, int], list[Any]] = new_caches
    plain: Callable[[Any], list[Any]] = make_prompt_cache
    tolerance: float = 5e-4
    logits: float = 5e-3  # absolute error of logits
    carries: bool = False


def _every(make: Callable[[], Any]) -> Callable[..., list[Any]]:
    return lambda built, *_: [make() for _ in built.layers]


def _others(built: Any, *_: int) -> list[Any]:
    """Two kinds the transaction has no way of its own for."""
    own = make_prompt_cache(built)
    return [entry if type(entry) is RotatingKVCache else ConcatenateKVCache() for entry in own]


def _one_other(built: Any, headroom: int) -> list[Any]:
    """The model's caches, one of them of a kind that cannot go back in part."""
    caches = new_caches(built, headroom)
    caches[-1] = ConcatenateKVCache()
    return caches


def _full(built: Any, headroom: int) -> list[Any]:
    """Sliding layers that keep all positions."""
    return new_caches(built, headroom, parse_policy("full-kv"))


KINDS: dict[str, Kind] = {
    "plain": Kind("llama"),
    "quantized": Kind(
        "wide",
        ours=_every(lambda: QuantizedKVCache(GROUP, BITS)),
        plain=_every(lambda: QuantizedKVCache(GROUP, BITS)),
        tolerance=0.2,
        logits=0.5,
    ),
    "sliding": Kind("gemma3_text"),
    "sliding-llama": Kind("mistral"),
    "sink": Kind(
        "llama",
        ours=lambda built, headroom: [SlidingRing(WINDOW, headroom, SINK) for _ in built.layers],
        plain=_every(lambda: RotatingKVCache(WINDOW + SINK, SINK)),
    ),
    "sliding-full": Kind("gemma3_text", ours=_full),
    "sliding-full-llama": Kind("mistral", ours=_full),
    "attention-sinks-full": Kind("gpt_oss", ours=_full),
    "sink-full": Kind(
        "llama",
        ours=lambda built, _: [WindowedKV(WINDOW, SINK) for _ in built.layers],
        plain=_every(lambda: RotatingKVCache(WINDOW + SINK, SINK)),
    ),
    "attention-sinks": Kind("gpt_oss"),
    "shared": Kind("gemma4_text"),
    "recurrent": Kind("mamba2"),
    "rwkv": Kind("rwkv7"),
    "gated-delta": Kind("qwen3_5"),
    # Rounding of the first layers grows by a factor of a hundred on the way through these experts.
    "gated-delta-moe": Kind("qwen3_next", tolerance=5e-3, logits=5e-2),
    "delta-attention": Kind("kimi_linear"),
    "short-conv": Kind("lfm2"),
    "recurrent-and-sliding": Kind("recurrent_gemma"),
    "fewer-caches-than-layers": Kind("nemotron_h"),
    "list": Kind("falcon_h1"),
    "chunked": Kind("llama4"),
    "carry": Kind("gemma3_text", ours=_others, plain=_others, carries=True),
    "carry-mixed": Kind("gemma3_text", ours=_one_other, carries=True),
    "carry-list": Kind("baichuan_m1", carries=True),
}
