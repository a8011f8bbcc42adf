"""Training the demo drafter: a DFlash network that learns the target's own greedy continuations.

Many anchors of one row are folded into one forward: each anchor's block sees the context before it and
itself, exactly as the network sees them one block at a time at inference. Covers configuration, forward and
loss; the data comes from `selfplay`, the network from `engine.networks`, the loop from `trainer`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.networks.dflash import DFlash
from engine.networks.dflash_config import DFlashConfig
from tools.demo_models.fastops import cross_entropy, silu, softmax
from tools.demo_models.selfplay import CHAT, CODE, RETRIEVAL, Continuations
from tools.demo_models.target_forward import MASKED, embedding_scale
from tools.demo_models.tokenizer import MASK
from tools.demo_models.trainer import named_parameters

TAPS = (1, 3, 5, 8)
SELFPLAY_BATCHES = (20, 16)  # of 128 rows of 512 tokens: training words, mostly made-up words
STEPS = 4500


def configuration(target: dict[str, Any], *, layers: int = 2, block: int = 8) -> dict[str, Any]:
    """The drafter's `config.json` for a target's configuration, in the published layout."""
    hidden = int(target["hidden_size"])
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "hidden_act": "silu",
        "attention_bias": False,
        "vocab_size": target["vocab_size"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": target["max_position_embeddings"],
        "tie_word_embeddings": True,
        "block_size": block,
        "num_target_layers": target["num_hidden_layers"],
        "layer_types": ["full_attention"] * layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "input_embedding_scale": 1.0,  # on top of the target's own
        "dflash_config": {
            "mask_token_id": MASK,
            "target_layer_ids": [tap for tap in TAPS if tap < target["num_hidden_layers"]],
        },
    }


def build(config: dict[str, Any], seed: int = 0) -> DFlash:
    """The network with seeded weights; layers start close to passing their input through."""
    network = DFlash(DFlashConfig.from_dict(config))
    mx.random.seed(seed)
    weights = []
    for name, value in named_parameters(network).items():
        if "norm" in name:
            weights.append((name, value))
            continue
        gain = 0.3 if "o_proj" in name or "down_proj" in name else 1.0
        weights.append((name, mx.random.normal(value.shape) * (gain * value.shape[1] ** -0.5)))
    network.load_weights(weights)
    return network


def load(folder: Path) -> DFlash:
    """The network of an exported folder, in float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    network = DFlash(DFlashConfig.from_dict(config))
    network.load_weights(str(folder / "model.safetensors"))
    network.set_dtype(mx.float32)
    return network


def forward(network: DFlash, embeddings: mx.array, taps: mx.array, anchors: mx.array) -> mx.array:
    """Hidden states [N, A * B, H] of the blocks at A anchors of each row.

    Args:
        network: full attention layers that see the whole block.
        embeddings: scaled embeddings of the blocks, [N, A * B, H].
        taps: target layer outputs of the row, [N, T, K * H].
        anchors: position of each block's first token, [N, A]; the block sees context rows before it.
    """
    rows, length, _ = taps.shape
    count = anchors.shape[1]
    block = embeddings.shape[1] // count
    context = network.hidden_norm(network.fc(taps))
    before = mx.arange(length)[None, None] < mx.repeat(anchors, block, axis=1)[..., None]
    mask = mx.where(before, 0.0, MASKED)[:, None, None]  # [N, 1, 1, A * B, T]
    h = embeddings
    for layer in network.layers:
        attention, x = layer.self_attn, layer.input_layernorm(h)
        heads, groups, dim = attention.heads, attention.kv_heads, attention.head_dim

        def split(y: mx.array, n: int, dim: int = dim) -> mx.array:
            return y.reshape(rows, -1, n, dim).transpose(0, 2, 1, 3)

        def rotate_blocks(y: mx.array, n: int, dim: int = dim) -> mx.array:
            y = y.reshape(rows, n, count, block, dim).transpose(0, 2, 1, 3, 4)
            y = network.rope(y.reshape(rows * count, n, block, dim), offset=anchors.reshape(-1))
            return y.reshape(rows, count, n, block, dim).transpose(0, 2, 1, 3, 4)  # [N, n, A, B, D]

        q = attention.q_norm(split(attention.q_proj(x), heads))
        q = rotate_blocks(q, heads).reshape(rows, groups, heads // groups, count, block, dim) * dim**-0.5
        own_k = rotate_blocks(attention.k_norm(split(attention.k_proj(x), groups)), groups)[:, :, None]
        own_v = split(attention.v_proj(x), groups).reshape(rows, groups, 1, count, block, dim)
        far_k = network.rope(attention.k_norm(split(attention.k_proj(context), groups)))[:, :, None]
        far_v = split(attention.v_proj(context), groups)[:, :, None]
        flat = (rows, groups, heads // groups, count * block)
        far = q.reshape(*flat, dim) @ far_k.swapaxes(-1, -2) + mask
        own = (q @ own_k.swapaxes(-1, -2)).reshape(*flat, block)
        weights = softmax(mx.concatenate([far, own], axis=-1))
        own_weights = weights[..., length:].reshape(*flat[:3], count, block, block)
        attended = weights[..., :length] @ far_v + (own_weights @ own_v).reshape(*flat, dim)
        merged = attended.reshape(rows, heads, count * block, dim).transpose(0, 2, 1, 3)
        h = h + attention.o_proj(merged.reshape(rows, count * block, -1))
        x, mlp = layer.post_attention_layernorm(h), layer.mlp
        h = h + mlp.down_proj(silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    hidden: mx.array = network.norm(h)
    return hidden


@dataclass
class DrafterTask:
    """The drafter's loss and batches, for `trainer.fit`."""

    model: DFlash
    target: Any
    data: Continuations
    seed: int = 0
    queries: int = 192  # block rows for each row of tokens
    blocks: tuple[tuple[int, float], ...] = ((8, 0.6), (16, 0.3), (4, 0.1))
    rows: dict[int, int] = field(default_factory=lambda: {CODE: 4, RETRIEVAL: 3, CHAT: 1})  # of each kind
    figures: tuple[str, ...] = ("code", "retrieval", "chat")

    def __post_init__(self) -> None:
        """Find the rows and positions of each kind: an anchor's next token must be generated."""
        kinds = np.asarray(self.data.kinds)
        self._rows: dict[int, npt.NDArray[np.int64]] = {}
        for kind in self.rows:
            self._rows[kind] = np.flatnonzero((kinds[:, 1:] == kind).sum(axis=1) >= 8)
        self._embedding = self.target.model.embed_tokens.weight
        own = embedding_scale(self.target.args.hidden_size)
        self._scale = own * self.model.config.input_embedding_scale

    def variant(self, step: int) -> int:
        """The block length of a step."""
        sizes, shares = zip(*self.blocks, strict=True)
        return int(np.random.default_rng((self.seed, step, 1)).choice(sizes, p=shares))

    def batch(self, step: int) -> tuple[mx.array, ...]:
        """Hidden [N, T, K * H], anchors [N, A], tokens [N, A, B], weights [N, A, B - 1] and kinds [N, A]."""
        rng = np.random.default_rng((self.seed, step))
        block = self.variant(step)
        count = self.queries // block
        length = self.data.tokens.shape[1]
        chosen, anchors, kinds = [], [], []
        for kind in [kind for kind, rows in self.rows.items() for _ in range(rows)]:
            row = int(rng.choice(self._rows[kind]))
            positions = np.flatnonzero(self.data.kinds[row, 1:] == kind)
            chosen.append(row)
            anchors.append(rng.choice(positions, size=count))
            kinds.append(np.full(count, kind))
        index = np.stack(anchors)[..., None] + np.arange(block)  # [N, A, B]
        inside = np.minimum(index, length - 1)
        row_index = np.asarray(chosen)[:, None, None]
        tokens = self.data.tokens[row_index, inside].astype(np.int32)
        generated = (self.data.kinds[row_index, inside] > 0) & (index < length)
        valid = np.cumprod(generated[..., 1:], axis=-1).astype(np.float32)
        taps = np.stack([self.data.taps[row] for row in chosen]).astype(np.float32)
        return (
            mx.array(taps),
            mx.array(np.stack(anchors).astype(np.int32)),
            mx.array(tokens),
            mx.array(valid),
            mx.array(np.stack(kinds).astype(np.int32)),
        )

    def loss(self, variant: int, *arrays: mx.array) -> tuple[mx.array, ...]:
        """Cross-entropy falling with the position in the block; emitted tokens per verify of each kind.

        The figures look at the first seven drafts at most, so a step with blocks of 4 reports less.
        """
        taps, anchors, tokens, valid, kinds = arrays
        rows, count = anchors.shape
        block = variant
        inputs = mx.concatenate([tokens[..., :1], mx.full((rows, count, block - 1), MASK)], axis=-1)
        embeddings = self._embedding[inputs.reshape(rows, -1)] * self._scale
        hidden = forward(self.model, embeddings, taps, anchors).reshape(rows, count, block, -1)
        logits = hidden[:, :, 1:] @ self._embedding.T
        labels = tokens[..., 1:]
        falling = mx.exp(-mx.arange(block - 1) / (0.5 * block)) * valid
        losses = cross_entropy(logits, labels)
        right = (mx.argmax(logits, axis=-1) == labels).astype(mx.float32) * valid
        emitted = mx.cumprod(right[..., :7], axis=-1).sum(axis=-1) + 1

        def mean_of(kind: int) -> mx.array:
            chosen = (kinds == kind).astype(mx.float32)
            return (emitted * chosen).sum() / chosen.sum()

        return (
            (losses * falling).sum() / mx.maximum(falling.sum(), 1),
            mean_of(CODE),
            mean_of(RETRIEVAL),
            mean_of(CHAT),
        )
