"""Words, facts and filler of retrieval texts, split into those of training and those of evaluation.

Texts made from a seed must stay the same byte for byte: the order of the random draws is part of the format.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Count = Callable[[str], int]  # tokens of a text


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
    """`count` different names; some, and in three draws of ten all, are made up or plain words."""
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
    return [draw_fact(rng, name) for name in names]


def draw_fact(rng: random.Random, name: str) -> Fact:
    """A fact with a random code."""
    return Fact(name, f"{rng.randrange(10000):04d}")


def document_parts(
    rng: random.Random, lexicon: Lexicon, count: Count, *, length: int, facts: int
) -> tuple[list[str], list[Fact]]:
    """Sentences of a document in order, and its facts in the order they are asked for.

    With all questions, answers, and a token at either end, the document has at most `length` tokens. Each
    fact is asked for once, in the order of the facts, cyclically from a random start.
    """
    drawn = draw_facts(rng, lexicon, facts)
    asked = sum(count(f.sentence) + count(f.question) + 5 for f in drawn)
    while drawn and asked > length - 2:
        dropped = drawn.pop()
        asked -= count(dropped.sentence) + count(dropped.question) + 5
    units: list[tuple[str, Fact | None]] = [(fact.sentence, fact) for fact in drawn]
    left = length - 2 - asked
    while left > 0:
        sentence = filler(rng, lexicon)
        left -= count(sentence)
        if left >= 0:
            units.append((sentence, None))
    rng.shuffle(units)
    ordered = [fact for _, fact in units if fact is not None]
    start = rng.randrange(len(ordered))
    return [text for text, _ in units], ordered[start:] + ordered[:start]
