"""The corpora are reproducible, ask every question once and keep the held-out words out."""

import re
from collections.abc import Iterator

import numpy as np
import pytest

from engine.haystack_text import (
    HELD_OUT,
    NAME_HEADS,
    NAME_TAILS,
    TRAIN,
    generator,
    is_held_out_pseudo_name,
)
from tools.demo_models.corpora import batches, chat, code, retrieval
from tools.demo_models.corpora.document import ANSWER, Document, text_of
from tools.demo_models.tokenizer import DemoTokenizer

QUESTION = re.compile(r"Question: what is the secret code of (\w+)\? Answer: (\d{4})\.")
FACT = re.compile(r"The secret code of (\w+) is (\d{4})\.")


def training_documents(tokenizer: DemoTokenizer, count: int) -> Iterator[Document]:
    rng = generator(11)
    for _ in range(count):
        yield batches.program_document(rng)
        yield retrieval.document(rng, TRAIN, tokenizer.count, length=300, facts=6)
        yield chat.conversation(rng)


def test_the_same_seed_and_step_give_the_same_batch(demo_tokenizer: DemoTokenizer) -> None:
    def draw(seed: int, step: int) -> tuple[batches.Tokens, batches.Weights]:
        return batches.batch(demo_tokenizer, batches.Mixture(), seed=seed, step=step, rows=6, length=128)

    for ours, again in zip(draw(1, 5), draw(1, 5), strict=True):
        np.testing.assert_array_equal(ours, again)
    assert not np.array_equal(draw(1, 5)[0], draw(1, 6)[0])
    assert not np.array_equal(draw(1, 5)[0], draw(2, 5)[0])


def test_rows_hold_answers_with_their_weight(demo_tokenizer: DemoTokenizer) -> None:
    tokens, weights = batches.batch(
        demo_tokenizer, batches.Mixture(retrieval=1.0, code=0.0), seed=0, step=0, rows=4, length=256
    )
    assert tokens.shape == (4, 257)
    digits = {demo_tokenizer.encode(str(digit))[0] for digit in range(10)}
    weighty = tokens[:, 1:][weights == ANSWER]
    assert len(weighty) >= 16
    assert set(weighty.tolist()) <= digits


@pytest.mark.parametrize("length", [64, 200, 512])
def test_every_fact_is_asked_exactly_once_and_answered_rightly(
    demo_tokenizer: DemoTokenizer, length: int
) -> None:
    rng = generator(length)
    for _ in range(25):
        document = retrieval.document(
            rng, TRAIN, demo_tokenizer.count, length=length, facts=1 + rng.randrange(12)
        )
        text = text_of(document)
        facts, asked = FACT.findall(text), QUESTION.findall(text)
        assert len(facts) >= 1
        assert len({name for name, _ in facts}) == len(facts)
        assert sorted(facts) == sorted(asked)
        start = facts.index(asked[0])  # questions follow the facts, cyclically
        assert asked == facts[start:] + facts[:start]
        assert demo_tokenizer.count(text) <= length


def test_pieces_tokenise_as_the_whole_text_does(demo_tokenizer: DemoTokenizer) -> None:
    for document in training_documents(demo_tokenizer, 20):
        pieces, weights = batches.encode(demo_tokenizer, document)
        assert tuple(pieces) == demo_tokenizer.encode(text_of(document))
        assert len(weights) == len(pieces)


def test_training_text_holds_no_held_out_words(demo_tokenizer: DemoTokenizer) -> None:
    kept = set(HELD_OUT.fields + HELD_OUT.nouns + HELD_OUT.prefixes + HELD_OUT.adjectives)
    names = set(HELD_OUT.names)
    for document in training_documents(demo_tokenizer, 150):
        text = text_of(document)
        assert not kept & set(re.findall(r"[a-z_]+|[A-Z][a-z]+", text))
        assert not names & {name for name, _ in FACT.findall(text)}


def test_the_two_lexicons_share_nothing() -> None:
    for part in ("names", "fields", "nouns", "prefixes", "adjectives"):
        assert not set(getattr(TRAIN, part)) & set(getattr(HELD_OUT, part))
    assert not set(code.TRAINING_TEMPLATES) & set(code.HELD_OUT_TEMPLATES)
    held = [is_held_out_pseudo_name(head, tail) for head in NAME_HEADS for tail in NAME_TAILS]
    assert 0 < sum(held) < len(held) / 3


HELD_OUT_PHRASINGS = re.compile(
    r"Hello! My name is|How much is \w+ and|Can you count|Please name the|Make this a question|Put this into"
    r"|Make a numbered list|Please describe|Please write a class|Please read\.|There is a row of people"
)


def test_held_out_phrasings_and_filler_never_occur_in_training() -> None:
    rng = generator(2)
    for topic, _ in chat.TOPICS.values():
        for _ in range(20):
            assert HELD_OUT_PHRASINGS.match(topic(rng, HELD_OUT).user)
        for _ in range(200):
            assert not HELD_OUT_PHRASINGS.match(topic(rng, TRAIN).user)
    held = re.compile(r" Behind the| Nobody moved| The \w+, the")
    assert all(held.match(retrieval.filler(rng, HELD_OUT)) for _ in range(50))
    assert not any(held.match(retrieval.filler(rng, TRAIN)) for _ in range(300))


def test_a_needle_prompt_has_the_length_the_needle_and_the_depth_asked_for(
    demo_tokenizer: DemoTokenizer,
) -> None:
    for depth in (0.0, 0.5, 0.99):
        made = retrieval.needle(generator(4), demo_tokenizer.count, length=400, depth=depth)
        assert 370 <= demo_tokenizer.count(made.prompt) <= 400
        assert made.prompt.count(made.fact.sentence) == 1
        assert made.prompt.endswith(made.fact.question)
        assert abs(made.prompt.index(made.fact.sentence) / len(made.prompt) - depth) < 0.15
        assert len(FACT.findall(made.prompt)) == 5


@pytest.mark.parametrize("name", list(code.TRAINING_TEMPLATES | code.HELD_OUT_TEMPLATES))
def test_programs_are_valid_python_of_some_length(name: str, demo_tokenizer: DemoTokenizer) -> None:
    template = (code.TRAINING_TEMPLATES | code.HELD_OUT_TEMPLATES)[name]
    for seed in range(5):
        text = code.program(generator(seed), TRAIN, template)
        compile(text, name, "exec")
        assert 100 <= demo_tokenizer.count(text) <= 900
