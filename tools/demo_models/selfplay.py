"""The target's own greedy continuations of training prompts, with the taps a drafter would see.

Rows are streams of fixed length: a prompt, the target's continuation until it stops, the next prompt, and so
on. Uses the fast exponentials of training; generation for users lives in the engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.haystack_text import TRAIN, Lexicon, generator
from tools.demo_models.corpora import chat, retrieval
from tools.demo_models.corpora.batches import encode, program_document
from tools.demo_models.corpora.document import ANSWER
from tools.demo_models.corpora.lexicon import MADE_UP
from tools.demo_models.fastops import gelu_value, softmax_value
from tools.demo_models.target_forward import embedding_scale
from tools.demo_models.tokenizer import ASSISTANT, END, EOS, DemoTokenizer

CODE, RETRIEVAL, CHAT = 1, 2, 3  # what a generated token continues; 0 marks prompt tokens
SHARES = {CODE: 0.5, RETRIEVAL: 0.3, CHAT: 0.2}
LIMIT = 192  # tokens of one continuation
_gelu = mx.compile(gelu_value)


@dataclass(frozen=True)
class Continuations:
    """Rows of tokens [R, T], the kind of each token [R, T] and the taps [R, T, taps * hidden] at it."""

    tokens: npt.NDArray[np.uint16]
    kinds: npt.NDArray[np.uint8]
    taps: npt.NDArray[np.float16]

    def save(self, folder: Path) -> None:
        """Write three `.npy` files."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("tokens", "kinds", "taps"):
            np.save(folder / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, folder: Path) -> Continuations:
        """Map the files of `save` into memory."""
        return cls(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "kinds", "taps")))


def draw_prompt(
    rng: random.Random, tokenizer: DemoTokenizer, left: int, lexicon: Lexicon
) -> tuple[int, list[int]]:
    """A kind and the prompt of a training document, cut where a continuation is wanted."""
    kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
    if kind == RETRIEVAL and left < 200:
        kind = CHAT
    if kind == CODE:
        tokens, _ = encode(tokenizer, program_document(rng, lexicon))
        return kind, tokens[: round(len(tokens) * rng.uniform(0.1, 0.6))]
    if kind == RETRIEVAL:
        facts = rng.randint(2, 8)
        length = rng.randint(min(left, 96 + 24 * facts), left)
        tokens, weights = encode(
            tokenizer, retrieval.document(rng, lexicon, tokenizer.count, length=length, facts=facts)
        )
        return kind, tokens[: weights.index(ANSWER)]
    tokens, _ = encode(tokenizer, chat.conversation(rng, lexicon))
    last = len(tokens) - tokens[::-1].index(ASSISTANT)
    return kind, tokens[:last]


class _Memory:
    """Keys and values of one layer for a batch of rows; sliding layers keep the newest `window` positions."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def extend(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.keys is not None and self.values is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        if self.window is not None and keys.shape[2] > self.window:
            keys, values = keys[:, :, -self.window :], values[:, :, -self.window :]
        self.keys, self.values = keys, values
        return keys, values


class _FullMemory(_Memory):
    """The same for a full layer, in one buffer that is written in place."""

    def __init__(self, length: int) -> None:
        super().__init__(None)
        self.length, self.used = length, 0

    def extend(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.keys is None or self.values is None:
            shape = (*keys.shape[:2], self.length, keys.shape[3])
            self.keys, self.values = mx.zeros(shape), mx.zeros(shape)
        self.keys[:, :, self.used : self.used + 1] = keys
        self.values[:, :, self.used : self.used + 1] = values
        self.used += 1
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]


def _step(
    model: Any, tokens: mx.array, position: int, memories: list[_Memory], taps: tuple[int, ...]
) -> tuple[mx.array, mx.array]:
    """One token a row: greedy next tokens [R] and the taps [R, taps * hidden] at this position."""
    args = model.args
    rows, dim, groups = tokens.shape[0], args.head_dim, args.num_key_value_heads
    h = model.model.embed_tokens(tokens[:, None]) * embedding_scale(args.hidden_size)
    tapped = []
    for index, (layer, memory) in enumerate(zip(model.model.layers, memories, strict=True)):
        attention = layer.self_attn
        x = layer.input_layernorm(h)

        def split(y: mx.array, count: int) -> mx.array:
            return y.reshape(rows, 1, count, dim).transpose(0, 2, 1, 3)

        q = attention.q_norm(split(attention.q_proj(x), args.num_attention_heads))
        k = attention.k_norm(split(attention.k_proj(x), groups))
        q, k = attention.rope(q, offset=position), attention.rope(k, offset=position)
        keys, values = memory.extend(k, split(attention.v_proj(x), groups))
        q = q.reshape(rows, groups, -1, dim) * attention.scale
        weights = softmax_value(q @ keys.swapaxes(-1, -2))
        merged = (weights @ values).reshape(rows, 1, -1)
        h = h + layer.post_attention_layernorm(attention.o_proj(merged))
        x = layer.pre_feedforward_layernorm(h)
        hidden = layer.mlp.down_proj(_gelu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x))
        h = h + layer.post_feedforward_layernorm(hidden)
        if index in taps:
            tapped.append(h[:, 0])
    logits = model.model.embed_tokens.as_linear(model.model.norm(h))
    states = mx.concatenate(tapped, axis=-1) if tapped else mx.zeros((rows, 0))
    return mx.argmax(logits[:, 0], axis=-1), states.astype(mx.float16)


def continue_greedily(
    model: Any,
    tokenizer: DemoTokenizer,
    *,
    seed: int,
    rows: int,
    length: int,
    taps: tuple[int, ...],
    lexicon: Lexicon = TRAIN,
) -> Continuations:
    """`rows` streams of `length` tokens in one batch."""
    rng = generator(f"selfplay/{seed}")
    tokens = np.zeros((rows, length), np.uint16)
    kinds = np.zeros((rows, length), np.uint8)
    seen = np.zeros((rows, length, len(taps) * model.args.hidden_size), np.float16)
    forced = np.full((rows, length + 1), -1, np.int32)
    current = np.zeros(rows, np.uint8)
    stop_at = np.zeros(rows, np.int64)

    def begin(row: int, position: int) -> None:
        current[row], prompt = draw_prompt(rng, tokenizer, length - position, lexicon)
        prompt = prompt[: length - position]
        forced[row, position : position + len(prompt)] = prompt
        stop_at[row] = position + len(prompt) + LIMIT

    for row in range(rows):
        begin(row, 0)
    memories = [
        _Memory(model.args.sliding_window) if layer.self_attn.is_sliding else _FullMemory(length)
        for layer in model.model.layers
    ]
    upcoming: npt.NDArray[np.int64] = np.zeros(rows, np.int64)
    for position in range(length):
        prompted = forced[:, position] >= 0
        tokens[:, position] = np.where(prompted, forced[:, position], upcoming)
        kinds[:, position] = np.where(prompted, 0, current)
        ended = ~prompted & np.isin(tokens[:, position], (EOS, END))
        for done in np.flatnonzero(ended | (position >= stop_at)).tolist():
            begin(done, position + 1)
        inputs = mx.array(tokens[:, position].astype(np.int32))
        following, row_taps = _step(model, inputs, position, memories, taps)
        mx.eval(following, row_taps, [(m.keys, m.values) for m in memories])
        upcoming = np.array(following).astype(np.int64)
        seen[:, position] = np.array(row_taps)
    return Continuations(tokens, kinds, seen)


def collect(
    model: Any,
    tokenizer: DemoTokenizer,
    folder: Path,
    *,
    seed: int,
    batches: tuple[int, int],
    rows: int = 128,
    length: int = 512,
    taps: tuple[int, ...],
    progress: Callable[[dict[str, float]], None],
) -> Continuations:
    """Collect streams, each batch of `rows` in its own folder so that a stopped run resumes.

    `batches` are the number of batches with the training words and the number with mostly made-up words.
    """
    parts = []
    plain, made_up = batches
    for index in range(plain + made_up):
        part = folder / f"part-{index:03d}"
        if not (part / "taps.npy").exists():
            made = continue_greedily(
                model,
                tokenizer,
                seed=seed * 10_000 + index,
                rows=rows,
                length=length,
                taps=taps,
                lexicon=TRAIN if index < plain else MADE_UP,
            )
            made.save(part)
            progress({"batch": index + 1, "generated": float((made.kinds > 0).mean())})
        parts.append(Continuations.load(part))
    return Continuations(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.kinds for part in parts]),
        np.concatenate([part.taps for part in parts]),
    )
