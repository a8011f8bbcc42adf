"""More draws from the words of `engine.haystack_text`, for programs and conversations."""

from __future__ import annotations

import random
from dataclasses import replace

from engine.haystack_text import TRAIN, Lexicon, pseudo_word

# The same words, but mostly made-up ones: what a drafter needs to learn to copy words of several tokens.
MADE_UP = replace(TRAIN, pseudo_rate=0.8)


def draw_nouns(rng: random.Random, lexicon: Lexicon, count: int) -> list[str]:
    """`count` different nouns; some are made up at the lexicon's rate."""
    nouns = rng.sample(lexicon.nouns, count)
    for i in range(len(nouns)):
        if rng.random() < lexicon.pseudo_rate:
            word = pseudo_word(rng)
            if word not in nouns:
                nouns[i] = word
    return nouns


def draw_fields(rng: random.Random, lexicon: Lexicon, count: int) -> list[str]:
    """`count` different field words; some are made up at the lexicon's rate."""
    fields = rng.sample(lexicon.fields, min(count, len(lexicon.fields)))
    for i in range(len(fields)):
        if rng.random() < lexicon.pseudo_rate:
            word = pseudo_word(rng)
            if word not in fields:
                fields[i] = word
    return fields
