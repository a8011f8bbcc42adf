"""The sliding ring against an unbounded reference, across the wrap."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import RotatingKVCache

from engine.cache.ring import SlidingRing

A_ROW = 2 * 2 * 3 * 4  # keys and values, two heads of three float32


def rows(start: int, count: int) -> tuple[mx.array, mx.array]:
    """Keys that carry their position, and values that carry its negative."""
    keys = mx.arange(start, start + count, dtype=mx.float32).reshape(1, 1, count, 1)
    keys = mx.broadcast_to(keys, (1, 2, count, 3))
    return keys, -keys


def positions(keys: mx.array) -> list[int]:
    return [int(value) for value in keys[0, 0, :, 0].tolist()]


def visible(mask: mx.array | str | None, new: int, width: int) -> np.ndarray:
    """A mask in any of mlx's forms as booleans [new, width]."""
    if mask is None:
        return np.ones((new, width), bool)
    if isinstance(mask, str):
        assert mask == "causal"
        return np.array(create_causal_mask(new, width - new))
    return np.array(mask)


def check_step(ring: SlidingRing, new: int, narrow: int | None = None) -> None:
    """One update shows every query exactly what an unbounded cache would, wherever the rows lie."""
    before = ring.offset
    mask = ring.make_mask(new, window_size=narrow)
    keys, values = ring.update_and_fetch(*rows(before, new))
    assert mx.array_equal(values, -keys).item()
    shown = positions(keys)
    seen = visible(mask, new, len(shown))
    window = min(narrow or ring.window, ring.window)
    for query in range(new):
        at = before + query
        expected = {p for p in range(at + 1) if p > at - window or p < ring.sink}
        found = [p for p, see in zip(shown, seen[query], strict=True) if see]
        assert sorted(found) == sorted(expected)


@given(
    window=st.integers(1, 9),
    headroom=st.integers(1, 6),
    sink=st.integers(0, 4),
    prompt=st.integers(0, 30),
    rounds=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(0, 12)), max_size=14),
)
def test_any_sequence_of_rounds_shows_what_an_unbounded_cache_would(window, headroom, sink, prompt, rounds):
    ring = SlidingRing(window, headroom, sink)
    if prompt:
        check_step(ring, prompt)
    for asked, confirmed, surplus in rounds:
        block = min(asked, headroom)
        kept = min(confirmed, block)
        start = ring.offset
        ring.begin(block)
        check_step(ring, block)
        ring.commit(block - kept)
        assert ring.offset == start + kept
        assert ring.size() == min(ring.offset, window + sink)
        assert ring.nbytes <= (sink + window + headroom) * A_ROW
        if surplus and ring.rewindable(surplus):
            ring.rewind(surplus)
            assert ring.offset == start + kept - surplus
    check_step(ring, 1)


@pytest.mark.parametrize("kept", range(6))
@pytest.mark.parametrize("before", [0, 1, 7, 8, 9, 16, 40])
@pytest.mark.parametrize("sink", [0, 3])
def test_a_rollback_is_exact_on_both_sides_of_the_wrap(sink: int, before: int, kept: int):
    block, window = 5, 8
    rolled, straight = SlidingRing(window, block, sink), SlidingRing(window, block, sink)
    for ring in (rolled, straight):
        for at in range(before):
            ring.update_and_fetch(*rows(at, 1))
    rolled.begin(block)
    rolled.update_and_fetch(*rows(before, block))
    rolled.commit(block - min(kept, block))
    if kept:
        straight.update_and_fetch(*rows(before, min(kept, block)))
    for ours, theirs in zip(rolled.keys_and_values(), straight.keys_and_values(), strict=True):
        assert (ours is None) == (theirs is None) or not (before or kept)
        if ours is not None and theirs is not None:
            assert mx.array_equal(ours, theirs).item()


def test_abort_restores_the_state_of_begin_however_much_has_arrived():
    ring = SlidingRing(8, 4)
    ring.update_and_fetch(*rows(0, 30))
    before = positions(ring.keys_and_values()[0])
    ring.begin(4)
    ring.abort()
    ring.begin(4)
    ring.update_and_fetch(*rows(30, 3))
    ring.abort()
    assert ring.offset == 30
    assert positions(ring.keys_and_values()[0]) == before


@pytest.mark.parametrize("prompt", [1, 8, 8 * 8])
def test_memory_stays_at_window_plus_headroom(prompt: int):
    ring, window, headroom = SlidingRing(8, 4), 8, 4
    ring.update_and_fetch(*rows(0, prompt))
    sizes = [ring.nbytes]
    for _ in range(4 * window):
        ring.begin(4)
        ring.update_and_fetch(*rows(ring.offset, 4))
        ring.commit(2)
        sizes.append(ring.nbytes)
    assert max(sizes) == (window + headroom) * A_ROW
    assert all(later >= earlier for earlier, later in pairwise(sizes))


def test_a_full_ring_is_written_in_place_and_never_moves():
    ring = SlidingRing(8, 4)
    check_step(ring, 30)
    buffer = ring.keys
    for _ in range(20):
        check_step(ring, 4)
    assert ring.keys is buffer


def test_what_can_be_rewound_is_what_no_block_has_overwritten():
    ring = SlidingRing(8, 4)
    check_step(ring, 40)
    assert ring.rewindable(5)  # the rows of all 12 newest positions are there, the query of 35 sees 28 … 35
    assert not ring.rewindable(6)
    ring.rewind(5)
    assert positions(ring.keys_and_values()[0]) == list(range(28, 35))
    assert not ring.rewindable(1)
    check_step(ring, 3)
    short = SlidingRing(8, 4)
    check_step(short, 9)
    assert all(short.rewindable(count) for count in range(10))
    assert not short.rewindable(10)


def test_a_ring_refuses_what_it_cannot_take_back():
    ring = SlidingRing(8, 4)
    with pytest.raises(ValueError, match="headroom"):
        ring.begin(5)
    ring.begin(2)
    with pytest.raises(ValueError, match="already open"):
        ring.begin(1)
    with pytest.raises(ValueError, match="cannot drop"):
        ring.commit(1)
    ring.abort()
    ring.update_and_fetch(*rows(0, 30))
    ring.begin(4)
    ring.update_and_fetch(*rows(30, 4))
    with pytest.raises(ValueError, match="more rows than the transaction was opened for"):
        ring.update_and_fetch(*rows(34, 4))


@pytest.mark.parametrize("before", [0, 2, 9, 20])
@pytest.mark.parametrize("new", [1, 2, 7, 30])
@pytest.mark.parametrize("sink", [0, 2])
def test_a_narrower_mask_can_be_asked_for(sink: int, new: int, before: int):
    ring = SlidingRing(8, 4, sink)
    if before:
        check_step(ring, before)
    check_step(ring, new, narrow=3)


def test_a_mask_is_an_array_where_one_is_asked_for():
    ring = SlidingRing(8, 4)
    assert ring.make_mask(3) == "causal"
    assert visible(ring.make_mask(3, return_array=True), 3, 3).tolist() == visible("causal", 3, 3).tolist()
    assert ring.make_mask(1, return_array=True) is None


@pytest.mark.parametrize("prompt", [1, 5, 11, 20])
@pytest.mark.parametrize("sink", [0, 3])
def test_one_token_at_a_time_it_holds_what_mlx_lms_rotating_cache_holds(sink: int, prompt: int):
    ring, rotating = SlidingRing(8, 4, sink), RotatingKVCache(8 + sink, sink)
    for cache in (ring, rotating):
        cache.update_and_fetch(*rows(0, prompt))
    for at in range(prompt, 40):
        mask = ring.make_mask(1)
        ours = positions(ring.update_and_fetch(*rows(at, 1))[0])
        seen = visible(mask, 1, len(ours))[0]
        theirs = positions(rotating.update_and_fetch(*rows(at, 1))[0])
        assert sorted(p for p, see in zip(ours, seen, strict=True) if see) == sorted(theirs)


def test_inside_a_block_every_query_sees_the_pinned_entries_which_mlx_lms_rotating_cache_hides():
    ring, rotating = SlidingRing(8, 4, 3), RotatingKVCache(11, 3)
    for cache in (ring, rotating):
        for at in range(20):
            cache.update_and_fetch(*rows(at, 1))
    pinned = {}
    for name, cache in (("ring", ring), ("rotating", rotating)):
        mask = cache.make_mask(4, window_size=11)
        shown = positions(cache.update_and_fetch(*rows(20, 4))[0])
        seen = visible(mask, 4, len(shown))
        pinned[name] = [sum(p < 3 and bool(see) for p, see in zip(shown, row, strict=True)) for row in seen]
    assert pinned == {"ring": [3, 3, 3, 3], "rotating": [3, 2, 1, 0]}


@pytest.mark.parametrize("sink", [0, 3])
def test_the_state_round_trips(sink: int):
    ring = SlidingRing(8, 4, sink)
    check_step(ring, 20)
    copy = SlidingRing.from_state(ring.state)
    assert positions(copy.keys_and_values()[0]) == positions(ring.keys_and_values()[0])
    assert [copy.rewindable(count) for count in range(9)] == [ring.rewindable(count) for count in range(9)]
    check_step(copy, 3)


def test_a_ring_needs_a_window_and_headroom():
    for wrong in [(0, 4, 0), (8, 0, 0), (8, 4, -1)]:
        with pytest.raises(ValueError, match="must be positive"):
            SlidingRing(*wrong)


@pytest.mark.parametrize("sink", [0, 3])
@given(cuts=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=12))
@settings(max_examples=20)
def test_trimming_without_a_transaction_takes_back_as_much_as_a_block_may_add(sink, cuts):
    ring = SlidingRing(8, 4, sink)
    check_step(ring, 7)
    for new, dropped in cuts:
        check_step(ring, new)
        assert ring.is_trimmable()
        assert ring.trim(min(dropped, new)) == min(dropped, new)
    check_step(ring, 1)


def test_trimming_refuses_what_is_gone_and_leaves_transactions_alone():
    ring = SlidingRing(8, 4)
    assert ring.trim(3) == 0
    check_step(ring, 40)
    with pytest.raises(ValueError, match="cannot trim 6 of 40 positions: the ring takes back 4"):
        ring.trim(6)
    ring.begin(2)
    assert not ring.is_trimmable()
    with pytest.raises(ValueError, match="cannot trim"):
        ring.trim(1)
    ring.abort()
    assert ring.trim(1) == 1


@given(
    window=st.integers(2, 9),
    headroom=st.integers(1, 6),
    keep=st.integers(0, 3),
    updates=st.lists(st.one_of(st.just(1), st.integers(1, 8), st.integers(1, 30)), min_size=1, max_size=12),
)
def test_keys_and_values_are_the_rows_of_mlx_lms_rotating_cache(window, headroom, keep, updates):
    ring, rotating = SlidingRing(window, headroom, keep), RotatingKVCache(window + keep, keep)
    for count in updates:
        given = rows(ring.offset, count)
        for member in (ring, rotating):
            member.update_and_fetch(*given)
        theirs = rotating.keys_and_values()
        order = mx.argsort(theirs[0][0, 0, :, 0])  # theirs turn; ours stay in the order of positions
        for mine, their in zip(ring.keys_and_values(), theirs, strict=True):
            assert mx.array_equal(mine, their[:, :, order]).item()
        assert ring.size() == rotating.size()


def test_a_block_that_is_taken_back_leaves_the_rows_of_before():
    ring = SlidingRing(8, 4)
    for count in (6, 1, 3, 1):
        ring.update_and_fetch(*rows(ring.offset, count))
    before = positions(ring.keys_and_values()[0])
    assert before == list(range(3, 11))
    ring.begin(4)
    ring.update_and_fetch(*rows(11, 4))
    ring.commit(4)
    assert positions(ring.keys_and_values()[0]) == before
    ring.begin(4)
    ring.update_and_fetch(*rows(11, 4))
    ring.commit(2)
    assert positions(ring.keys_and_values()[0]) == list(range(4, 13))


def test_a_long_chunk_is_let_go_of_when_its_forward_is_laid_out():
    ring = SlidingRing(8, 4)
    ring.update_and_fetch(*rows(0, 30))
    assert positions(ring.keys_and_values()[0]) == list(range(30))
    ring.release()
    assert positions(ring.keys_and_values()[0]) == list(range(18, 30))
    check_step(ring, 3)
