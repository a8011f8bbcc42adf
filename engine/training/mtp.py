"""Training a next-token head for a target without a published one.

The head learns, at every position of texts, the token its target would choose after the next one, and so on
the head's own output for another draft. It is written in DeepSeek's layout, where `--drafter mtp` finds it.
"""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
from mlx import nn, optimizers
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from engine.errors import ConfigurationError
from engine.networks.mtp import PARTS, SPLIT_FILE, MTPHead, build_head
from engine.target.folder import text_part
from engine.target.model import Target

DEPTH = 2  # drafts in a row that are trained
BATCH, LEARNING_RATE = 8, 2e-3  # stretches of text a step; the highest rate, which falls to a tenth


def train_head(
    target: Target,
    config: dict[str, Any],
    texts: Sequence[Sequence[int]],
    *,
    steps: int,
    length: int = 96,
) -> tuple[MTPHead, list[float]]:
    """Train a head of the target's family, and return it with the loss of every step, in nats a token.

    Args:
        target: whose hidden states and choices are learned; it does not change.
        config: its ``config.json``.
        texts: token ids; stretches of ``length`` tokens are drawn from those that are long enough.
        steps: of the optimiser.
        length: see ``texts``.

    Raises:
        ConfigurationError: no text is long enough.
    """
    texts = [text for text in texts if len(text) >= length]
    if not texts:
        raise ConfigurationError(f"no text has {length} tokens; give longer ones, or a smaller length")
    mx.random.seed(0)
    draw = Random(0)  # noqa: S311 - nothing here is a secret
    network, _ = build_head(config)
    network.train()
    optimizer = optimizers.Adam(optimizers.cosine_decay(LEARNING_RATE, steps, LEARNING_RATE / 10))

    def loss(rows: mx.array, embeddings: mx.array, choices: mx.array) -> mx.array:
        total, hidden = mx.array(0.0), rows
        for depth in range(DEPTH):  # position i: hidden i, embedding i + 1 + depth, choice behind that one
            last = rows.shape[1] - 1 - depth
            following = embeddings[:, 1 + depth : 1 + depth + last]
            hidden = network(following, hidden[:, :last], [None] * len(network.layers))
            scores = target.head(hidden)
            wanted = choices[:, 1 + depth : 1 + depth + last]
            total = total + nn.losses.cross_entropy(scores, wanted, reduction="mean")
        return total / DEPTH

    step = nn.value_and_grad(network, loss)
    losses = []
    for _ in range(steps):
        parts = []
        for _ in range(BATCH):
            text = draw.choice(texts)
            start = draw.randrange(len(text) - length + 1)
            parts.append(list(text[start : start + length]))
        value, gradients = step(*_seen_by(target, mx.array(parts, mx.int32)))
        optimizer.update(network, gradients)
        mx.eval(network.state, optimizer.state)
        losses.append(float(value.item()))
    network.eval()
    return network, losses


def write_head(network: MTPHead, config: dict[str, Any], folder: Path) -> None:
    """Write ``mtp.safetensors`` in float16, and the target's ``config.json`` next to it if there is none."""
    names = {ours: theirs for theirs, ours in PARTS.items() if theirs in ("eh_proj", "enorm", "hnorm")}
    names["norm"] = "shared_head.norm"
    stored = {}
    parameters: Any = tree_flatten(network.parameters())  # type: ignore[no-untyped-call]
    for name, value in parameters:
        part, _, kind = name.rpartition(".")
        inner = f"{names[part]}.{kind}" if part in names else name.removeprefix("layers.0.")
        stored[f"model.layers.{text_part(config)['num_hidden_layers']}.{inner}"] = value.astype(mx.float16)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / SPLIT_FILE), stored, {"format": "mlx"})
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _seen_by(target: Target, tokens: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Last hidden states and embeddings [B, N, hidden], and the tokens chosen behind them, [B, N]."""
    with closing(target.hook_layers((target.layer_count - 1,))) as hooks:
        with hooks.collecting():
            logits = target.model(tokens, cache=make_prompt_cache(target.model))
        rows = hooks.take()
    found = target.final_norm(rows), target.embed(tokens), mx.argmax(logits, axis=-1)
    mx.eval(found)
    return found
