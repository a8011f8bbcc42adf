"""Needle-in-a-haystack documents as weighted pieces: facts hidden in filler, then each fact asked for once.

Does not cover retrieval through the chat template (see `chat`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from engine.haystack_text import (
    HELD_OUT,
    Count,
    Fact,
    Lexicon,
    document_parts,
    draw_fact,
    draw_held_out_names,
    filler,
)
from tools.demo_models.corpora.document import ANSWER, CONTEXT, NORMAL, Document, Piece


@dataclass(frozen=True)
class NeedlePrompt:
    """One evaluation prompt: the text, the fact asked for and where it lies."""

    prompt: str
    fact: Fact
    depth: float  # 0 = start of the context, 1 = just before the question


def document(rng: random.Random, lexicon: Lexicon, count: Count, *, length: int, facts: int) -> Document:
    """A document of at most `length` tokens: shuffled facts and filler, then all questions with answers."""
    sentences, asked = document_parts(rng, lexicon, count, length=length, facts=facts)
    pieces = [Piece("<bos>", CONTEXT), *(Piece(text, CONTEXT) for text in sentences)]
    for i, fact in enumerate(asked):
        pieces += [
            Piece(fact.question, CONTEXT if i == 0 else NORMAL),
            Piece(fact.code, ANSWER),
            Piece(".", NORMAL),
        ]
    return (*pieces, Piece("<eos>", NORMAL))


def needle(
    rng: random.Random,
    count: Count,
    *,
    length: int,
    depth: float,
    names: Sequence[str] = (),
    distractors: int = 4,
) -> NeedlePrompt:
    """An evaluation prompt of about `length` tokens that ends with the question about the fact at `depth`.

    Filler is held out; so are the names, unless `names` lists those to draw from.
    """
    chosen = rng.sample(names, 1 + distractors) if names else draw_held_out_names(rng, 1 + distractors)
    wanted, *others = [draw_fact(rng, name) for name in chosen]
    units = [fact.sentence for fact in others]
    left = length - 1 - count(wanted.question) - count(wanted.sentence) - sum(map(count, units))
    while True:
        sentence = filler(rng, HELD_OUT)
        left -= count(sentence)
        if left < 0:
            break
        units.append(sentence)
    rng.shuffle(units)
    units.insert(round(depth * len(units)), wanted.sentence)
    return NeedlePrompt("".join(units) + wanted.question, wanted, depth)
