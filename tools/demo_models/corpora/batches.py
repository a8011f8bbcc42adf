"""Batches of the mixed corpora: step n of a seed is always the same batch, so a run can stop and resume."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.haystack_text import TRAIN, Lexicon, generator
from tools.demo_models.corpora import chat, code, retrieval
from tools.demo_models.corpora.document import CONTEXT, NORMAL, Document, Piece
from tools.demo_models.tokenizer import EOS, DemoTokenizer

Tokens = npt.NDArray[np.int32]
Weights = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Mixture:
    """Shares of the kinds of rows; the rest is chat."""

    retrieval: float = 0.45
    code: float = 0.40


def program_document(rng: random.Random, lexicon: Lexicon = TRAIN) -> Document:
    """One training program from `<bos>` to `<eos>`."""
    return (Piece("<bos>", CONTEXT), Piece(code.program(rng, lexicon)), Piece("<eos>", NORMAL))


def encode(tokenizer: DemoTokenizer, document: Document) -> tuple[list[int], list[float]]:
    """Tokens of a document and the loss weight of each token."""
    tokens: list[int] = []
    weights: list[float] = []
    for piece in document:
        ids = tokenizer.encode(piece.text)
        tokens += ids
        weights += [piece.weight] * len(ids)
    return tokens, weights


def _documents(rng: random.Random, kind: str, tokenizer: DemoTokenizer, length: int) -> Iterator[Document]:
    """The documents packed into one row of a kind. Retrieval rows mix one long document with short ones."""
    if kind == "retrieval":
        if rng.random() < 0.7:
            yield _retrieval_document(rng, tokenizer, length - rng.randrange(24))
        while True:
            yield _retrieval_document(rng, tokenizer, rng.randint(40, min(128, length)))
    while True:
        yield program_document(rng) if kind == "code" else chat.conversation(rng)


def _retrieval_document(rng: random.Random, tokenizer: DemoTokenizer, length: int) -> Document:
    """A document of about `length` tokens: mostly many facts, sometimes a few in a lot of filler."""
    most = min(12, max(1, length // 32))
    facts = rng.randint(1, most if rng.random() < 0.7 else min(5, most))
    return retrieval.document(rng, TRAIN, tokenizer.count, length=length, facts=facts)


def row(
    rng: random.Random, tokenizer: DemoTokenizer, kind: str, length: int
) -> tuple[list[int], list[float]]:
    """`length` tokens of one kind and the weight of predicting each; programs may be entered midway."""
    tokens: list[int] = []
    weights: list[float] = []
    for document in _documents(rng, kind, tokenizer, length):
        ids, importance = encode(tokenizer, document)
        if kind == "code" and not tokens and rng.random() < 0.5:
            start = rng.randrange(max(1, len(ids) - length // 2))
            ids, importance = ids[start:], importance[start:]
        tokens += ids
        weights += importance
        if len(tokens) >= length:
            return tokens[:length], weights[:length]
    raise AssertionError("the stream of documents is endless")


def batch(
    tokenizer: DemoTokenizer, mixture: Mixture, *, seed: int, step: int, rows: int, length: int
) -> tuple[Tokens, Weights]:
    """The batch of one step: tokens [rows, length + 1] and weights [rows, length] of the predicted tokens."""
    rng = generator(f"{seed}/{step}")
    tokens = np.full((rows, length + 1), EOS, np.int32)
    weights = np.zeros((rows, length), np.float32)
    retrieval_rows = int(rows * mixture.retrieval + rng.random())
    code_rows = int(rows * mixture.code + rng.random())
    kinds = ["retrieval"] * retrieval_rows + ["code"] * code_rows + ["chat"] * rows
    for i in range(rows):
        ids, importance = row(rng, tokenizer, kinds[i], length + 1)
        tokens[i], weights[i] = ids, importance[1:]
    return tokens, weights
