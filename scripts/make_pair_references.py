"""Make the whole-loop references of `tests/data/pairs` with the published MLX package, greedy.

    uv pip install --target PACKAGES --no-deps dflash==0.1.0
    PYTHONPATH=PACKAGES:. python scripts/make_pair_references.py OUT [SEED]

Each case is a random target and a random DFlash or DFlash 2 drafter, and a run of the package's loop on them
(the layout is described in `engine.evaluation.parity`). Weights are float16 values, computed with in
float32. Without SEED the cases are those of `tests/data/pairs`, whose seeds are the first whose run confirms
a draft in a full block and does not repeat one token.
"""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from dflash import model_mlx
from mlx.utils import tree_flatten, tree_map, tree_map_with_path
from mlx_lm.utils import load_model, load_tokenizer

from engine.networks.dflash2 import build_network
from engine.networks.dflash_config import DFlashConfig
from tests.engine.tiny import save_tokenizer

BLOCK, PROMPT, TOKENS, VOCABULARY = 6, 24, 26, 300
SLIDING, FULL = "sliding_attention", "full_attention"
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
}
GEMMA = SIZES | {
    "tie_word_embeddings": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "global_head_dim": 8,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "sliding_window": 16,
    "final_logit_softcapping": 30.0,
}
DELTA = SIZES | {
    "tie_word_embeddings": True,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
SEEDS = {"gemma4_nested": 66, "gemma4_text": 11, "llama_untied": 15, "qwen35": 9}
SECOND = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 5}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the target, and what the drafter has besides
    "gemma4_nested": (
        {
            "model_type": "gemma4",
            "vocab_size": VOCABULARY,
            "text_config": GEMMA | {"model_type": "gemma4_text"},
        },
        SECOND | {"final_logit_softcapping": 30.0},
    ),
    "gemma4_text": (GEMMA | {"model_type": "gemma4_text"}, {"input_embedding_scale": 0.7}),
    "llama_untied": (SIZES | {"model_type": "llama", "tie_word_embeddings": False}, {}),
    "qwen35": ({"model_type": "qwen3_5", "text_config": DELTA | {"model_type": "qwen3_5_text"}}, {}),
}


def make(folder: Path, target: dict[str, Any], nested: dict[str, Any], seed: int) -> None:
    """Write a case."""
    mx.random.seed(seed)
    code = import_module(f"mlx_lm.models.{target['model_type']}")
    model = code.Model(code.ModelArgs.from_dict(deepcopy(target)))  # from_dict writes into nested parts
    _save(folder / "target", target | {"eos_token_id": 1}, model, 1.2)
    save_tokenizer(folder / "target")
    drafter = {key: value for key, value in SIZES.items() if key != "num_hidden_layers"} | {
        "architectures": ["DFlash2DraftModel" if "selector_rank" in nested else "DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "layer_types": [FULL, FULL],
        "num_target_layers": SIZES["num_hidden_layers"],
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 2, 3], **nested},
    }
    _save(folder / "drafter", drafter, build_network(DFlashConfig.from_dict(drafter)), 1.5)
    arrays = _run(folder, np.random.default_rng(seed).integers(5, VOCABULARY, PROMPT))
    np.savez_compressed(folder / "golden.npz", **arrays)  # type: ignore[arg-type]


def _save(folder: Path, config: dict[str, Any], model: Any, gain: float) -> None:
    """A model with random weights of float16."""

    def weight(name: str, value: mx.array) -> mx.array:
        if value.ndim < 2 or "conv1d" in name:
            value = value + 0.1 * mx.random.normal(value.shape) if "norm" in name else value
        else:
            value = gain * value.shape[-1] ** -0.5 * mx.random.normal(value.shape)
        return value.astype(mx.float16)

    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(tree_map_with_path(weight, model.parameters())))
    weights = {name.replace("_codebook.weight", "_codebook"): value for name, value in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _run(folder: Path, prompt: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The package's run, with what its drafter said in each round."""
    model, _ = load_model(folder / "target")
    draft = model_mlx.load_draft(str(folder / "drafter"))
    for network in (model, draft):
        network.update(tree_map(lambda value: value.astype(mx.float32), network.parameters()))
    plain = type(draft)
    logits: list[mx.array] = []
    paths: list[mx.array] = []

    class Heard(plain):  # type: ignore[misc, valid-type]
        """The drafter, listened to."""

        def compute_logits(self, hidden: mx.array) -> mx.array:
            logits.append(super().compute_logits(hidden)[0])
            return logits[-1][None]

    if plain is model_mlx.DFlash2DraftModel:

        def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = plain.propose(self, *args, **kwargs)
            paths.append(found[0][0])
            return found

        Heard.propose = propose  # its presence is not asked for on a DFlash drafter, its class is
    draft.__class__ = Heard
    answers = model_mlx.stream_generate(
        model, draft, load_tokenizer(folder / "target"), mx.array(prompt), block_size=BLOCK, max_tokens=TOKENS
    )
    emitted = [answer.tokens for answer in answers if answer.tokens]
    rounds = len(emitted) - 1
    drafts = np.full((rounds, BLOCK - 1), -1, np.int64)
    rows = np.zeros((rounds, BLOCK - 1, VOCABULARY), np.float32)
    for index in range(rounds):
        length = logits[index].shape[0]
        rows[index, :length] = logits[index]
        drafts[index, :length] = paths[index] if paths else mx.argmax(logits[index], axis=-1)
    return {
        "prompt": prompt,
        "drafts": drafts,
        "logits": rows,
        "accepted": np.array([len(tokens) for tokens in emitted[1:]]),
        "tokens": np.array([token for tokens in emitted for token in tokens]),
        "reference": np.array("dflash 0.1.0 (mlx)"),
    }


def main() -> None:
    """Write every case below the folder given."""
    model_mlx.snapshot_download = lambda path, **_: path
    for name, (target, nested) in CASES.items():
        make(Path(sys.argv[1]) / name, target, nested, int(sys.argv[2]) if len(sys.argv) > 2 else SEEDS[name])


if __name__ == "__main__":
    main()
