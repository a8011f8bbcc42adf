"""The worlds to measure in: folders with a target and its drafters, and prompts.

`tiny` (12 M parameters) and `mid` (185 M) are Gemma 4 text models with random weights, the one family that
all engines here can run with a DFlash drafter; their windows are longer than any run, because mlx-lm's
speculative loop is wrong past one. `demo` is the shipped pair. Folders hold what published checkpoints hold,
so every engine reads them with its own loader.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4, llama

from engine.evaluation.prompts import encode, load_prompts
from engine.networks.dflash import DFlash, DFlashConfig
from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET, LoadedTarget

SIZES = ("tiny", "mid", "demo")
SEED = 12
PROMPT_TOKENS = 64
MASK = 3
BLOCK_SIZE = 16
WANDER = 4.0  # weight of every layer beside the embedding, so that greedy text does not stand still
SHARPNESS = 0.35  # of attention: enough for text that does not repeat itself, too little to amplify rounding
RANDOM_PROMPTS, PROMPTS_A_KIND = 5, 10


@dataclass(frozen=True)
class Shape:
    """Widths of a random target. Drafters have two layers of the same widths."""

    hidden: int
    layers: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int = 64


SHAPES = {
    "tiny": Shape(hidden=256, layers=12, feed_forward=1024, heads=4, kv_heads=2, vocabulary=2048),
    "mid": Shape(hidden=1024, layers=12, feed_forward=3840, heads=16, kv_heads=8, vocabulary=6144),
}


@dataclass(frozen=True)
class Folders:
    """Where the models of a size lie.

    Attributes:
        target: the target.
        drafter: its DFlash drafter.
        small: a small model with the same vocabulary, for drafting token by token; None where there is none.
    """

    target: Path
    drafter: Path
    small: Path | None


@dataclass(frozen=True)
class Prompt:
    """Token ids and the part of the set they belong to."""

    part: str
    tokens: list[int]


def make_folders(size: str, folder: Path) -> Folders:
    """Write the models of a size below ``folder``, or point to the shipped ones."""
    if size == "demo":
        return Folders(SHIPPED_TARGET, SHIPPED_DRAFTER, None)
    shape = SHAPES[size]
    _save_target(shape, folder / "target")
    _save_drafter(shape, folder / "drafter")
    _save_small(shape, folder / "small")
    return Folders(folder / "target", folder / "drafter", folder / "small")


def prompts_of(size: str, target: LoadedTarget) -> list[Prompt]:
    """One prompt of random tokens; for `demo` ten each of code, retrieval and chat, and five random ones."""
    vocabulary = target.target.vocab_size
    if size != "demo":
        return [Prompt("random", _random_tokens(SEED, PROMPT_TOKENS, vocabulary))]
    prompts = []
    for kind in ("code", "retrieval", "chat"):
        for prompt in load_prompts(kind, limit=PROMPTS_A_KIND):
            tokens = encode(prompt, target.tokenizer, vocabulary, target.context)
            prompts.append(Prompt(kind, tokens))
    random = [_random_tokens(SEED + index, PROMPT_TOKENS, vocabulary) for index in range(RANDOM_PROMPTS)]
    return prompts + [Prompt("random", tokens) for tokens in random]


def _random_tokens(seed: int, count: int, vocabulary: int) -> list[int]:
    source = Random(seed)  # noqa: S311 - reproducible prompts, nothing secret
    return [source.randrange(8, vocabulary) for _ in range(count)]


def _save_target(shape: Shape, folder: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    text = {
        "model_type": "gemma4_text",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.feed_forward,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "global_head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "vocab_size_per_layer_input": shape.vocabulary,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 2048,
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "vocab_size": shape.vocabulary,
        "eos_token_id": [1],
        "text_config": text,
    }
    mx.random.seed(SEED)
    model = gemma4.Model(gemma4.ModelArgs.from_dict(json.loads(json.dumps(config))))
    for layer in model.layers:
        # Else the head, which is the embedding, repeats the token it is given.
        for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
            norm.weight = WANDER * norm.weight
        # Else attention, whose scores are not scaled, takes one position alone and amplifies rounding.
        queries = layer.self_attn.q_norm
        queries.weight = queries.weight * SHARPNESS
    _save(folder, config, model)
    _save_tokenizer(folder)


def _save_drafter(shape: Shape, folder: Path) -> None:
    layers = 2
    target_layers = [index * (shape.layers - 1) // 3 for index in range(4)]
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "num_hidden_layers": layers,
        "intermediate_size": shape.feed_forward,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "block_size": BLOCK_SIZE,
        "num_target_layers": shape.layers,
        "layer_types": ["full_attention"] * layers,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": target_layers},
    }
    mx.random.seed(SEED + 1)
    _save(folder, config, DFlash(DFlashConfig.from_dict(config)))


def _save_small(shape: Shape, folder: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": 2,
        "intermediate_size": shape.feed_forward,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": 1e-6,
        "vocab_size": shape.vocabulary,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    mx.random.seed(SEED + 2)
    _save(folder, config, llama.Model(llama.ModelArgs.from_dict(config)))


def _save(folder: Path, config: dict[str, Any], model: Any) -> None:
    folder.mkdir(parents=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _save_tokenizer(folder: Path) -> None:
    """Bytes as tokens behind four special ones: loaders insist on a tokenizer, nothing is encoded with it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<eos>", "<bos>", "<mask>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(special + letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
