"""A masked diffusion language model in the Qwen3 layout: every row sees every row, masked rows are guessed.

The published checkpoints (``model_type`` a2d-qwen3) hold a Qwen3 model with its own parameter names; only the
causal mask is gone, and row i of the logits is a guess at token i itself, not at the one after it. Layers are
mlx-lm's, called without a mask. A ``sliding_window`` in the config is ignored, as the published code does.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.qwen3 import ModelArgs, Qwen3Model

from engine.errors import ModelError
from engine.target.folder import read_json

MODEL_TYPES = ("a2d-qwen3",)
CLASSES = ("A2DQwen3LMHeadModel",)


class MaskedDiffusionModel(nn.Module):
    """The network with embedding and head."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is untyped here
        self.args = args
        self.model = Qwen3Model(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(self, tokens: mx.array, rows: mx.array) -> mx.array:
        """Logits [M, V] at positions ``rows``, int32 [M], of a text with its masks, ``tokens`` [1, N]."""
        hidden = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            hidden = layer(hidden)  # no mask, no cache
        wanted = self.model.norm(hidden[0, rows])
        tied = self.args.tie_word_embeddings
        logits: mx.array = (self.model.embed_tokens.as_linear if tied else self.lm_head)(wanted)
        return logits

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        if self.args.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        return weights


def build_model(config: Mapping[str, Any]) -> MaskedDiffusionModel:
    """The model without its weights; ModelError for biases, which the layers do not have."""
    if config.get("attention_bias"):
        raise ModelError("config.json: attention_bias is not supported in a masked diffusion model")
    return MaskedDiffusionModel(ModelArgs.from_dict(dict(config)))  # type: ignore[no-untyped-call]


def mask_token(folder: Path, config: Mapping[str, Any]) -> int:
    """Id of the mask token: ``mask_token_id`` of the config, else what the tokenizer calls the mask."""
    if isinstance(known := config.get("mask_token_id"), int):
        return known
    tokenizer = _json(folder / "tokenizer_config.json")
    named = tokenizer.get("mask_token") or _json(folder / "special_tokens_map.json").get("mask_token")
    text = named.get("content") if isinstance(named, dict) else named
    added = _json(folder / "tokenizer.json").get("added_tokens", [])
    ids = {entry["content"]: entry["id"] for entry in added}
    ids |= {entry["content"]: int(key) for key, entry in tokenizer.get("added_tokens_decoder", {}).items()}
    ids |= _json(folder / "added_tokens.json")
    if not isinstance(found := ids.get(text), int):
        raise ModelError(
            f"{folder}: nothing says which token is the mask; add mask_token_id to its config.json"
        )
    return found


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
