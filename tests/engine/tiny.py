"""Tiny real models for tests: random weights, made here, small enough for thousands of tokens a second."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma3_text, llama, qwen3

from engine.draft_length import DraftLength
from engine.drafters.base import Draft, NetworkDrafter
from engine.networks.dflash import DFlash, DFlashConfig

VOCAB = 300
WINDOW = 8
BOS, EOS, END, MASK = 1, 2, 3, 4
GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "query_pre_attn_scalar": 8,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 3,
    "max_position_embeddings": 512,
}
PLAIN = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma3_text": (gemma3_text, GEMMA),
    "llama": (llama, {"model_type": "llama", "tie_word_embeddings": False, **PLAIN}),
    "qwen3": (qwen3, {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True, **PLAIN}),
}


def seeded(seed: int) -> Random:
    """A reproducible source of numbers for tests."""
    return Random(seed)  # noqa: S311 - nothing here is a secret


def build(family: str = "gemma3_text", seed: int = 3, **changes: Any) -> Any:
    """A model with weights large enough that its greedy text wanders instead of repeating one token."""
    module, config = FAMILIES[family]
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config | changes))
    model.eval()
    model.update(tree_map(lambda w: 3 * w if w.ndim > 1 else w, model.parameters()))
    mx.eval(model.parameters())
    return model


def plain_tokens(model: Any, prompt: Sequence[int], count: int, chunk: int = 2048) -> list[int]:
    """mlx-lm's own greedy continuation."""
    steps = generate_step(mx.array(list(prompt)), model, max_tokens=count, prefill_step_size=chunk)
    return [int(token) for token, _ in steps]


class Alternating(DraftLength):
    """Changes the length all the time, to cross every seam between plain steps and blocks."""

    def __init__(self, seed: int, choices: tuple[int, ...] = (1, 1, 2, 5)) -> None:
        super().__init__(max(choices))
        self._choices, self._random = choices, seeded(seed)

    def choose(self, remaining: int) -> int:
        return min(self._random.choice(self._choices), remaining)

    def record(
        self, block: int, accepted: int | Sequence[int], seconds: float, *_: object, **__: object
    ) -> None:
        assert seconds > 0 or (block == 1 and seconds == 0)  # one that was not launched ahead tells no cost
        assert all(0 <= each < block for each in ([accepted] if isinstance(accepted, int) else accepted))


class ScriptedDrafter(NetworkDrafter):
    """A drafter that knows the true continuation and gets a given share of its tokens wrong.

    It checks what decoding tells it: every committed token, once, in order, with a row of hidden states each.
    """

    name = "scripted"
    block_size = 8
    nbytes = 0
    forwards = 0

    def __init__(
        self, truth: Sequence[int], wrong: float = 0.0, seed: int = 0, hidden_states: tuple[int, ...] = (0, 2)
    ):
        self.truth = list(truth)
        self.target_layers = hidden_states
        self._wrong, self._random = wrong, seeded(seed)
        self.seen: list[int] = []
        self.rows: list[mx.array] = []
        self.proposals = 0

    def bind(self, target: Any) -> None:
        pass

    def twin(self) -> ScriptedDrafter:
        raise NotImplementedError("a scripted drafter knows one text only")

    def start(self) -> None:
        self.seen, self.rows = [], []

    def observe(self, tokens: Sequence[int], hidden_states: mx.array | None) -> None:
        assert list(tokens) == self.truth[len(self.seen) : len(self.seen) + len(tokens)]
        assert (hidden_states is None) == (not self.target_layers)
        if hidden_states is not None:
            assert hidden_states.shape[:2] == (1, len(tokens))
            self.rows.append(hidden_states)
        self.seen.extend(tokens)

    def rewind(self, count: int) -> bool:
        assert count <= len(self.seen)
        self.seen = self.seen[: len(self.seen) - count]
        return True

    def propose(self, bonus: int, count: int, sampler: Any = None) -> Draft:
        assert bonus == self.truth[len(self.seen)]
        self.proposals += 1
        at = len(self.seen) + 1
        right = (self.truth + [0] * count)[at : at + count]
        tokens = [(t + 1) % VOCAB if self._random.random() < self._wrong else t for t in right]
        return Draft(mx.array(tokens, mx.int32))


def save_target(folder: Path, family: str = "gemma3_text", seed: int = 3, **changes: Any) -> Path:
    """A model folder as mlx-lm loads it, with a byte-level tokenizer."""
    folder.mkdir(parents=True)
    model = build(family, seed, **changes)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = FAMILIES[family][1] | changes | {"eos_token_id": [EOS, END]}
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """One token a byte behind the special ones, and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<bos>", "<eos>", "<end>", "<mask>", "<user>", "<assistant>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(special + letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def drafter_config(**changes: Any) -> dict[str, Any]:
    """A published-style config.json of a drafter for `build()`'s gemma3_text."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "block_size": 8,
        "num_target_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 12,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2, 5]},
    } | changes


def save_drafter(folder: Path, seed: int = 5, **changes: Any) -> Path:
    """A drafter folder in the published layout, random weights."""
    folder.mkdir(parents=True)
    config = drafter_config(**changes)
    mx.random.seed(seed)
    network = DFlash(DFlashConfig.from_dict(config))
    weights = dict(tree_flatten(network.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
