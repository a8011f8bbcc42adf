"""Sequences decoded together keep, each its own number of positions, what each would hold alone."""

from __future__ import annotations

from contextlib import closing
from random import Random

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, QuantizedKVCache

from engine.cache.batch import RAGGED_FAMILIES, BatchTransaction, RaggedKV, extract, merge
from engine.cache.ring import SlidingRing
from engine.cache.transaction import Transaction, new_caches
from engine.errors import ModelError
from tests.engine import tiny
from tests.engine.cache import models
from tests.engine.cache.invariants import Sequence, failing

KINDS = [
    "plain",
    "sliding",
    "sliding-llama",
    "sink",
    "attention-sinks",
    "sliding-full",
    "sink-full",
    "shared",
    "gated-delta",
    "gated-delta-moe",
    "recurrent",
    "short-conv",
    "delta-attention",
    "list",
]
BLOCK = 6
PROMPTS = (1, models.WINDOW, 3 * models.WINDOW + 1, 5)


class Batch:
    """Sequences of one kind's text at different places, moved together and checked one by one."""

    def __init__(self, kind: str, prompts: tuple[int, ...] = PROMPTS) -> None:
        self.kind, self.alone = kind, [Sequence(kind, BLOCK) for _ in prompts]
        for sequence, prompt in zip(self.alone, prompts, strict=True):
            sequence.prefill(prompt)
        self.model, self.text = self.alone[0].model, self.alone[0].reference.text
        caches = merge(self.model, [sequence.caches for sequence in self.alone])
        self.transaction = BatchTransaction(self.model, caches)
        self.done = list(prompts)

    def feed(self, blocks: list[list[int]]) -> np.ndarray:
        logits = self.model(mx.array(blocks), cache=self.transaction.caches)
        mx.eval(logits)
        return np.array(logits)

    def round(self, count: int, kept: list[int]) -> None:
        """Blocks whose first ``kept[s]`` tokens are right."""
        blocks = [
            [
                token if i < keep else (token + 1) % models.VOCAB
                for i, token in enumerate(self._next(at, count))
            ]
            for at, keep in zip(self.done, kept, strict=True)
        ]
        self.transaction.begin(count)
        logits = self.feed(blocks)
        self.transaction.commit(kept)
        reference = self.alone[0].reference
        for row, (at, keep) in enumerate(zip(self.done, kept, strict=True)):
            for index in range(keep):
                error = np.abs(logits[row, index] - reference.logits[at + index]).max()
                assert error < reference.kind.logits, f"sequence {row}, position {at + index}: {error:.2g}"
            self.done[row] = at + keep

    def _next(self, at: int, count: int) -> list[int]:
        return (self.text[at:] + [7] * count)[:count]

    def check(self) -> None:
        """Every sequence alone holds what plain decoding of it holds."""
        for row, done in enumerate(self.done):
            sequence = self.alone[row]
            sequence.caches, sequence.done = extract(self.transaction.caches, row), done
            try:
                sequence.check()
            except AssertionError as wrong:
                raise AssertionError(f"sequence {row} of the batch: {wrong}") from wrong

    def close(self) -> None:
        self.transaction.close()
        for sequence in self.alone:
            sequence.close()


@pytest.mark.sampled(3, 2)
@pytest.mark.parametrize("kind", KINDS)
def test_after_every_round_each_sequence_holds_what_it_would_alone(kind: str):
    random = tiny.seeded(len(kind))
    with closing(Batch(kind)) as batch:
        batch.check()
        for _ in range(8):
            count = random.randint(1, BLOCK)
            kept = [random.randint(0, min(count, 63 - at)) for at in batch.done]
            batch.round(count, kept)
            batch.check()


@pytest.mark.sampled(5, 1)
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_or_an_abort_leaves_the_state_of_begin(kind: str):
    with closing(Batch(kind)) as batch:
        layers = batch.model.layers
        for layer in (layers[0], layers[len(layers) // 2], layers[-1]):
            batch.transaction.begin(3)
            with failing(layer), pytest.raises(RuntimeError), batch.transaction.guarded():
                batch.feed([[9, 8, 7]] * len(PROMPTS))
            batch.check()
        batch.transaction.begin(3)
        batch.feed([[9, 8, 7]] * len(PROMPTS))
        batch.transaction.abort()
        batch.transaction.abort()
        batch.check()
        batch.round(4, [4, 0, 2, 1])
        batch.check()


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("kind", KINDS)
def test_finished_sequences_leave_and_the_others_go_on(kind: str):
    with closing(Batch(kind)) as batch:
        batch.round(4, [3, 4, 0, 1])
        batch.transaction.filter([2, 0])
        batch.done = [batch.done[2], batch.done[0]]
        batch.check()
        batch.round(5, [2, 5])
        batch.check()


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("kind", ["plain", "sliding", "sink", "gated-delta"])
def test_a_sequence_that_has_left_goes_on_alone(kind: str):
    batch = Batch(kind)
    batch.round(6, [1, 6, 3, 2])
    batch.check()
    batch.transaction.close()
    for sequence in batch.alone:
        sequence.transaction.close()
        sequence.transaction = Transaction(sequence.model, sequence.caches)
        for _ in range(3):
            sequence.round([7, 7])
            sequence.check()
        sequence.close()


@pytest.mark.parametrize("kind", ["gated-delta", "recurrent", "list"])
def test_a_single_position_is_kept_by_some_and_dropped_by_others(kind: str):
    batch = Batch(kind)
    batch.round(1, [1, 0, 0, 1])
    batch.check()
    batch.round(1, [0, 0, 0, 0])
    batch.check()
    batch.close()


def test_merged_caches_are_copies():
    batch = Batch("sliding")
    before = [np.array(cache.keys) for cache in batch.alone[1].caches]
    batch.round(4, [4, 4, 4, 4])
    for cache, keys in zip(batch.alone[1].caches, before, strict=True):
        assert np.array_equal(np.array(cache.keys), keys)
    batch.close()


def test_plain_buffers_grow_and_sliding_ones_stay_at_window_plus_headroom():
    plain, sliding = KVCache(), SlidingRing(8, BLOCK)
    rows = mx.random.normal((1, 2, 250, 4))
    for cache in (plain, sliding):
        cache.update_and_fetch(rows, -rows)
    grown, ring = RaggedKV.merge([plain, plain]), RaggedKV.merge([sliding, sliding])
    new = mx.random.normal((2, 2, BLOCK, 4))
    for _ in range(3):
        for cache in (grown, ring):
            cache.make_mask(BLOCK)
            cache.update_and_fetch(new, -new)
    assert grown.nbytes == 2 * 2 * 2 * 512 * 4 * 4
    assert ring.nbytes == 2 * 2 * 2 * (8 + BLOCK) * 4 * 4
    assert (grown.size(), ring.size()) == (250 + 3 * BLOCK, 8)
    assert np.array_equal(np.array(grown.extract(1).keys[:, :, :250]), np.array(rows))


def test_what_cannot_be_decoded_together_is_refused_by_name(gemma):
    with pytest.raises(ModelError, match="ConcatenateKVCache, QuantizedKVCache"):
        merge(gemma, [[ConcatenateKVCache(), QuantizedKVCache()]])
    model = models.model("rwkv7")
    with pytest.raises(ModelError, match="rwkv7"):
        merge(model, [new_caches(model, 4)])
    with pytest.raises(ValueError, match="after its prompt"):
        merge(gemma, [new_caches(gemma, 4)])
    with pytest.raises(ValueError, match="after its prompt"):
        merge(models.model("mamba2"), [new_caches(models.model("mamba2"), 4)])
    one, other = SlidingRing(8, 4), SlidingRing(8, 5)
    for ring in (one, other):
        ring.update_and_fetch(mx.zeros((1, 1, 3, 2)), mx.zeros((1, 1, 3, 2)))
    with pytest.raises(ValueError, match="same window"):
        merge(gemma, [[one], [other]])


def test_every_family_said_to_be_batched_is_tested():
    tested = {models.KINDS[kind].family for kind in KINDS}
    assert {family for family in RAGGED_FAMILIES if family != "qwen3_5_moe"} <= tested


def test_calls_out_of_turn_are_errors():
    batch = Batch("sliding")
    transaction = batch.transaction
    assert transaction.open_positions == BLOCK
    with pytest.raises(ValueError, match="headroom of 6"):
        transaction.begin(7)
    transaction.begin(2)
    with pytest.raises(ValueError, match="already open"):
        transaction.begin(2)
    with pytest.raises(ValueError, match="is open"):
        transaction.filter([0])
    batch.feed([[9, 8]] * 4)
    with pytest.raises(ValueError, match="cannot keep"):
        transaction.commit([0, 1, 2, 3])
    with pytest.raises(ValueError, match="3 counts for 4 sequences"):
        transaction.commit([0, 1, 2])
    transaction.commit([0, 1, 2, 0])
    batch.done = [at + kept for at, kept in zip(batch.done, [0, 0, 0, 0], strict=True)]
    batch.close()


def test_random_rounds_of_a_batch_of_one_equal_a_single_sequence():
    random = Random(5)  # noqa: S311 - nothing here is a secret
    batch = Batch("gated-delta-moe", (9,))
    for _ in range(10):
        count = random.randint(1, BLOCK)
        batch.round(count, [random.randint(0, min(count, 63 - batch.done[0]))])
        batch.check()
    batch.close()
