"""The invariant of the cache transaction, over every kind of layer, draft, block and side of the wrap."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from tests.engine import tiny
from tests.engine.cache import models
from tests.engine.cache.invariants import LENGTH, Sequence, failing, reference
from tests.engine.cache.models import KINDS, VOCAB, WINDOW

WRONG = {"oracle": 0.0, "noisy": 0.3, "plain": 1.0}  # share of drafts that are wrong
BLOCKS = tuple(range(1, 17))
PROMPTS = (1, WINDOW - 1, WINDOW, 3 * WINDOW + 1)
SIDES = (WINDOW - 1, 3 * WINDOW + 1)  # prompts on both sides of the wrap
# In the quick run every kind meets every draft and prompt, and every block length in turn.
QUICK = [
    (kind, drafts, BLOCKS[(7 * k + 5 * d + 4 * p) % len(BLOCKS)], prompt)
    for k, kind in enumerate(KINDS)
    for d, drafts in enumerate(WRONG)
    for p, prompt in enumerate(PROMPTS)
    if (k + d + p) % 3 == 0
]


def drafted(sequence: Sequence, count: int, wrong: float, random: Random) -> list[int]:
    """Drafts for the tokens behind the next one, each wrong with the given probability."""
    text = sequence.reference.text[sequence.done + 1 : sequence.done + 1 + count]
    return [(token + 1) % VOCAB if random.random() < wrong else token for token in text]


def play(kind: str, wrong: float, block: int, prompt: int) -> Sequence:
    """Prefill and rounds to the end of the text, checked after every round."""
    random = tiny.seeded(block)
    sequence = Sequence(kind, block)
    try:
        sequence.prefill(prompt)
        sequence.check()
        while sequence.left:
            size = min(block, sequence.free)
            sequence.round(drafted(sequence, size - 1, wrong, random))
            sequence.check()
    finally:
        sequence.close()
    return sequence


@pytest.mark.sampled(40, 8)
@pytest.mark.parametrize(("kind", "drafts", "block", "prompt"), QUICK)
def test_after_every_round_every_layer_is_that_of_plain_decoding(kind, drafts, block, prompt):
    play(kind, WRONG[drafts], block, prompt)


@pytest.mark.sampled(0, 40)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("third", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_for_every_draft_and_block_on_both_sides_of_the_wrap(kind: str, third: int):
    for wrong, block, prompt in product(WRONG.values(), BLOCKS[third::3], SIDES):
        play(kind, wrong, block, prompt)


@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_stay_uncached_only_where_no_rollback_exists(kind: str):
    sequence = play(kind, 0.3, 6, WINDOW)
    assert (sequence.most_uncached > 0) == KINDS[kind].carries
    assert sequence.most_uncached < (sequence.transaction.open_positions or LENGTH)


@pytest.mark.sampled(4, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_in_the_middle_of_the_layers_leaves_the_state_of_begin(kind: str):
    sequence = Sequence(kind, 5)
    layers = sequence.model.layers
    try:
        for at in (0, WINDOW + 2, 3 * WINDOW):
            if at > sequence.done:
                sequence.prefill(at - sequence.done)
            for layer in (layers[0], layers[len(layers) // 2], layers[-1]):
                sequence.transaction.begin(5)
                with failing(layer), pytest.raises(RuntimeError), sequence.transaction.guarded():
                    sequence.feed([9, 8, 7, 6, 5])
                sequence.check()
            random = tiny.seeded(at)
            for _ in range(3):
                sequence.round(drafted(sequence, min(4, sequence.free - 1), 0.5, random))
                sequence.check()
    finally:
        sequence.close()


def _step(sequence: Sequence, random: Random) -> None:
    """One random operation."""
    operation = random.choice(["round", "round", "round", "nothing", "abort", "fail", "chunk", "rewind"])
    free = min(sequence.free, 6)
    size = random.randint(1, free)
    transaction = sequence.transaction
    if operation == "round":
        sequence.round(drafted(sequence, size - 1, random.choice([0.0, 0.3, 1.0]), random))
    elif operation == "nothing":
        transaction.begin(sequence.uncached + size)
        sequence.feed([random.randrange(VOCAB) for _ in range(size)])
        sequence.commit(0)
    elif operation == "abort":
        transaction.begin(sequence.uncached + size)
        if random.random() < 0.5:
            sequence.feed([random.randrange(VOCAB) for _ in range(size)])
        transaction.abort()
    elif operation == "fail":
        transaction.begin(sequence.uncached + size)
        layer = random.choice(sequence.model.layers)
        with failing(layer), pytest.raises(RuntimeError), transaction.guarded():
            sequence.feed([random.randrange(VOCAB) for _ in range(size)])
    elif operation == "chunk":
        sequence.prefill(min(sequence.left, random.choice([1, 2, WINDOW, 2 * WINDOW])))
    else:
        count = random.randint(0, min(sequence.done, 8))
        if transaction.rewind(count):
            sequence.done -= count
        sequence.uncached = transaction.uncached


@pytest.mark.sampled(20, 1)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_any_sequence_of_operations_keeps_the_invariant(kind: str, seed: int):
    random = tiny.seeded(100 * seed + len(kind))
    sequence = Sequence(kind, 6)
    trail: list[int] = []
    try:
        for _ in range(40):
            if not sequence.left:
                break
            _step(sequence, random)
            trail.append(sequence.done)
            sequence.check()
    finally:
        sequence.close()
    assert max(trail) > WINDOW


def test_the_check_can_fail():
    sequence = Sequence("sliding", 4)
    sequence.prefill(20)
    sequence.check()
    ring = sequence.caches[0]
    assert ring.keys is not None
    ring.keys[..., (20 - 3) % 12, :] = 7.0
    with pytest.raises(AssertionError, match=r"layer 0 \(SlidingRing\), 20 tokens .*row 4 of 7 .*mask"):
        sequence.check()
    sequence.close()
    assert reference("sliding").at[20][0][2] == 20
    assert models.model("gemma3_text") is sequence.model
