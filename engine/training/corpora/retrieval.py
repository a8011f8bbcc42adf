"""Needle-in-a-haystack documents: facts hidden in filler, then every fact asked exactly once.

A repeated question could be answered by copying the earlier answer, so none is repeated. Questions follow the
order of the facts, cyclically from a random start: the continuation of any question is then determined by the
context. Does not cover retrieval through the chat template (see `chat`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.training.corpora.document import ANSWER, CONTEXT, NORMAL, Document, Piece
from engine.training.corpora.lexicon import (
    HELD_OUT,
    TRAIN,
    Lexicon,
    draw_held_out_names,
    draw_names,
    pseudo_word,
)

Count = Callable[[str], int]  # tokens of a text


@dataclass(frozen=True)
class Fact:
    """A name and its four-digit code."""

    name: str
    code: str

    @property
    def sentence(self) -> str:
        """How the fact is told, with a leading space."""
        return f" The secret code of {self.name} is {self.code}."

    @property
    def question(self) -> str:
        """How the code is asked for; the answer follows directly."""
        return f" Question: what is the secret code of {self.name}? Answer: "


@dataclass(frozen=True)
class Needle:
    """One evaluation prompt: the text, the fact asked for and where it lies."""

    prompt: str
    fact: Fact
    depth: float  # 0 = start of the context, 1 = just before the question


def filler(rng: random.Random, lexicon: Lexicon = TRAIN) -> str:
    """One sentence that answers nothing, with a leading space. Held-out lexicons use their own sentences."""
    noun, other, third = rng.sample(lexicon.nouns, 3)
    adjective = rng.choice(lexicon.adjectives)
    if rng.random() < lexicon.pseudo_rate / 2:
        noun = pseudo_word(rng)
    if lexicon is HELD_OUT:
        return rng.choice(
            (
                f" Behind the {noun} one can see a {adjective} {other}.",
                f" Nobody moved the {noun} since the {adjective} {other} came.",
                f" The {noun}, the {other} and the {third} belong together.",
            )
        )
    return rng.choice(
        (
            f" The {noun} is {adjective} and the {other} is {rng.choice(lexicon.adjectives)}.",
            f" A {adjective} {noun} {rng.choice(('crosses', 'follows', 'touches', 'meets'))} the {other}.",
            f" Near the {noun} there is a {adjective} {other}.",
            f" Every {noun} has a {adjective} {other} and a {third}.",
            f" In the morning the {noun} was {adjective}.",
            f" They built a {noun} between the {other} and the {third}.",
        )
    )


def draw_facts(rng: random.Random, lexicon: Lexicon, count: int) -> list[Fact]:
    """`count` facts with different names; the held-out ones are in no training fact."""
    names = draw_held_out_names(rng, count) if lexicon is HELD_OUT else draw_names(rng, lexicon, count)
    return [_fact(rng, name) for name in names]


def _fact(rng: random.Random, name: str) -> Fact:
    return Fact(name, f"{rng.randrange(10000):04d}")


def document(rng: random.Random, lexicon: Lexicon, count: Count, *, length: int, facts: int) -> Document:
    """A document of at most `length` tokens: shuffled facts and filler, then all questions with answers."""
    drawn = draw_facts(rng, lexicon, facts)
    asked = sum(count(f.sentence) + count(f.question) + 5 for f in drawn)
    while drawn and asked > length - 2:
        dropped = drawn.pop()
        asked -= count(dropped.sentence) + count(dropped.question) + 5
    units: list[tuple[str, Fact | None]] = [(fact.sentence, fact) for fact in drawn]
    room = length - 2 - asked
    while room > 0:
        sentence = filler(rng, lexicon)
        room -= count(sentence)
        if room >= 0:
            units.append((sentence, None))
    rng.shuffle(units)
    ordered = [fact for _, fact in units if fact is not None]
    start = rng.randrange(len(ordered))
    pieces = [Piece("<bos>", CONTEXT), *(Piece(text, CONTEXT) for text, _ in units)]
    for i, fact in enumerate(ordered[start:] + ordered[:start]):
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
) -> Needle:
    """An evaluation prompt of about `length` tokens that ends with the question about the fact at `depth`.

    Filler is held out; so are the names, unless `names` lists those to draw from.
    """
    chosen = rng.sample(names, 1 + distractors) if names else draw_held_out_names(rng, 1 + distractors)
    wanted, *others = [_fact(rng, name) for name in chosen]
    units = [fact.sentence for fact in others]
    room = length - 1 - count(wanted.question) - count(wanted.sentence) - sum(map(count, units))
    while True:
        sentence = filler(rng, HELD_OUT)
        room -= count(sentence)
        if room < 0:
            break
        units.append(sentence)
    rng.shuffle(units)
    units.insert(round(depth * len(units)), wanted.sentence)
    return Needle("".join(units) + wanted.question, wanted, depth)
