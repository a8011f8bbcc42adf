"""The words of the demo corpora, split into what training may use and what evaluation keeps to itself.

Covers the word lists and the made-up words; the sentences and programs built from them live next door.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


@dataclass(frozen=True)
class Lexicon:
    """One split of the words: the generators draw from it and from nothing else."""

    names: tuple[str, ...]  # who has a secret code
    fields: tuple[str, ...]  # attributes, options and columns of programs
    nouns: tuple[str, ...]  # what a program or a filler sentence is about
    prefixes: tuple[str, ...]  # first half of a class name
    adjectives: tuple[str, ...]
    pseudo_rate: float  # share of names and fields replaced by made-up words


TRAIN = Lexicon(
    names=words(
        "Alice Bob Carol David Emma Frank Grace Henry Irene Jack Karen Leo Maria Nathan Olivia Peter "
        "Quinn Rachel Samuel Tina Ursula Victor Wendy Xavier Yvonne Amber Brian Chloe Derek Elena Felix "
        "Gloria Hugo Ingrid Jonas Kevin Laura Marcus Nora Oscar Paula Robert Sophie Thomas Uma Valerie "
        "Walter Yusuf Arthur Bella Cedric Edgar Fiona George Ivan Julia Martin Simon Anton Clara"
    ),
    fields=words(
        "size color count width height index value label path mode level limit state owner token score "
        "title offset weight length speed price total rate status kind group order depth margin region "
        "source target version stamp batch query column phase scale angle radius period volume distance "
        "duration capacity priority category language channel address balance quantity currency "
        "identifier description"
    ),
    nouns=words(
        "garden river market window castle bridge server client parser reader writer handler manager "
        "buffer record session forest village road harbor mountain valley station engine signal letter "
        "basket ticket invoice customer product account project report device sensor camera battery "
        "journey kitchen library museum tower island"
    ),
    prefixes=("Base", "Simple", "Fast", "Local", "Remote", "Open", "Static", "Small", "Shared", "Main"),
    adjectives=words("green blue warm cold quiet bright old new small large gentle rapid narrow wide"),
    pseudo_rate=0.35,
)

# The same words, but mostly made-up ones: what a drafter needs to learn to copy words of several tokens.
MADE_UP = replace(TRAIN, pseudo_rate=0.8)

HELD_OUT = Lexicon(
    names=words("Zoe Diana Hannah Oliver Lucas Stella Conrad Marina Philip Teresa Agnes Bruno"),
    fields=words("altitude latency voltage pattern gradient balance_due texture timeout humidity grade"),
    nouns=words("lantern meadow compass orchard ferry printer folder canyon parcel beacon"),
    prefixes=("Quick", "Hidden", "Modern", "Plain"),
    adjectives=("silver", "hollow", "heavy", "distant"),
    pseudo_rate=0.0,
)

_ONSETS = words("b d f g k l m n p r s t v z br dr kr pl st tr")
_VOWELS = "aeiou"
_CODAS = ("", "", "", "n", "r", "l", "s")
NAME_HEADS = words("Bel Cor Dal Fen Gar Hal Jor Kel Lor Mar Nel Per Ros Sel Tor Vel")
NAME_TAILS = words("an en ia in is o us a el on or ette")


def generator(key: int | str) -> random.Random:
    """A source of random draws that depends on the key alone."""
    return random.Random(key)  # noqa: S311 - reproducible text, no secrets


def pseudo_word(rng: random.Random) -> str:
    """A made-up lower-case word: two or three syllables, or the halves of two training words."""
    if rng.random() < 0.5:
        first, second = rng.sample(TRAIN.fields + TRAIN.nouns, 2)
        word = first[: len(first) // 2 + 1] + second[len(second) // 2 :]
        if word not in HELD_OUT.fields + HELD_OUT.nouns:
            return word
    count = rng.choice((2, 2, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(count)) + rng.choice(_CODAS)


def is_held_out_pseudo_name(head: str, tail: str) -> bool:
    """Whether a head and tail pair is kept for evaluation: one pair in five, fixed once for all seeds."""
    return (NAME_HEADS.index(head) + 2 * NAME_TAILS.index(tail)) % 5 == 0


def pseudo_name(rng: random.Random) -> str:
    """A made-up name of two pieces, from the training pairs."""
    while True:
        head, tail = rng.choice(NAME_HEADS), rng.choice(NAME_TAILS)
        if not is_held_out_pseudo_name(head, tail):
            return head + tail


def draw_names(rng: random.Random, lexicon: Lexicon, count: int) -> list[str]:
    """`count` different names; some are made up or plain words, so that unseen names work too.

    In three draws of ten all of them are, so that made-up names which share a piece must be told apart.
    """
    names = rng.sample(lexicon.names, min(count, len(lexicon.names)))
    rate = 1.0 if rng.random() < 0.3 else lexicon.pseudo_rate
    for i in range(len(names)):
        if rng.random() < rate:
            plain = rng.choice(lexicon.nouns + lexicon.fields)
            name = pseudo_name(rng) if rng.random() < 0.6 else plain
            if name not in names:
                names[i] = name
    return names


def held_out_two_piece_names() -> tuple[str, ...]:
    """Every made-up name that no training text holds."""
    pairs = ((head, tail) for head in NAME_HEADS for tail in NAME_TAILS)
    return tuple(head + tail for head, tail in pairs if is_held_out_pseudo_name(head, tail))


def draw_held_out_names(rng: random.Random, count: int) -> list[str]:
    """`count` different names never seen in a fact, half of them single tokens and half two-piece."""
    pieces = count // 2
    names = rng.sample(HELD_OUT.names, count - pieces) + rng.sample(held_out_two_piece_names(), pieces)
    rng.shuffle(names)
    return names


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
