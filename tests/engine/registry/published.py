"""Configurations of the models that the registry names, as published, and tiny models of the same kinds.

Targets have what decides their shapes, from public copies of the files or, where they equal them, the
defaults of transformers and mlx-lm. Drafters have what says whom they draft for, and their kinds of layers.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map_with_path

from engine.target.folder import build_unloaded, text_part
from tests.engine import tiny
from tests.engine.random_drafters import SECOND

SLIDING, FULL = "sliding_attention", "full_attention"
DELTA = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 248320,
}


def _qwen35(
    hidden: int, layers: int, intermediate: int, heads: tuple[int, int], values: int
) -> dict[str, Any]:
    text = DELTA | {
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "linear_num_value_heads": values,
        "tie_word_embeddings": hidden < 4096,
    }
    return {"model_type": "qwen3_5", "text_config": text}


def _qwen35_moe(hidden: int, layers: int, experts: int, heads: int, values: int) -> dict[str, Any]:
    text = DELTA | {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "moe_intermediate_size": experts,
        "shared_expert_intermediate_size": experts,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "linear_num_value_heads": values,
        "tie_word_embeddings": False,
    }
    return {"model_type": "qwen3_5_moe", "text_config": text}


def _llama(hidden: int, layers: int, intermediate: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": tied,
    }


def _gemma4(kind: str, hidden: int, layers: int, heads: tuple[int, int, int], **more: Any) -> dict[str, Any]:
    text = {
        "model_type": f"{kind}_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "num_global_key_value_heads": heads[2],
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "layer_types": ([SLIDING] * 5 + [FULL]) * (layers // 6),
        "vocab_size": 262144,
        "use_double_wide_mlp": False,
    }
    return {"model_type": kind, "text_config": text | more}


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": layers,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": [SLIDING, FULL] * (layers // 2),
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "vocab_size": 201088,
    }


QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "quantization": {"group_size": 64, "bits": 4},
}
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3-4b": QWEN3_4B,
    "qwen3-8b": QWEN3_4B | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "qwen3.5-4b": _qwen35(2560, 32, 9216, (16, 4), 32),
    "qwen3.5-9b": _qwen35(4096, 32, 12288, (16, 4), 32),
    "qwen3.5-27b": _qwen35(5120, 64, 17408, (24, 4), 48),
    "qwen3.5-35b-a3b": _qwen35_moe(2048, 40, 512, 16, 32),
    "qwen3.5-122b-a10b": _qwen35_moe(3072, 48, 1024, 32, 64),
    "qwen3.6-27b": _qwen35(5120, 64, 17408, (24, 4), 48),
    "qwen3.6-35b-a3b": _qwen35_moe(2048, 40, 512, 16, 32),
    "qwen3.8-27b": _qwen35(5120, 64, 17408, (24, 4), 48),
    "llama-3.1-8b-instruct": _llama(4096, 32, 14336, 32, tied=False),
    "llama-3.2-3b-instruct": _llama(3072, 28, 8192, 24, tied=True),
    "llama-3.3-70b-instruct": _llama(8192, 80, 28672, 64, tied=False),
    "gemma-4-12b": _gemma4("gemma4_unified", 3840, 48, (16, 8, 1), intermediate_size=15360),
    "gemma-4-26b-a4b": _gemma4(
        "gemma4",
        2816,
        30,
        (16, 8, 2),
        intermediate_size=2112,
        moe_intermediate_size=704,
        num_experts=128,
        top_k_experts=8,
        enable_moe_block=True,
    ),
    "gemma-4-31b": _gemma4("gemma4", 5376, 60, (32, 16, 4), intermediate_size=21504),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "glm-4.5-air": {
        "model_type": "glm4_moe",
        "hidden_size": 4096,
        "num_hidden_layers": 46,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "use_qk_norm": False,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "vocab_size": 151552,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite",
        "hidden_size": 2048,
        "num_hidden_layers": 47,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_shared_experts": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": 154880,
    },
    "muse-glimmer-30b": {
        "model_type": "muse_glimmer",
        "text_config": {
            "model_type": "muse_glimmer_text",
            "hidden_size": 6656,
            "num_hidden_layers": 52,
            "intermediate_size": 19968,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "sliding_window": 2048,
            "layer_types": ([SLIDING] * 3 + [FULL]) * 13,
            "vocab_size": 202048,
        },
    },
    "mistral-7b": _llama(4096, 32, 14336, 32, tied=False) | {"model_type": "mistral", "vocab_size": 32768},
}


def _reads(hidden: int, layers: list[int], mask: int | None, block: int, **more: Any) -> dict[str, Any]:
    nested = {"target_layer_ids": layers, "mask_token_id": mask}
    return {"hidden_size": hidden, "block_size": block, "dflash_config": nested} | more


def _reads_second(hidden: int, layers: list[int], mask: int, block: int, **more: Any) -> dict[str, Any]:
    """DFlash 2: five sliding layers, none of them causal."""
    second = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
    nested = {"target_layer_ids": layers, "mask_token_id": mask, "block_size": block} | second
    for name in ("output_multiplier", "final_logit_softcapping"):
        if name in more:
            nested[name] = more.pop(name)
    kinds = {"layer_types": [SLIDING] * 5, "sliding_window": 2048, "is_causal": False}
    said = {"architectures": ["DFlash2DraftModel"], "hidden_size": hidden, "dflash_config": nested}
    return said | kinds | more


MIXED = {"layer_types": [SLIDING] * 4 + [FULL], "sliding_window": 2048}
QWEN = {"vocab_size": 248320}
DRAFTERS: dict[str, dict[str, Any]] = {
    "qwen3.5-9b": _reads(4096, [1, 8, 15, 22, 29], 248070, 16, layer_types=[FULL] * 5),
    "qwen3.5-27b": _reads(5120, [1, 10, 18, 27, 35, 44, 52, 61], 248077, 16, num_hidden_layers=6, **QWEN),
    "qwen3.5-35b-a3b": _reads(2048, [1, 10, 19, 28, 37], 248070, 16, num_hidden_layers=8, **QWEN),
    "qwen3.5-122b-a10b": _reads(
        3072, [1, 7, 14, 20, 26, 32, 39, 45], 248077, 16, num_hidden_layers=6, sliding_window=4096, **QWEN
    ),
    "qwen3.6-27b": _reads(5120, [1, 16, 31, 46, 61], 248070, 16, num_target_layers=64, **MIXED, **QWEN),
    "qwen3.6-35b-a3b": _reads(2048, [1, 10, 19, 28, 37], 248070, 16, num_hidden_layers=8, **QWEN),
    "qwen3.8-27b": _reads_second(5120, [5, 19, 33, 47, 61], 248070, 8, num_target_layers=64, **QWEN),
    "gemma-4-12b": _reads(3840, [1, 10, 19, 27, 36, 45], 4, 16, final_logit_softcapping=30.0, **MIXED),
    "gemma-4-31b": _reads(
        5376,
        [1, 12, 23, 35, 46, 57],
        4,
        16,
        final_logit_softcapping=30.0,
        num_target_layers=60,
        vocab_size=262144,
        **MIXED,
    ),
    "gpt-oss-20b": _reads(2880, [1, 6, 11, 16, 21], 200000, 8, layer_types=[FULL] * 8),
    "gpt-oss-120b": _reads(2880, [1, 9, 17, 25, 33], None, 10, num_hidden_layers=8, attention_bias=True),
    "muse-glimmer-30b": _reads_second(
        6656,
        [1, 13, 25, 37, 49],
        201818,
        16,
        num_target_layers=52,
        vocab_size=202048,
        output_multiplier=0.19611613513818404,
        final_logit_softcapping=20.0,
    ),
}

# Sizes of the tiny models; what is not here stays as published.
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "sliding_window": tiny.WINDOW,
    "vocab_size": tiny.VOCAB,
    "max_position_embeddings": 512,
}
LAYERS = 6  # a whole period of every pattern of layers


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with few layers of the same kinds and small sizes."""
    small = deepcopy(config)
    small.pop("quantization", None)
    text = text_part(small)
    assert isinstance(text, dict)
    text |= {name: size for name, size in SMALL.items() if name in text}
    text["num_hidden_layers"] = LAYERS
    small["vocab_size"] = tiny.VOCAB  # Gemma 4 reads it here
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:LAYERS]
    return small


def tiny_target(name: str, seed: int = 3) -> Any:
    """A random model of a published target's shrunk configuration, float32, whose greedy text wanders."""
    mx.random.seed(seed)
    model = build_unloaded(shrunk(TARGETS[name]))
    model.eval()
    model.update(tree_map_with_path(_scaled, model.parameters()))
    mx.eval(model.parameters())
    return model


def _scaled(name: str, weight: mx.array) -> mx.array:
    gain = 0.2 if name.endswith("embed_tokens.weight") else 3  # a tied head would see its own token
    return gain * weight if weight.ndim > 1 and not name.endswith("conv1d.weight") else weight


def tiny_drafter_config(name: str) -> dict[str, Any]:
    """A drafter's configuration of the published layout that reads as many layers of the shrunk target."""
    said = deepcopy(DRAFTERS[name])
    nested = said["dflash_config"]
    reads = len(nested["target_layer_ids"])
    nested["target_layer_ids"] = sorted({at * LAYERS // reads for at in range(reads)})
    nested["mask_token_id"] = tiny.MASK
    nested |= {key: size for key, size in SECOND.items() if key in nested}
    layers = said.get("num_hidden_layers") or len(said["layer_types"])
    said |= {"hidden_size": 32, "vocab_size": tiny.VOCAB, "num_hidden_layers": layers}
    said["num_target_layers"] = LAYERS
    if "layer_types" not in said:
        said["layer_types"] = [FULL] * layers
    if "sliding_window" in said:
        said["sliding_window"] = 12
    return tiny.drafter_config(**said)


def full_drafter_config(name: str) -> dict[str, Any]:
    """The published part of a drafter's configuration, completed by sizes that nobody compares."""
    said = deepcopy(DRAFTERS[name])
    layers = said.get("num_hidden_layers") or len(said["layer_types"])
    if said["dflash_config"]["mask_token_id"] is None:
        said["dflash_config"]["mask_token_id"] = 0
    other = {"vocab_size": text_part(TARGETS[name])["vocab_size"], "num_target_layers": None}
    plain = {"layer_types": [FULL] * layers, "num_hidden_layers": layers}
    return tiny.drafter_config(**(other | plain | said))


def save(folder: Path, config: dict[str, Any]) -> Path:
    """A folder of a config.json alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
