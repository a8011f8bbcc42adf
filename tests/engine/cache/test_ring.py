"""The sliding ring against an unbounded reference, across the wrap."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import create_causal_mask

from engine.cache.ring import SlidingRing


def rows(start: int, count: int) -> tuple[mx.array, mx.array]:
    """Keys that carry their position, and values that carry its negative."""
    keys = mx.arange(start, start + count, dtype=mx.float32).reshape(1, 1, count, 1)
    keys = mx.broadcast_to(keys, (1, 2, count, 3))
    return keys, -keys


def positions(keys: mx.array) -> list[int]:
    return [int(value) for value in keys[0, 0, :, 0].tolist()]


class Reference:
    """Remembers every position; what a window shows is computed from scratch."""

    def __init__(self, window: int) -> None:
        self.window, self.offset = window, 0

    def view(self, new: int) -> list[int]:
        return list(range(max(0, self.offset - (self.window - 1)), self.offset + new))


def visible(mask: mx.array | str | None, new: int, width: int) -> np.ndarray:
    """A mask in any of mlx's forms as booleans [new, width]."""
    if mask is None:
        return np.ones((new, width), bool)
    if isinstance(mask, str):
        assert mask == "causal"
        return np.array(create_causal_mask(new, width - new))
    return np.array(mask)


def check_step(ring: SlidingRing, reference: Reference, new: int) -> None:
    """One update shows exactly what each query may see, in order, with a mask that fits."""
    mask = ring.make_mask(new)
    keys, values = ring.update_and_fetch(*rows(reference.offset, new))
    shown = positions(keys)
    assert shown == reference.view(new)
    assert mx.array_equal(values, -keys).item()
    seen = visible(mask, new, len(shown))
    for query in range(new):
        at = reference.offset + query
        expected = [at - reference.window < p <= at for p in shown]
        assert seen[query].tolist() == expected
    reference.offset += new


@settings(max_examples=60, deadline=None)
@given(
    window=st.integers(1, 9),
    headroom=st.integers(1, 6),
    prompt=st.integers(0, 30),
    rounds=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=14),
)
def test_any_sequence_of_rounds_shows_what_an_unbounded_cache_would(window, headroom, prompt, rounds):
    ring, reference = SlidingRing(window, headroom), Reference(window)
    if prompt:
        check_step(ring, reference, prompt)
    for wished, confirmed in rounds:
        block = min(wished, headroom)
        kept = min(confirmed, block)
        ring.begin(block)
        check_step(ring, reference, block)
        ring.commit(block - kept)
        reference.offset -= block - kept
        assert ring.offset == reference.offset
        assert ring.size() == min(reference.offset, window)
    check_step(ring, reference, 1)


@pytest.mark.parametrize("kept", range(6))
@pytest.mark.parametrize("before", [0, 1, 7, 8, 9, 16, 40])
def test_a_rollback_is_exact_on_both_sides_of_the_wrap(before: int, kept: int):
    block, window = 5, 8
    rolled, straight = SlidingRing(window, block), SlidingRing(window, block)
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


def test_memory_stays_at_window_plus_headroom():
    ring, window, headroom = SlidingRing(8, 4), 8, 4
    sizes = []
    for at in range(0, 8 * window, 2):
        ring.begin(4)
        ring.update_and_fetch(*rows(at, 4))
        ring.commit(2)
        sizes.append(ring.nbytes)
    a_row = 2 * 2 * 3 * 4  # keys and values, two heads of three float32
    assert max(sizes) == (window + headroom) * a_row
    assert all(later >= earlier for earlier, later in pairwise(sizes))


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


def test_a_narrower_mask_can_be_asked_for():
    ring = SlidingRing(8, 4)
    ring.update_and_fetch(*rows(0, 20))
    mask = visible(ring.make_mask(2, window_size=3), 2, 9)
    assert mask.sum(axis=1).tolist() == [3, 3]


def test_the_state_round_trips():
    ring = SlidingRing(8, 4)
    ring.update_and_fetch(*rows(0, 20))
    copy = SlidingRing.from_state(ring.state)
    assert positions(copy.update_and_fetch(*rows(20, 1))[0]) == positions(
        ring.update_and_fetch(*rows(20, 1))[0]
    )
