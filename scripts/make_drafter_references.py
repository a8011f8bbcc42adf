"""Reference outputs of the published DFlash implementation, for `kakeya_engine parity` and the tests.

Needs an environment of its own, with none of this project in it:

    python -m venv /tmp/reference
    /tmp/reference/bin/pip install torch transformers safetensors numpy
    /tmp/reference/bin/pip install --no-deps dflash==0.1.0
    /tmp/reference/bin/python scripts/make_drafter_references.py --out DIR [--only NAME …]

Each case is a drafter with random weights (`config.json`, `model.safetensors`) and `golden.npz`: what that
implementation makes of two rounds, on the CPU in float32. The SHA-256 of every file is printed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel, _crop_to, _make_cache
from safetensors.torch import save_file
from torch.nn import functional
from transformers import Qwen3Config

BASE: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 160,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "block_size": 8,
    "num_target_layers": 6,
    "use_sliding_window": False,
    "sliding_window": None,
    "layer_types": ["full_attention", "full_attention"],
    "dflash_config": {"mask_token_id": 159, "target_layer_ids": [1, 4]},
}
SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}
SECOND = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
SPANS = ((0, 20), (20, 24))


def first(spans: tuple[tuple[int, int], tuple[int, int]] = SPANS, **changes: Any) -> dict[str, Any]:
    """A DFlash case."""
    return {"spans": spans, "config": BASE | changes}


def second(
    spans: tuple[tuple[int, int], tuple[int, int]] = SPANS,
    extra: dict[str, int] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A DFlash 2 case."""
    nested = BASE["dflash_config"] | SECOND | (extra or {})
    return {
        "spans": spans,
        "config": BASE | {"architectures": ["DFlash2DraftModel"], "dflash_config": nested} | changes,
    }


def rope(**parameters: Any) -> dict[str, Any]:
    """Scaling in the nested form, the base inside."""
    return {"rope_theta": None, "rope_parameters": {"rope_theta": 5e4, **parameters}}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.0, 2.0, 5.0, 9.0],
    "original_max_position_embeddings": 24, "factor": 8.0,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "dflash2_sliding_yarn": second(
        ((0, 90), (90, 93)), {"conv_kernel_size": 5, "conv_group_size": 4, "selector_top_k": 24},
        num_attention_heads=6, block_size=6, attention_bias=True, **SLIDING, **rope(**YARN),
    ),
    "sliding_longrope": first(((0, 14), (14, 25)), **SLIDING, **rope(**LONG)),
    "dflash2_llama3_bidirectional": second(
        ((0, 70), (70, 71)), {"selector_rank": 1, "conv_kernel_size": 1, "conv_group_size": 32},
        is_causal=False, block_size=16, **SLIDING, **rope(**LLAMA3),
    ),
    "linear": first(rope_scaling={"rope_type": "linear", "factor": 3.0}),
    "dynamic": first(
        ((0, 30), (30, 33)), max_position_embeddings=32, **rope(rope_type="dynamic", factor=4.0)
    ),
    "yarn_mscale": first(**rope(**YARN, mscale=0.7, mscale_all_dim=1.3, beta_fast=16, beta_slow=2)),
    "yarn_attention": first(**rope(**YARN, attention_factor=1.4, truncate=False)),
    "many_heads": first(num_attention_heads=8, num_key_value_heads=8, head_dim=6, hidden_act="gelu"),
    "one_key_head": first(num_attention_heads=5, num_key_value_heads=1, head_dim=12, hidden_size=36),
    "window_1": first(**(SLIDING | {"sliding_window": 1})),
    "window_2_bidirectional": first(is_causal=False, **(SLIDING | {"sliding_window": 2})),
    "window_wide": first(((0, 300), (300, 307)), **(SLIDING | {"sliding_window": 64})),
    "window_wider_than_all": first(**(SLIDING | {"sliding_window": 400})),
    "causal_full": first(is_causal=True),
    "empty_second": first(((0, 9), (9, 9))),
    "empty_first": first(((0, 0), (0, 5))),
    "long": first(((0, 700), (700, 703)), max_position_embeddings=4096),
    "by_layer_number": first(
        use_sliding_window=True, sliding_window=7, layer_types=None, max_window_layers=1
    ),
    "top_1": second(extra={"selector_top_k": 1}),
    "top_all": second(extra={"selector_top_k": 160}),
    "kernel_8": second(extra={"conv_kernel_size": 8, "conv_group_size": 1}),
    "scaled": second(
        input_embedding_scale=5.7, output_multiplier=0.4, final_logit_softcapping=3.0, block_size=12
    ),
    "block_2": second(block_size=2, extra={"conv_kernel_size": 2}),
    "deep": second(
        ((0, 40), (40, 47)), num_hidden_layers=5, hidden_size=64, num_attention_heads=8, vocab_size=2000,
        sliding_window=10, use_sliding_window=True,
        layer_types=["sliding_attention"] * 4 + ["full_attention"],
    ),
}  # fmt: skip


class Target(torch.nn.Module):
    """The parts of a target that a drafter uses: only the head here, embeddings are looked up."""

    def __init__(self, head: torch.Tensor) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states."""
        return functional.linear(hidden, self.head)


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights of a size that lets every part of the network matter."""
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        if "norm" in name:
            value.copy_(1 + 0.2 * noise)
        elif "base_kernel" in name:
            value.copy_(0.5 * noise)
            value[:, 0] += 1
        elif "codebook" in name:
            value.copy_(noise)
        elif name.endswith("bias"):
            value.copy_(0.1 * noise)
        else:
            value.copy_(noise * value.shape[-1] ** -0.5)


@torch.inference_mode()
def make(folder: Path, seed: int, spans: tuple[tuple[int, int], ...], config: dict[str, Any]) -> None:
    """Write one case."""
    raw = {name: value for name, value in config.items() if value is not None or name == "sliding_window"}
    two = raw["architectures"] == ["DFlash2DraftModel"]
    generator = torch.Generator().manual_seed(seed)
    model = (DFlash2DraftModel if two else DFlashDraftModel)(Qwen3Config(**json.loads(json.dumps(raw))))
    model.eval()
    randomise(model, generator)
    nested, size, width = raw["dflash_config"], raw["vocab_size"], raw["hidden_size"]
    length = raw["block_size"]
    scale = float(nested.get("input_embedding_scale", raw.get("input_embedding_scale", 1.0)))
    embedding = torch.randn((size, width), generator=generator) / scale
    head = Target(torch.randn((size, width), generator=generator) * width**-0.5)
    hidden = torch.randn((1, spans[-1][1], len(nested["target_layer_ids"]) * width), generator=generator)
    blocks = torch.full((len(spans), length), nested["mask_token_id"])
    blocks[:, 0] = torch.randint(0, size, (len(spans),), generator=generator)
    arrays = {
        "target_embedding": embedding, "target_lm_head": head.head, "target_hidden": hidden, "blocks": blocks,
        "spans": torch.tensor(spans),
    }  # fmt: skip
    cache = _make_cache(model.config)
    for turn, (start, end) in enumerate(spans, 1):
        block = blocks[turn - 1]
        rows = model(
            target_hidden=hidden[:, start:end],
            noise_embedding=embedding[block][None] * scale,
            position_ids=torch.arange(start, end + length)[None],
            past_key_values=cache,
            use_cache=True,
        )
        _crop_to(cache, end)
        arrays[f"round{turn}_hidden"] = rows
        arrays[f"round{turn}_logits"] = model.compute_logits(rows, head)
        if two:
            arrays[f"round{turn}_path"] = model.propose(rows[:, 1:], block[:1], head, 0.0)[0]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    np.savez_compressed(folder / "golden.npz", **{name: value.numpy() for name, value in arrays.items()})
    for file in sorted(folder.iterdir()):
        print(hashlib.sha256(file.read_bytes()).hexdigest(), f"{folder.name}/{file.name}")


def main() -> None:
    """Make the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the case folders")
    parser.add_argument("--only", nargs="*", choices=sorted(CASES), help="these cases alone")
    parser.add_argument("--seed", type=int, default=0, help="start of the random numbers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for number, (name, case) in enumerate(CASES.items()):
        if not arguments.only or name in arguments.only:
            make(arguments.out / name, arguments.seed + number, case["spans"], case["config"])


if __name__ == "__main__":
    main()
