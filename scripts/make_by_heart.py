"""Train the tiny model of tests/data/by_heart on its three answers, and write it with its digests.

    python scripts/make_by_heart.py

Takes half a minute. The tokenizer is the shipped pair's with two marks for reasoning; nothing else goes in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mlx.core as mx
from mlx import nn, optimizers
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs

from engine.target.loading import SHIPPED_TARGET, load_target
from tests.engine.server.by_heart import ANSWER, ASKED, CALL, FOLDER, REASONED, RIDDLE, TOLD, WEATHER
from tools.demo_models.export import write_digests

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1288,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": [2, 7],
    "bos_token_id": 1,
}


def main() -> None:
    """Train the model and write it as a folder."""
    folder = FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    mx.random.seed(1)
    model = Model(ModelArgs.from_dict(CONFIG))
    _save(model, folder)
    tokenizer: Any = load_target(folder).tokenizer
    lessons = [
        _lesson(tokenizer, [{"role": "user", "content": ASKED}], CALL, tools=[WEATHER]),
        _lesson(tokenizer, TOLD, ANSWER, tools=[WEATHER]),
        _lesson(tokenizer, [{"role": "user", "content": RIDDLE}], REASONED),
    ]
    _train(model, lessons)
    _save(model, folder)
    write_digests(folder)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer

    backend = Tokenizer.from_file(str(SHIPPED_TARGET / "tokenizer.json"))
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in ("<think>", "</think>")])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text((SHIPPED_TARGET / "tokenizer_config.json").read_text())


def _lesson(
    tokenizer: Any, turns: list[dict[str, Any]], answer: str, **template: Any
) -> tuple[list[int], int]:
    """Tokens of prompt and answer, and where the answer begins."""
    prompt = list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, **template))
    said = tokenizer.encode(answer, add_special_tokens=False)
    return [*prompt, *said, 7], len(prompt)


def _train(model: Any, lessons: list[tuple[list[int], int]]) -> None:
    longest = max(len(tokens) for tokens, _ in lessons)
    rows = mx.array([tokens + [0] * (longest - len(tokens)) for tokens, _ in lessons])
    weights = mx.array(
        [[float(begin <= at + 1 < len(tokens)) for at in range(longest - 1)] for tokens, begin in lessons]
    )

    def loss(model: Any) -> mx.array:
        losses = nn.losses.cross_entropy(model(rows[:, :-1]), rows[:, 1:])
        return (losses * weights).sum() / weights.sum()

    step = nn.value_and_grad(model, loss)
    optimizer = optimizers.Adam(learning_rate=3e-3)
    for _ in range(600):
        value, gradients = step(model)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        if value.item() < 0.003:
            return
    raise AssertionError(f"the answers were not learnt: loss {value.item():.4f}")


def _save(model: Any, folder: Path) -> None:
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        {k: v.astype(mx.float16) for k, v in tree_flatten(model.parameters())},
        {"format": "mlx"},
    )


if __name__ == "__main__":
    main()
