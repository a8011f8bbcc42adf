"""Every target family with tiny random weights, built by mlx-lm's own model code.

Between them the configurations have every layer kind (full, sliding, gated delta, experts, shared keys and
values, per-layer inputs, attention sinks), both nestings (flat, ``text_config``), tied and untied heads, and
logits with and without a soft-cap. Weights are scaled so that greedy text wanders instead of repeating.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map_with_path

from tests.engine import tiny

GROUP, BITS = 32, 4  # of the quantized variants
SLIDING, FULL = "sliding_attention", "full_attention"
PLAIN = tiny.PLAIN | {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "norm_topk_prob": True}
DELTA = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
QWEN35_TEXT = PLAIN | DELTA | {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
GEMMA4_TEXT = PLAIN | {
    "num_hidden_layers": 8,
    "global_head_dim": 16,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, FULL],
    "sliding_window": tiny.WINDOW,
    "final_logit_softcapping": 20.0,
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "truncate": False}


@dataclass(frozen=True)
class Family:
    """A family's ``config.json`` and how its random weights are made."""

    config: dict[str, Any]
    tied: bool  # whether the embedding is also the head
    gain: float = 3.0  # factor on matrices
    table_gain: float = 3.0  # factor on the token table; small where a tied head would see its own token
    softcap: float | None = None
    recurrent: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family({"model_type": "llama", "tie_word_embeddings": False, **PLAIN}, tied=False),
    "mistral": Family(  # mlx-lm's llama code, with sliding layers
        {
            "model_type": "mistral",
            "tie_word_embeddings": True,
            "layer_types": [SLIDING, FULL, SLIDING],
            "sliding_window": tiny.WINDOW,
            **PLAIN,
        },
        tied=True,
    ),
    "qwen3": Family(
        {"model_type": "qwen3", "tie_word_embeddings": True, **PLAIN}, tied=True, gain=4.0, table_gain=0.1
    ),
    "qwen3_moe": Family(
        {
            "model_type": "qwen3_moe",
            "tie_word_embeddings": False,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
            **EXPERTS,
            **PLAIN,
        },
        tied=False,
    ),
    "gemma3_text": Family(tiny.GEMMA | {"tie_word_embeddings": True}, tied=True, table_gain=0.3),
    "gemma3": Family(
        {
            "model_type": "gemma3",
            "vocab_size": tiny.VOCAB,
            "text_config": {key: value for key, value in tiny.GEMMA.items() if key != "vocab_size"},
        },
        tied=False,
    ),
    "gemma4_text": Family(  # as the small ones: per-layer inputs, the last layers share keys and values
        {
            "model_type": "gemma4_text",
            "tie_word_embeddings": True,
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": tiny.VOCAB,
            **GEMMA4_TEXT,
        },
        tied=True,
        table_gain=0.2,
        softcap=20.0,
    ),
    "gemma4": Family(  # as the large ones: experts beside the MLP, keys that are also the values
        {
            "model_type": "gemma4",
            "vocab_size": tiny.VOCAB,
            "text_config": {
                **GEMMA4_TEXT,
                "model_type": "gemma4_text",
                "tie_word_embeddings": False,
                "num_kv_shared_layers": 0,
                "hidden_size_per_layer_input": 0,
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 32,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
            },
        },
        tied=False,
        softcap=20.0,
    ),
    "gpt_oss": Family(
        {
            "model_type": "gpt_oss",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": tiny.WINDOW,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "rope_scaling": YARN,
            **PLAIN,
            "num_hidden_layers": 4,
        },
        tied=False,
    ),
    "qwen3_5": Family(
        {
            "model_type": "qwen3_5",
            "text_config": {"model_type": "qwen3_5_text", "tie_word_embeddings": True, **QWEN35_TEXT},
        },
        tied=True,
        recurrent=True,
    ),
    "qwen3_5_moe": Family(
        {
            "model_type": "qwen3_5_moe",
            "text_config": {
                **QWEN35_TEXT,
                **EXPERTS,
                "model_type": "qwen3_5_moe_text",
                "tie_word_embeddings": False,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32,
            },
        },
        tied=False,
        recurrent=True,
    ),
    "qwen3_next": Family(
        {
            "model_type": "qwen3_next",
            "tie_word_embeddings": False,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "mlp_only_layers": [0],
            **EXPERTS,
            **PLAIN,
            **DELTA,
        },
        tied=False,
        recurrent=True,
    ),
}
QUANTIZED = ("llama", "qwen3", "qwen3_moe", "gemma3_text", "gemma4_text", "gpt_oss")


def build(family: str, quantized: bool = False, seed: int = 3, head_dim: int | None = None) -> Any:
    """A random model of the family, float32.

    Args:
        family: its name.
        quantized: its matrices in affine 4-bit groups of 32.
        seed: of the weights.
        head_dim: of every head but global ones, which are twice as wide; None: as in the table.
    """
    entry = FAMILIES[family]
    config = deepcopy(entry.config)  # mlx-lm's argument classes write into nested ones
    if head_dim is not None:
        text = config.get("text_config", config)
        text["head_dim"] = head_dim
        if "global_head_dim" in text:
            text["global_head_dim"] = 2 * head_dim
    code = import_module(f"mlx_lm.models.{'llama' if family == 'mistral' else family}")
    mx.random.seed(seed)
    model = code.Model(code.ModelArgs.from_dict(config))
    text = getattr(model, "language_model", model)
    if entry.tied and "lm_head" in text:
        text.sanitize({})  # how Gemma 3 learns that its file holds no head
    model.eval()
    model.update(tree_map_with_path(lambda name, w: _scaled(name, w, entry), model.parameters()))
    if quantized:
        nn.quantize(model, GROUP, BITS, class_predicate=_can_be_quantized)
    mx.eval(model.parameters())
    return model


def save(folder: Path, family: str, quantized: bool = False, **changes: Any) -> Path:
    """The model as a folder mlx-lm loads, with a byte-level tokenizer; ``changes`` go into its config."""
    folder.mkdir(parents=True)
    model = build(family, quantized)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = FAMILIES[family].config | {"eos_token_id": [tiny.EOS, tiny.END]}
    if quantized:
        config["quantization"] = {"group_size": GROUP, "bits": BITS}
    (folder / "config.json").write_text(json.dumps(config | changes))
    tiny.save_tokenizer(folder)
    return folder


def layers_by_hand(model: Any, tokens: mx.array) -> tuple[list[mx.array], mx.array]:
    """Output of every decoder layer [1, N, hidden], and the model's logits, from one forward.

    Layers are replaced in the model's list by plain recorders, independent of the engine's hooks.
    """
    core = getattr(model, "language_model", model).model
    outputs: list[mx.array] = []
    plain = core.layers

    class Recorder:
        def __init__(self, layer: Any) -> None:
            self.layer = layer

        def __getattr__(self, name: str) -> Any:
            return getattr(self.layer, name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = self.layer(*args, **kwargs)
            outputs.append(output[0] if isinstance(output, tuple) else output)
            return output

    core.layers = [Recorder(layer) for layer in plain]
    try:
        logits = model(tokens)
    finally:
        core.layers = plain
    return outputs, logits


def _scaled(name: str, weight: mx.array, entry: Family) -> mx.array:
    if name.endswith("sinks"):
        return mx.random.normal(weight.shape)
    gain = entry.table_gain if name.endswith("embed_tokens.weight") else entry.gain
    return gain * weight if weight.ndim > 1 and not name.endswith("conv1d.weight") else weight


def _can_be_quantized(_: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % GROUP == 0
