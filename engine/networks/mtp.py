"""Next-token heads (MTP) that models publish with their weights: where they are stored, and their forward.

A head guesses the token after next from the target's last hidden state h (after the final norm) at one
position and the embedding of the token behind it:

    x = projection([norm(embed(token i + 1)), norm(h i)])      one decoder layer of the target's family over x
    h' = norm(layer(x))                                        the target's own head turns h' into logits

Applied to its own output h' and the token drafted from it, a head drafts one token more. Two layouts are
known: Qwen stores ``mtp.*``; DeepSeek V3 and GLM store the head as layers behind the last one; the first
of these is used. mlx-lm drops both when it loads a model, so they are read from the same folder, or from a
file ``mtp.safetensors`` next to the weights. Decoder layers and their stored names are mlx-lm's.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from engine.errors import ModelError, wrap_errors
from engine.target.folder import build_unloaded, read_json, require_folder, text_part, weight_files

SPLIT_FILE = "mtp.safetensors"
SPLIT_SUFFIX = "_mtp"  # of the model_type in folders that hold a head alone
# One decoder layer with full attention: what to change in the family's configuration to get it.
QWEN = {"full_attention_interval": 1, "mlp_only_layers": [], "decoder_sparse_step": 1}
NEXT_LAYER = {"first_k_dense_replace": 0, "sliding_window_pattern": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "qwen3_next": QWEN,
    "glm4_moe": NEXT_LAYER,
    "glm4_moe_lite": NEXT_LAYER,
    "deepseek_v3": NEXT_LAYER,
    "gemma3_text": NEXT_LAYER,  # none is published; `engine.training.mtp` makes them
}
# Published names → those of `MTPHead`; all others are of the decoder layer.
PARTS = {
    "fc": "projection",
    "pre_fc_norm_embedding": "embedding_norm",
    "pre_fc_norm_hidden": "hidden_norm",
    "norm": "norm",
    "eh_proj": "projection",
    "enorm": "embedding_norm",
    "hnorm": "hidden_norm",
    "shared_head.norm": "norm",
    "shared_head_norm": "norm",
}
OF_TARGET = ("embed_tokens", "shared_head.head", "lm_head", "rotary_emb")  # the target's own, stored again
EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|scales|biases)")


class MTPHead(nn.Module):
    """The network without embedding and output head, which are the target's."""

    def __init__(self, layers: Sequence[Any], hidden_size: int, eps: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is untyped here
        self.hidden_size = hidden_size
        self.embedding_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.projection = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = list(layers)
        self.norm = nn.RMSNorm(hidden_size, eps=eps)

    def __call__(self, embeddings: mx.array, hidden: mx.array, caches: Sequence[KVCache | None]) -> mx.array:
        """Normalised hidden states [1, N, hidden] of N positions, which the caches hold on return.

        ``embeddings`` [1, N, hidden] are of each position's next token, as the target's first layer gets it;
        ``hidden`` [1, N, hidden] are the target's behind its final norm, or what this returned for the
        position before. Without caches, the positions are the first, of one sequence or of several.
        """
        parts = [self.embedding_norm(embeddings), self.hidden_norm(hidden)]
        rows = self.projection(mx.concatenate(parts, axis=-1))
        mask = create_attention_mask(rows, caches[0], return_array=True)
        for layer, cache in zip(self.layers, caches, strict=True):
            rows = layer(rows, mask, cache)
        output: mx.array = self.norm(rows)
        return output

    def cast_predicate(self, name: str) -> bool:
        """mlx-lm's name for: whether a parameter may change its type; what routes to experts may not."""
        return not name.endswith("e_score_correction_bias")

    def new_caches(self) -> list[KVCache]:
        return [KVCache() for _ in self.layers]  # type: ignore[no-untyped-call]


class StoredHead(NamedTuple):
    """A head's tensors as a folder stores them."""

    tensors: dict[str, mx.array]  # by their stored names, not read yet
    files: list[Path]  # that hold them
    converted: bool  # by mlx-lm or the like; else as published


def stored_head(folder: Path, config: Mapping[str, Any] | None = None) -> StoredHead:
    """Find the head that a model's folder holds, in ``mtp.safetensors`` or among its weights.

    ``config`` is the model's, None for the folder's own. Raises ModelError where the folder is broken, its
    family has no head known here, or it holds none.
    """
    require_folder(folder)
    config = read_json(folder / "config.json") if config is None else config
    split = folder / SPLIT_FILE
    belongs = _belongs(config)
    tensors: dict[str, mx.array] = {}
    files, formats = [], set()
    for file in [split] if split.exists() else weight_files(folder):
        with wrap_errors(lambda reason: ModelError(f"{split} cannot be loaded: {reason}")):
            loaded: Any = mx.load(str(file), return_metadata=True)
        found, notes = loaded
        if named := {name: value for name, value in found.items() if belongs(name)}:
            tensors |= named
            files.append(file)
            formats.add(notes.get("format"))
    if not tensors:
        raise ModelError(
            f"{folder} holds no next-token head: mlx-lm and most conversions drop it; convert the published "
            f"model with --keep-mtp, put its head into {SPLIT_FILE}, or give another --drafter"
        )
    return StoredHead(tensors, files, formats == {"mlx"})


def write_mtp(source: Path, folder: Path) -> None:
    """Copy the head of a model's folder into another's ``mtp.safetensors``; raises as `stored_head`."""
    head = stored_head(source)
    form = "mlx" if head.converted else "pt"
    mx.save_safetensors(str(folder / SPLIT_FILE), head.tensors, {"format": form})


def build_head(config: Mapping[str, Any]) -> tuple[MTPHead, Any]:
    """A head of the family a ``config.json`` names, its weights random, and the model its layers are of."""
    family, text = family_of(config), dict(text_part(config))
    layers = text.get("mtp_num_hidden_layers", 1) if FAMILIES[family] is QWEN else 1
    text |= {**FAMILIES[family], "num_hidden_layers": layers}
    if "text_config" in config:
        text = {"text_config": text}
    model = build_unloaded(deepcopy({**config, **text, "model_type": family}))
    norm = model.layers[0].input_layernorm
    return MTPHead(model.layers, norm.weight.shape[0], norm.eps), model


def family_of(config: Mapping[str, Any]) -> str:
    """The key of `FAMILIES` a ``config.json`` belongs to; ModelError where there is none."""
    named = [str(part.get("model_type")) for part in (text_part(config), config)]
    for name in named:
        family = name.removesuffix(SPLIT_SUFFIX).removesuffix("_text")
        for known in (name, family):
            if known in FAMILIES:
                return known
    raise ModelError(
        f"no next-token head is known for model_type {config.get('model_type')!r}; "
        f"heads are known for {', '.join(FAMILIES)} and gemma4_assistant"
    )


def head_weights(head: StoredHead, config: Mapping[str, Any], model: Any) -> dict[str, mx.array]:
    """Stored tensors under the names of `MTPHead`, their values as its layers take them.

    ``model`` is that of `build_head`. Published Qwen norms are stored less one.
    """
    qwen = FAMILIES[family_of(config)] is QWEN
    first = _layer_count(config)
    weights: dict[str, mx.array] = {}
    layers: dict[str, mx.array] = {}
    for stored, value in head.tensors.items():
        name = re.sub(r"^(language_model\.)?(model\.)?(mtp\.|mtp_block\.)?", "", stored)
        if found := re.match(r"layers\.(\d+)\.(.+)", name):
            index, inner = int(found[1]), found[2]
        else:
            index, inner = (0, name) if qwen else (first, name)
        if not qwen:
            index -= first
        part, _, kind = inner.rpartition(".")
        if any(word in inner for word in OF_TARGET) or (not qwen and index):
            continue  # see the top: only the first layer behind the last is used
        if part in PARTS:
            weights[f"{PARTS[part]}.{kind}"] = value
        else:
            layers[f"model.layers.{index}.{inner}"] = value
    if qwen:
        layers = _stacked(layers)
    for name, value in model.sanitize(layers).items():
        weights[name[name.index("layers.") :]] = value
    if qwen and not head.converted:
        weights = {name: value + 1 if value.ndim == 1 else value for name, value in weights.items()}
    return weights


def _stacked(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Experts that are stored one by one as mlx-lm's layers hold them."""
    stacks: dict[str, dict[int, mx.array]] = {}
    others: dict[str, mx.array] = {}
    for name, value in weights.items():
        if found := EXPERT.fullmatch(name):
            stacks.setdefault(f"{found[1]}.switch_mlp.{found[3]}.{found[4]}", {})[int(found[2])] = value
        else:
            others[name] = value
    for name, stack in stacks.items():
        others[name] = mx.stack([stack[index] for index in sorted(stack)])
    return others


def _layer_count(config: Mapping[str, Any]) -> int:
    return int(text_part(config)["num_hidden_layers"])


def _belongs(config: Mapping[str, Any]) -> Callable[[str], object]:
    """Whether a tensor of this name is part of a head."""
    family = family_of(config)
    if str(config.get("model_type")).endswith(SPLIT_SUFFIX):  # a folder that holds nothing else
        return lambda _: True
    if FAMILIES[family] is QWEN:
        return re.compile(r"(language_model\.)?(model\.)?mtp\.").match
    layers = _layer_count(config)

    def behind(name: str) -> bool:
        found = re.match(r"(?:language_model\.)?model\.layers\.(\d+)\.", name)
        return found is not None and int(found[1]) >= layers

    return behind
