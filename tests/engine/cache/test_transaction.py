"""begin, commit, abort and rewind over all layers: order of calls, counts, memory, and their own cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import process_time

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
)

from engine.cache.ring import SlidingRing
from engine.cache.stats import held
from engine.cache.transaction import Transaction, new_caches, resident
from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.target.model import Target
from tests.engine import tiny
from tests.engine.cache import models
from tests.engine.cache.invariants import Sequence


@contextmanager
def opened(model, caches) -> Iterator[Transaction]:
    transaction = Transaction(model, caches)
    try:
        yield transaction
    finally:
        transaction.close()


def forward(model, caches, tokens: list[int]) -> None:
    mx.eval(model(mx.array([tokens]), cache=caches))


@pytest.mark.sampled(8, 1)
@pytest.mark.parametrize(("prompt_length", "wrong"), [(5, 0.3), (25, 1.0)])
def test_decoding_leaves_the_caches_of_the_tokens_it_gave(gemma, prompt_length: int, wrong: float):
    random = tiny.seeded(prompt_length)
    prompt = [random.randrange(5, tiny.VOCAB) for _ in range(prompt_length)]
    truth = tiny.plain_tokens(gemma, prompt, 30)
    caches, drafter = new_caches(gemma, 5), tiny.ScriptedDrafter(prompt + truth, wrong)
    steps = list(
        decode(Target(gemma), drafter, prompt, max_tokens=30, draft_length=FixedDraftLength(5), caches=caches)
    )
    assert [token for step in steps for token in step.tokens] == truth
    fresh = new_caches(gemma, 5)
    for token in (prompt + truth)[:-1]:
        forward(gemma, fresh, [token])
    for ours, plain in zip(caches, fresh, strict=True):
        assert ours.offset == plain.offset
        rows, expected = held(ours), held(plain)
        assert rows.positions == expected.positions
        for a, b in ((rows.keys, expected.keys), (rows.values, expected.values)):
            assert mx.abs(a - b).max().item() < 2e-4


def test_commit_and_begin_out_of_turn_are_errors(gemma):
    with opened(gemma, [KVCache()]) as transaction:
        with pytest.raises(ValueError, match="cannot keep"):
            transaction.commit(0)
        transaction.begin(2)
        with pytest.raises(ValueError, match="already open"):
            transaction.begin(2)
        with pytest.raises(ValueError, match="cannot keep 3"):
            transaction.commit(3)
        with pytest.raises(ValueError, match="is open"):
            transaction.rewind(0)
        transaction.abort()
        transaction.abort()
        assert transaction.rewind(0)


def test_a_block_beyond_the_headroom_opens_nothing_in_any_layer(gemma):
    caches = new_caches(gemma, 4)
    with opened(gemma, caches) as transaction:
        assert transaction.open_positions == 4
        forward(gemma, caches, [5, 6, 7])
        with pytest.raises(ValueError, match="headroom of 4"):
            transaction.begin(5)
        transaction.begin(4)
        forward(gemma, caches, [8, 9, 10, 11])
        transaction.commit(1)
        assert {cache.offset for cache in caches} == {4}


def test_a_rewind_forgets_positions_in_every_layer_or_in_none(gemma):
    caches = new_caches(gemma, 4)
    with opened(gemma, caches) as transaction:
        forward(gemma, caches, list(range(5, 35)))
        assert transaction.rewind(5)
        assert {cache.offset for cache in caches} == {25}
        assert not transaction.rewind(2)  # the rings no longer hold what position 23 sees
        assert {cache.offset for cache in caches} == {25}


def test_a_recurrent_layer_cannot_be_rewound():
    model = models.model("qwen3_5")
    caches = new_caches(model, 4)
    with opened(model, caches) as transaction:
        forward(model, caches, [5, 6, 7])
        assert transaction.rewind(0)
        assert not transaction.rewind(1)
        assert caches[1].offset == 3


def test_uncached_tokens_are_rewound_first_and_counted_by_begin_and_commit(gemma):
    caches = [ConcatenateKVCache() for _ in gemma.layers]
    with opened(gemma, caches) as transaction:
        assert transaction.open_positions is None
        forward(gemma, caches, [5, 6, 7])
        transaction.begin(4)
        forward(gemma, caches, [8, 9, 10, 11])
        transaction.commit(2)
        assert (transaction.uncached, caches[0].offset) == (2, 3)
        with pytest.raises(ValueError, match="2 positions do not suffice for 2 uncached"):
            transaction.begin(2)
        transaction.begin(3)
        with pytest.raises(ValueError, match="2 are uncached"):
            transaction.commit(1)
        transaction.abort()
        assert transaction.rewind(1)
        assert (transaction.uncached, caches[0].offset) == (1, 3)
        assert not transaction.rewind(2)
        assert transaction.uncached == 1
        transaction.begin(2)
        forward(gemma, caches, [8, 12])
        transaction.commit(2)
        assert (transaction.uncached, caches[0].offset) == (0, 5)


def test_what_stands_in_a_list_is_taken_back_member_by_member(gemma):
    pair = CacheList(KVCache(), KVCache())
    with opened(gemma, [pair]) as transaction:
        transaction.begin(3)
        for member in pair.caches:
            member.update_and_fetch(mx.zeros((1, 1, 3, 2)), mx.zeros((1, 1, 3, 2)))
        transaction.commit(1)
        assert [member.offset for member in pair.caches] == [1, 1]
        assert transaction.uncached == 0


def test_unexplained_state_is_put_back_and_uncached(gemma):
    state = ArraysCache(1)
    state[0] = mx.zeros((1, 2))
    with opened(gemma, [state]) as transaction:
        transaction.begin(3)
        state[0] = mx.ones((1, 2))  # no module of the model was called with this cache
        transaction.commit(2)
        assert transaction.uncached == 2
        assert state[0].tolist() == [[0, 0]]


def test_a_snapshot_is_not_changed_by_writing_into_the_cache(gemma):
    state = ArraysCache(1)
    state[0] = mx.zeros((1, 2))
    with opened(gemma, [state]) as transaction:
        for _ in range(2):
            transaction.begin(3)
            state[0][0, 1] = 5.0
            transaction.abort()
            assert state[0].tolist() == [[0, 0]]


def test_rotating_caches_become_rings_also_in_lists_and_with_pinned_entries(gemma):
    classes, nbytes = resident(new_caches(gemma, 4))
    assert classes == {"KVCache": 2, "SlidingRing": 4}
    assert nbytes == 0

    class Mixed:
        @staticmethod
        def make_cache():
            return [RotatingKVCache(8, keep=3), CacheList(ArraysCache(2), RotatingKVCache(8))]

    pinned, pair = new_caches(Mixed(), 4)
    assert (pinned.window, pinned.headroom, pinned.sink) == (5, 4, 3)
    assert [type(member) for member in pair.caches] == [ArraysCache, SlidingRing]
    assert pair.caches[1].window == 8


def test_resident_bytes_are_what_the_caches_hold_and_sliding_layers_stay_at_window_plus_headroom(gemma):
    a_row = 2 * 2 * 8 * 4  # keys and values, two heads of eight float32
    caches = new_caches(gemma, 4)
    rings = [cache for cache in caches if isinstance(cache, SlidingRing)]
    with opened(gemma, caches) as transaction:
        forward(gemma, caches, [7 + at for at in range(8 * tiny.WINDOW)])
        for token in range(12):
            transaction.begin(4)
            forward(gemma, caches, [token, 8, 9, 10])
            transaction.commit(1 + token % 4)
            assert [ring.nbytes for ring in rings] == [(tiny.WINDOW + 4) * a_row] * 4
    assert resident(caches)[1] == 4 * (tiny.WINDOW + 4) * a_row + 2 * 256 * a_row


def _seconds(work, rounds: int = 200) -> float:
    """Median of the processor times of one call."""
    times = []
    for _ in range(rounds):
        started = process_time()
        work()
        times.append(process_time() - started)
    return sorted(times)[rounds // 2]


def test_begin_and_commit_cost_little_beside_a_forward_with_sixty_layers(gemma):
    caches = [KVCache() if i % 6 == 5 else SlidingRing(8, 4) for i in range(60)]
    rows = mx.zeros((1, 1, 4, 2))
    for cache in caches:
        cache.update_and_fetch(rows, rows)
    with opened(gemma, caches) as transaction:

        def turn() -> None:
            transaction.begin(4)
            for cache in caches:
                cache.offset += 4
            transaction.commit(2)
            transaction.rewind(2)

        assert _seconds(turn) < 1e-3


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("kind", ["sliding", "gated-delta", "carry"])
def test_no_step_of_a_transaction_waits_for_the_device(kind: str, monkeypatch: pytest.MonkeyPatch):
    sequence = Sequence(kind, 4)
    sequence.prefill(12)

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a host synchronisation inside a transaction")

    for name in ("eval", "async_eval", "synchronize"):
        monkeypatch.setattr(mx, name, forbidden)
    for name in ("item", "tolist"):
        monkeypatch.setattr(mx.array, name, forbidden)
    transaction, text = sequence.transaction, mx.array([[9, 8, 7]])
    transaction.begin(3)
    sequence.model(text, cache=sequence.caches)
    transaction.commit(2)
    transaction.begin(transaction.uncached + 1)
    transaction.abort()
    sequence.close()
