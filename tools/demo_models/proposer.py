"""Training the demo proposer: a masked diffusion model that learns the target's own greedy continuations.

The drafter shows it the last tokens of a text with a block of masks behind them, some already filled, and
every row sees every row. One forward for one block is expensive, so most of the training folds many blocks
into one: the context is cut at the anchors, a row of it sees its own stretch and those before, and a block
sees the context before its anchor and itself. The last part of the training lays out one block a row, as the
drafter does. Both are one forward over a canvas of tokens, positions and what sees what.

Covers configuration, canvas, forward and loss; the data comes from `selfplay`, the loop from `trainer`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.qwen3 import ModelArgs

from engine.networks.mdlm import CLASSES, MODEL_TYPES, MaskedDiffusionModel
from tools.demo_models.fastops import cross_entropy, silu, softmax
from tools.demo_models.selfplay import CHAT, CODE, RETRIEVAL, Continuations
from tools.demo_models.target_forward import MASKED
from tools.demo_models.tokenizer import BOS, MASK, PAD
from tools.demo_models.trainer import named_parameters

SELFPLAY_BATCHES = (8, 12)  # of 128 rows of 512 tokens: training words, mostly made-up words
SELFPLAY_SEED = 1  # other streams than the drafter's
FOLDED_STEPS, SINGLE_STEPS = 900, 300
CONTEXT = 256  # tokens the drafter shows, the bonus included
WIDTH = 320  # context tokens of a folded row
SHARES = {CODE: 2, RETRIEVAL: 1, CHAT: 1}  # rows of a folded step; the others have twice as many

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


def configuration(target: dict[str, Any], *, layers: int = 5, block: int = 8) -> dict[str, Any]:
    """The proposer's `config.json` for a target's configuration, in the published layout."""
    hidden = int(target["hidden_size"])
    return {
        "architectures": list(CLASSES),
        "model_type": MODEL_TYPES[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "attention_bias": False,
        "vocab_size": target["vocab_size"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": target["max_position_embeddings"],
        "tie_word_embeddings": True,
        "mask_token_id": MASK,
        "draft_block_size": block,
        "draft_steps": 2,
        "draft_context": CONTEXT,
    }


def build(config: dict[str, Any], seed: int = 0, embedding: mx.array | None = None) -> MaskedDiffusionModel:
    """The network with seeded weights, and the target's embedding [V, H] to start from where it is given.

    Layers start close to passing their input through.
    """
    args: ModelArgs = ModelArgs.from_dict(config)  # type: ignore[no-untyped-call]
    network = MaskedDiffusionModel(args)
    mx.random.seed(seed)
    weights = []
    for name, value in named_parameters(network).items():
        if "embed" in name and embedding is not None:
            weights.append((name, mx.array(embedding)))
        elif "norm" in name:
            weights.append((name, value))
        else:
            gain = 0.3 if "o_proj" in name or "down_proj" in name else 1.0
            weights.append((name, mx.random.normal(value.shape) * (gain * value.shape[1] ** -0.5)))
    network.load_weights(weights)
    return network


def load(folder: Path) -> MaskedDiffusionModel:
    """The network of an exported folder, in float32."""
    network = build(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    network.load_weights(str(folder / "model.safetensors"))
    network.set_dtype(mx.float32)
    return network


def _rotated(x: mx.array, cosines: mx.array, sines: mx.array) -> mx.array:
    """Rotary positions of [N, heads, L, D], the halves of D paired; cosines and sines [N, 1, L, D / 2]."""
    low, high = mx.split(x, 2, axis=-1)
    return mx.concatenate([low * cosines - high * sines, high * cosines + low * sines], axis=-1)


def forward(
    network: MaskedDiffusionModel, tokens: mx.array, positions: mx.array, sees: mx.array, rows: int
) -> mx.array:
    """Logits [N, rows, V] of the last rows of a canvas.

    Args:
        network: all layers see everything.
        tokens: [N, L].
        positions: rotary positions, [N, L].
        sees: whether row i sees row j, [N, L, L].
        rows: how many rows at the end are guessed.
    """
    args, count = network.args, tokens.shape[0]
    heads, groups, dim = args.num_attention_heads, args.num_key_value_heads, args.head_dim
    frequencies = float(args.rope_theta or 0) ** (-mx.arange(0, dim, 2) / dim)
    angles = positions[:, None, :, None] * frequencies
    cosines, sines = mx.cos(angles), mx.sin(angles)
    mask = mx.where(sees, 0.0, MASKED)[:, None, None]
    h = network.model.embed_tokens(tokens)
    for layer in network.model.layers:
        wanted = rows if layer is network.model.layers[-1] else tokens.shape[1]  # rows whose output is needed
        attention, x = layer.self_attn, layer.input_layernorm(h)

        def split(y: mx.array, n: int) -> mx.array:
            return y.reshape(count, -1, n, dim).transpose(0, 2, 1, 3)

        q = attention.q_norm(split(attention.q_proj(x[:, -wanted:]), heads))
        k = attention.k_norm(split(attention.k_proj(x), groups))
        q = _rotated(q, cosines[:, :, -wanted:], sines[:, :, -wanted:]) * attention.scale
        k = _rotated(k, cosines, sines)[:, :, None]
        v = split(attention.v_proj(x), groups)[:, :, None]
        grouped = q.reshape(count, groups, heads // groups, wanted, dim)
        weights = softmax(grouped @ k.swapaxes(-1, -2) + mask[..., -wanted:, :])
        merged = (weights @ v).reshape(count, heads, wanted, dim).transpose(0, 2, 1, 3)
        h = h[:, -wanted:] + attention.o_proj(merged.reshape(count, wanted, -1))
        x, mlp = layer.post_attention_layernorm(h), layer.mlp
        h = h + mlp.down_proj(silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    logits: mx.array = network.model.norm(h) @ network.model.embed_tokens.weight.T
    return logits


def visibility(places: Ints, documents: Ints, anchors: Ints, owners: Ints, block: int) -> Bools:
    """What sees what on a canvas of context and blocks, [T + A * block, T + A * block].

    Args:
        places: where each context row is in its stream, [T].
        documents: the document each context row belongs to, [T].
        anchors: where each block starts (its first token is known), [A]; a single block is seen by its
            context, as in drafting.
        owners: the document of each block, [A].
        block: rows of a block.
    """
    before = places < anchors[:, None]  # [A, T]
    stretch = (~before).sum(axis=0)  # how many anchors a row does not come before
    context = (documents[:, None] == documents) & (stretch[:, None] >= stretch)
    seen = before & (documents == owners[:, None]) & (places > anchors[:, None] - CONTEXT)
    rows = np.repeat(seen, block, axis=0)
    back = rows.T if len(anchors) == 1 else np.zeros_like(rows.T)
    own = np.kron(np.eye(len(anchors), dtype=bool), np.ones((block, block), bool))
    return np.block([[context, back], [rows, own]])


@dataclass
class ProposerTask:
    """The proposer's loss and batches, for `trainer.fit`."""

    model: MaskedDiffusionModel
    data: Continuations
    seed: int = 0
    folded: int = FOLDED_STEPS  # steps with many blocks a row, before those with one
    queries: int = 192  # block rows of a folded row
    blocks: tuple[tuple[int, float], ...] = ((8, 0.7), (16, 0.2), (4, 0.1))
    figures: tuple[str, ...] = ("code", "retrieval", "chat")

    def __post_init__(self) -> None:
        """Find the rows of each kind and where documents begin."""
        kinds = np.asarray(self.data.kinds)
        self._rows = {kind: np.flatnonzero((kinds == kind).sum(axis=1) >= 8) for kind in SHARES}
        self._documents = np.cumsum(np.asarray(self.data.tokens) == BOS, axis=1).astype(np.int32)

    def variant(self, step: int) -> int:
        """The block length of a step; negative where each row has one block."""
        sizes, shares = zip(*self.blocks, strict=True)
        block = int(np.random.default_rng((self.seed, step, 1)).choice(sizes, p=shares))
        return block if step < self.folded else -block

    def batch(self, step: int) -> tuple[mx.array, ...]:
        """Tokens [N, L], positions [N, L], what sees what [N, L, L], labels [N, A, B], weights and kinds.

        Weights are [N, A, B], zero where nothing is to be guessed; kinds are [N, A], zero for blocks that
        are partly filled.
        """
        rng = np.random.default_rng((self.seed, step))
        block, many = abs(self.variant(step)), self.variant(step) > 0
        kinds = [kind for kind, rows in SHARES.items() for _ in range(rows)] * (1 if many else 2)
        made = [self._row(rng, kind, block, many) for kind in kinds]
        return tuple(mx.array(np.stack(part)) for part in zip(*made, strict=True))

    def _row(self, rng: np.random.Generator, kind: int, block: int, many: bool) -> tuple[Any, ...]:
        """One row of a batch: a stream's stretch and the blocks at anchors whose next token is generated."""
        row = int(rng.choice(self._rows[kind]))
        tokens, kinds = np.asarray(self.data.tokens[row]), np.asarray(self.data.kinds[row])
        wanted = np.flatnonzero(kinds[1:] == kind).astype(np.int32)  # [possible anchors]
        pivot = int(rng.choice(wanted))
        if many:
            start = min(max(0, pivot - int(rng.integers(WIDTH))), len(tokens) - WIDTH)
            inside = wanted[(wanted >= start) & (wanted < start + WIDTH)]
            anchors = rng.choice(inside, size=self.queries // block)
            places = np.arange(start, start + WIDTH, dtype=np.int32)
        else:
            anchors = np.array([pivot], np.int32)
            places = np.arange(pivot - CONTEXT + 1, pivot, dtype=np.int32)
        there = places >= 0
        documents = np.where(there, self._documents[row, np.maximum(places, 0)], -1)
        sees = visibility(places, documents, anchors, self._documents[row, anchors], block)
        at = anchors[:, None] + np.arange(block, dtype=np.int32)  # [A, B]
        inside = np.minimum(at, len(tokens) - 1)
        labels = tokens[inside].astype(np.int32)
        valid = np.cumprod(((kinds[inside] > 0) & (at < len(tokens)))[:, 1:], axis=1, dtype=np.float32)
        share = rng.random((len(anchors), 1)) * (rng.random((len(anchors), 1)) < 0.5)
        masked = (rng.random(valid.shape) >= share) | (valid == 0)
        blocks = np.concatenate([labels[:, :1], np.where(masked, MASK, labels[:, 1:])], axis=1)
        falling = np.exp(-np.arange(block - 1) / (0.5 * block)).astype(np.float32)
        shown = np.where(there, tokens[np.maximum(places, 0)], PAD)
        return (
            np.concatenate([shown, blocks.ravel()]).astype(np.int32),
            np.concatenate([places, at.ravel()]).astype(np.float32),
            sees,
            labels[:, 1:],
            falling * valid * masked,
            np.where((masked | (valid == 0)).all(axis=1), kind, 0),
        )

    def loss(self, variant: int, *arrays: mx.array) -> tuple[mx.array, ...]:
        """Cross-entropy falling with the position in the block; emitted tokens per verify of each kind.

        The figures are those of blocks of masks alone, filled in one step, and look at the first seven.
        """
        tokens, positions, sees, labels, weights, kinds = arrays
        rows, count, masks = labels.shape
        block = abs(variant)
        logits = forward(self.model, tokens, positions, sees, count * block).reshape(rows, count, block, -1)
        logits = logits[:, :, 1:]
        losses = cross_entropy(logits, labels)
        right = ((mx.argmax(logits, axis=-1) == labels) & (weights > 0)).astype(mx.float32)
        emitted = mx.cumprod(right[..., : min(7, masks)], axis=-1).sum(axis=-1) + 1

        def mean_of(kind: int) -> mx.array:
            chosen = (kinds == kind).astype(mx.float32)
            return mx.maximum((emitted * chosen).sum(), 1) / mx.maximum(chosen.sum(), 1)

        return (
            (losses * weights).sum() / mx.maximum(weights.sum(), 1),
            mean_of(CODE),
            mean_of(RETRIEVAL),
            mean_of(CHAT),
        )
