"""What a compiled forward is told of a cache: where its rows go, and what they see, against brute force."""

from __future__ import annotations

from copy import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from engine.cache.ring import STEP, SlidingRing, WindowedKV
from engine.cache.stats import held
from engine.cache.traced import STAND_INS, appended, entry, layout, reserve, traceable
from tests.engine import tiny

HEADS, WIDTH = 2, 4
RINGS = [(8, 16, 0), (8, 5, 3), (1, 1, 0), (3, 7, 1), (16, 4, 20)]  # window, headroom, sink


def rows_of(start: int, count: int) -> mx.array:
    """Rows [1, heads, count, width] that tell their position."""
    positions = mx.arange(start, start + count, dtype=mx.float32)[None, None, :, None]
    return mx.broadcast_to(positions, (1, HEADS, count, WIDTH))


def write(cache: Any, count: int, size: int) -> tuple[np.ndarray, np.ndarray, int]:
    """What a compiled forward of ``count`` tokens, filled up to ``size``, does to a cache.

    Returns:
        The positions in the buffer's rows, the mask, and the offset it was told.
    """
    assert reserve(cache, size)
    told = entry(cache, size)
    stand_in = STAND_INS[type(cache)](mx.array(cache.keys), mx.array(cache.values), told)
    keys, values = stand_in.update_and_fetch(rows_of(cache.offset, size), -rows_of(cache.offset, size))
    mask = np.array(stand_in.make_mask(size))
    offset = stand_in.offset.item()
    cache.keys, cache.values = stand_in.keys, stand_in.values
    appended(cache, count, size)
    assert np.array_equal(np.array(keys), -np.array(values))
    return np.array(keys)[0, 0, :, 0], mask, offset


def seen_by(cache: Any, query: int) -> list[int]:
    """Positions a query may see."""
    if type(cache) is KVCache:
        return list(range(query + 1))
    return [p for p in range(query + 1) if p > query - cache.window or p < cache.sink]


def play(cache: Any, seed: int, rounds: int, headroom: int) -> None:
    """Blocks of random lengths, filled up or not; some of their rows stay; every mask is checked."""
    random = tiny.seeded(seed)
    first = 1 + random.randrange(30)
    cache.update_and_fetch(rows_of(0, first), -rows_of(0, first))
    for _ in range(rounds):
        size = random.randint(1, headroom)
        count = random.randint(1, size)
        start = cache.offset
        if isinstance(cache, SlidingRing):
            cache.begin(count)
        positions, mask, offset = write(cache, count, size)
        assert offset == start
        assert cache.offset == start + count
        assert mask.shape == (size, len(positions))
        for query in range(size):
            visible = sorted(positions[mask[query]].astype(int).tolist())
            assert visible == seen_by(cache, start + query), f"query {query} of {size} at {start}"
        kept = random.randint(0, count)
        if isinstance(cache, SlidingRing):
            cache.commit(count - kept)
        else:
            cache.trim(count - kept)
        rows = held(cache)
        expected = seen_by(cache, cache.offset)[:-1]  # of the next query, which is not there yet
        if rows is not None and cache.offset:
            assert np.array(rows.keys)[0, 0, :, 0].astype(int).tolist() == expected


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("seed", range(4))
def test_a_query_sees_its_window_and_the_pinned_entries_alone(ring: tuple[int, int, int], seed: int):
    window, headroom, sink = ring
    play(SlidingRing(window, headroom, sink), seed, 60, headroom)


@pytest.mark.parametrize("shape", [(8, 0), (8, 3), (1, 0), (300, 2)])
def test_a_query_of_a_layer_that_keeps_all_sees_its_window_alone(shape: tuple[int, int]):
    play(WindowedKV(*shape), 1, 60, 16)


@pytest.mark.parametrize("seed", range(4))
def test_a_query_sees_every_plain_position_before_it(seed: int):
    play(KVCache(), seed, 60, 16)


def test_plain_and_compiled_updates_may_alternate():
    random = tiny.seeded(3)
    for cache in (SlidingRing(8, 6, 2), SlidingRing(8, 6), KVCache()):
        cache.update_and_fetch(rows_of(0, 3), -rows_of(0, 3))
        for _ in range(80):
            count = random.randint(1, 6)
            if random.random() < 0.5:
                write(cache, count, random.randint(count, 6))
            else:
                cache.update_and_fetch(rows_of(cache.offset, count), -rows_of(cache.offset, count))
            rows = held(cache)
            assert rows is not None
            assert np.array(rows.keys)[0, 0, :, 0].astype(int).tolist() == seen_by(cache, cache.offset)[:-1]


@pytest.mark.parametrize("headroom", [3, 6])
@pytest.mark.parametrize("length", [2, 9, 40])
def test_a_ring_goes_back_as_far_as_its_rows_are_what_they_were(headroom: int, length: int):
    ring = SlidingRing(4, headroom)
    ring.update_and_fetch(rows_of(0, length), -rows_of(0, length))
    write(ring, 1, headroom)  # the rows that fill the block up overwrite older ones too
    for count in range(length + 2):
        back = copy(ring)
        back.rewind(count)
        assert ring.rewindable(count) == (back.offset >= 0 and shows(back, seen_by(ring, back.offset)[:-1]))


def shows(ring: SlidingRing, expected: list[int]) -> bool:
    """Whether the newest rows of a ring are those of these positions."""
    rows = np.array(ring.keys_and_values()[0])[0, 0, :, 0].astype(int).tolist()
    return rows[len(rows) - len(expected) :] == expected


def test_an_empty_cache_has_no_room_to_write_in():
    assert not reserve(KVCache(), 4)
    assert not reserve(SlidingRing(8, 4), 4)


@pytest.mark.parametrize("chunks", [(1,), (200, 55), (256,), (255, 1, 45), (100, 300, 1)])
@pytest.mark.parametrize("new", [1, 2, 16])
def test_a_plain_buffer_has_room_in_whole_steps_and_seldom_grows(chunks: tuple[int, ...], new: int):
    cache = KVCache()
    for count in chunks:  # mlx-lm's buffers end anywhere
        cache.update_and_fetch(rows_of(cache.offset, count), rows_of(cache.offset, count))
    assert reserve(cache, new)
    rows_held = cache.keys.shape[2]
    assert rows_held % STEP == 0
    assert cache.offset + new <= rows_held < cache.offset + new + 256 + STEP
    keys = cache.keys
    while cache.offset + new <= rows_held:
        assert reserve(cache, new)
        assert cache.keys is keys  # nothing is copied until it is full
        cache.offset += new
    assert reserve(cache, new)
    assert cache.keys.shape[2] == rows_held + STEP
    assert mx.array_equal(cache.keys[:, :, : keys.shape[2]], keys).item()


def test_a_ring_grows_by_whole_steps_up_to_its_full_size():
    ring = SlidingRing(2 * STEP, 8, 3)
    ring.update_and_fetch(rows_of(0, 1), -rows_of(0, 1))
    sizes = set()
    while ring.offset < 4 * STEP:
        positions, mask, _ = write(ring, 8, 8)
        sizes.add(len(positions))
        first = ring.offset - 8
        assert sorted(positions[mask[0]].astype(int).tolist()) == seen_by(ring, first)
    assert max(sizes) == ring.capacity
    assert len(sizes) < 10


def test_only_caches_with_a_stand_in_are_traceable():
    assert traceable([KVCache(), SlidingRing(8, 4), WindowedKV(8)])
    assert not traceable([])
    others = (ArraysCache(2), QuantizedKVCache(), RotatingKVCache(8), CacheList(KVCache()))
    assert not any(traceable([KVCache(), other]) for other in others)


def test_caches_are_told_the_same_if_and_only_if_they_are_alike():
    assert layout(KVCache()) == layout(KVCache())
    assert layout(SlidingRing(8, 4)) == layout(SlidingRing(8, 4))
    kinds = (
        KVCache(),
        SlidingRing(8, 4),
        SlidingRing(9, 4),
        SlidingRing(8, 5),
        SlidingRing(8, 4, 1),
        WindowedKV(8),
        WindowedKV(8, 1),
    )
    assert len({layout(cache) for cache in kinds}) == len(kinds)
