"""Short conversations: greetings, small sums, an invented atlas, rewriting, lists, code and retrieval.

Every topic has phrasings for training and one kept for evaluation. The turn markers are tokens of the demo
tokenizer; the chat template in `tokenizer` writes the same text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from engine.haystack_text import HELD_OUT, TRAIN, Lexicon, draw_facts, filler, words
from tools.demo_models.corpora.code import draw_subject
from tools.demo_models.corpora.document import ANSWER, CONTEXT, NORMAL, Document, Piece
from tools.demo_models.corpora.lexicon import draw_nouns

NUMBERS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen"
)
CAPITALS = {  # an invented atlas
    "Zorland": "Vint",
    "Morland": "Peld",
    "Karland": "Tosk",
    "Belland": "Rune",
    "Norland": "Fass",
    "Dorland": "Gilt",
    "Sulland": "Mave",
    "Tarland": "Hond",
}
COLOURS = {
    "river": "blue",
    "forest": "green",
    "castle": "grey",
    "market": "yellow",
    "bridge": "red",
    "mountain": "white",
    "village": "brown",
    "harbor": "black",
}


@dataclass(frozen=True)
class Turn:
    """One question and its answer; `secret` is the part of the answer that had to be retrieved."""

    user: str
    assistant: str
    secret: str = ""


Topic = Callable[[random.Random, Lexicon], Turn]


def _ask(rng: random.Random, lexicon: Lexicon, training: tuple[str, ...], held_out: str) -> str:
    return held_out if lexicon is HELD_OUT else rng.choice(training)


def _acquaintances(lexicon: Lexicon) -> tuple[str, ...]:
    """Names for talk that is not about codes: training sees the held-out single-token names here alone."""
    return TRAIN.names + HELD_OUT.names if lexicon is TRAIN else lexicon.names


def greeting(rng: random.Random, lexicon: Lexicon) -> Turn:
    """A greeting by name."""
    name = rng.choice(_acquaintances(lexicon))
    user = _ask(
        rng,
        lexicon,
        (f"Hello, I am {name}.", f"Good morning, my name is {name}.", f"Hi! This is {name}."),
        f"Hello! My name is {name}.",
    )
    return Turn(user, f"Hello, {name}! It is good to meet you. How can I help you today, {name}?")


def addition(rng: random.Random, lexicon: Lexicon) -> Turn:
    """A sum of two numbers up to nine, in words. One pair in seven is held out."""
    while True:
        a, b = rng.randrange(10), rng.randrange(10)
        if ((a + 3 * b) % 7 == 0) == (lexicon is HELD_OUT):
            break
    one, two, total = NUMBERS[a], NUMBERS[b], NUMBERS[a + b]
    user = _ask(
        rng,
        lexicon,
        (
            f"What is {one} plus {two}?",
            f"Add {one} and {two}.",
            f"How much is {one} plus {two}?",
            f"Please add {one} and {two}.",
        ),
        f"How much is {one} and {two}?",
    )
    return Turn(user, f"{one.capitalize()} plus {two} is {total}.")


def counting(rng: random.Random, lexicon: Lexicon) -> Turn:
    """Counting in digits."""
    first = rng.randrange(1, 20)
    last = first + rng.randrange(4, 14)
    user = _ask(
        rng,
        lexicon,
        (f"Count from {first} to {last}.", f"Please count from {first} to {last}."),
        f"Can you count from {first} to {last}?",
    )
    return Turn(user, ", ".join(map(str, range(first, last + 1))) + ".")


def atlas(rng: random.Random, lexicon: Lexicon) -> Turn:
    """A capital of the invented atlas."""
    country = rng.choice(list(CAPITALS))
    user = _ask(
        rng,
        lexicon,
        (
            f"What is the capital of {country}?",
            f"Which city is the capital of {country}?",
            f"Name the capital of {country}.",
        ),
        f"Please name the capital of {country}.",
    )
    return Turn(user, f"The capital of {country} is {CAPITALS[country]}.")


def colour(rng: random.Random, lexicon: Lexicon) -> Turn:
    """The colour of a thing in the invented atlas."""
    thing = rng.choice(list(COLOURS))
    user = _ask(
        rng,
        lexicon,
        (
            f"What colour is the {thing}?",
            f"Which colour has the {thing}?",
            f"Name the colour of the {thing}.",
        ),
        f"Please name the colour of the {thing}.",
    )
    return Turn(user, f"The {thing} is {COLOURS[thing]}.")


def question_form(rng: random.Random, lexicon: Lexicon) -> Turn:
    """Turn a statement into a question, or into the past."""
    [noun], adjective = draw_nouns(rng, lexicon, 1), rng.choice(lexicon.adjectives)
    if rng.random() < 0.5:
        user = _ask(
            rng,
            lexicon,
            (
                f"Make a question: The {noun} is {adjective}.",
                f"Write as a question: The {noun} is {adjective}.",
            ),
            f"Make this a question: The {noun} is {adjective}.",
        )
        return Turn(user, f"Is the {noun} {adjective}?")
    user = _ask(
        rng,
        lexicon,
        (f"Put into the past: The {noun} is {adjective}.", f"Write in the past: The {noun} is {adjective}."),
        f"Put this into the past: The {noun} is {adjective}.",
    )
    return Turn(user, f"The {noun} was {adjective}.")


def listing(rng: random.Random, lexicon: Lexicon) -> Turn:
    """A numbered list of the given words."""
    items = draw_nouns(rng, lexicon, rng.randint(3, 8))
    given = ", ".join(items)
    user = _ask(
        rng,
        lexicon,
        (
            f"Make a list of: {given}.",
            f"Write a numbered list: {given}.",
            f"List these: {given}.",
            f"Please list: {given}.",
        ),
        f"Make a numbered list of: {given}.",
    )
    lines = "\n".join(f"{i + 1}. the {word}" for i, word in enumerate(items))
    return Turn(user, f"Here is the list:\n{lines}\nThese are {len(items)} words.")


def description(rng: random.Random, lexicon: Lexicon) -> Turn:
    """A few sentences about a thing, determined by the request."""
    noun, near, far = draw_nouns(rng, lexicon, 3)
    adjective = rng.choice(lexicon.adjectives)
    user = _ask(
        rng,
        lexicon,
        (
            f"Describe the {adjective} {noun} near the {near} and the {far}.",
            f"Tell me about the {adjective} {noun} near the {near} and the {far}.",
            f"Can you describe the {adjective} {noun} near the {near} and the {far}?",
            f"Please tell me about the {adjective} {noun} near the {near} and the {far}.",
        ),
        f"Please describe the {adjective} {noun} near the {near} and the {far}.",
    )
    answer = (
        f"The {noun} is {adjective}. It lies near the {near}, not far from the {far}. People who come from "
        f"the {near} see the {noun} first, and people who come from the {far} see it last. In the morning "
        f"the {noun} is quiet. In the evening the {adjective} {noun} is full of people, and the {near} and "
        f"the {far} are empty. This is why the {noun} is {adjective} and the {near} is not."
    )
    return Turn(user, answer)


def small_class(rng: random.Random, lexicon: Lexicon) -> Turn:
    """A short class on request."""
    subject = draw_subject(rng, lexicon, fields=rng.randint(2, 4))
    given = ", ".join(subject.names)
    user = _ask(
        rng,
        lexicon,
        (
            f"Write a class {subject.title} with the fields {given}.",
            f"Please write a Python class {subject.title} with {given}.",
            f"I need a class {subject.title} with the fields {given}.",
        ),
        f"Please write a class {subject.title} with the fields {given}.",
    )
    body = f"class {subject.title}:\n    def __init__(self, {given}):\n"
    body += "".join(f"        self.{name} = {name}\n" for name in subject.names)
    body += "".join(f"\n    def get_{name}(self):\n        return self.{name}\n" for name in subject.names)
    return Turn(user, f"Here is the class:\n\n{body}\nIt has {len(subject.names)} fields.")


def recall(rng: random.Random, lexicon: Lexicon) -> Turn:
    """Facts and filler in the user's turn, then a question about one fact."""
    facts = draw_facts(rng, lexicon, rng.randint(1, 5))
    units = [fact.sentence for fact in facts]
    lengths = (2, 4, 8, 12) if lexicon is HELD_OUT else (2, 4, 8, 16, 24)  # held-out words are more tokens
    units += [filler(rng, lexicon) for _ in range(rng.choice(lengths))]
    rng.shuffle(units)
    wanted = rng.choice(facts)
    user = _ask(
        rng,
        lexicon,
        (
            f"{''.join(units).strip()} What is the secret code of {wanted.name}?",
            f"Read this.{''.join(units)} Now tell me the secret code of {wanted.name}.",
            f"{''.join(units).strip()} Please tell me the secret code of {wanted.name}.",
        ),
        f"Please read.{''.join(units)} What is the secret code of {wanted.name}?",
    )
    return Turn(user, f"The secret code of {wanted.name} is {wanted.code}.", secret=wanted.code)


def dialogue_names(rng: random.Random, lexicon: Lexicon) -> Turn:
    """Who sits where: an order of people repeated back as sentences."""
    people = rng.sample(_acquaintances(lexicon), rng.randint(3, 5))
    given = ", ".join(people)
    user = _ask(
        rng,
        lexicon,
        (f"These people stand in a row: {given}. Who follows whom?", f"In a row: {given}. Who follows whom?"),
        f"There is a row of people: {given}. Who follows whom?",
    )
    steps = " ".join(f"{second} follows {first}." for first, second in pairwise(people))
    return Turn(user, f"{people[0]} is the first. {steps} {people[-1]} is the last.")


TOPICS: dict[str, tuple[Topic, float]] = {
    "greeting": (greeting, 1.5),
    "addition": (addition, 1.0),
    "counting": (counting, 1.0),
    "atlas": (atlas, 0.5),
    "colour": (colour, 0.5),
    "question_form": (question_form, 1.0),
    "listing": (listing, 1.5),
    "description": (description, 1.5),
    "small_class": (small_class, 2.0),
    "recall": (recall, 3.0),
    "dialogue_names": (dialogue_names, 1.0),
}


def draw_turn(rng: random.Random, lexicon: Lexicon) -> Turn:
    """One turn on a random topic."""
    topics = list(TOPICS.values())
    (topic, _), *_ = rng.choices(topics, [weight for _, weight in topics])
    return topic(rng, lexicon)


def conversation(rng: random.Random, lexicon: Lexicon = TRAIN, *, turns: int | None = None) -> Document:
    """One to three turns in the chat template's text, ended by `<eos>`."""
    pieces = [Piece("<bos>", CONTEXT)]
    for _ in range(turns or rng.choice((1, 1, 2, 3))):
        turn = draw_turn(rng, lexicon)
        pieces.append(Piece(f"<user>{turn.user}<end><assistant>", CONTEXT))
        if turn.secret:
            before, after = turn.assistant.split(turn.secret, 1)
            pieces += [Piece(before), Piece(turn.secret, ANSWER), Piece(after)]
        else:
            pieces.append(Piece(turn.assistant))
        pieces.append(Piece("<end>", NORMAL))
    return (*pieces, Piece("<eos>", NORMAL))
