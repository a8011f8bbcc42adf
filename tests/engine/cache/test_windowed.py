"""Sliding layers that keep all positions: the same window, any rewind, and bytes that grow with the text."""

from __future__ import annotations

import mlx.core as mx
import pytest

from engine.cache.policy import parse_policy
from engine.cache.ring import WindowedKV
from engine.cache.stats import held, kept_positions
from engine.cache.transaction import new_caches, resident
from engine.decode import decode
from engine.session import Session
from engine.target.model import Target
from tests.engine import families, tiny
from tests.engine.cache.test_ring import positions, rows, visible
from tests.engine.identity import tokens_of

FULL = parse_policy("full-kv")
PROMPT = list(range(5, 45))  # five windows


@pytest.mark.parametrize("narrow", [None, 3])
@pytest.mark.parametrize("sink", [0, 2])
@pytest.mark.parametrize("new", [1, 4])
def test_a_query_sees_its_window_and_the_pinned_positions(new: int, sink: int, narrow: int | None):
    cache, window = WindowedKV(8, sink), narrow or 8
    for before in (0, 3, 8, 30):
        cache.update_and_fetch(*rows(cache.offset, before - cache.offset)) if before > cache.offset else None
        mask = cache.make_mask(new, window_size=narrow)
        shown = positions(cache.update_and_fetch(*rows(before, new))[0])
        assert shown == list(range(before + new))
        for query, seen in enumerate(visible(mask, new, len(shown))):
            at = before + query
            expected = [p for p in range(at + 1) if p > at - window or p < sink]
            assert [p for p in shown if seen[p]] == expected
        cache.trim(new)


def test_what_the_next_query_sees_is_the_window_and_all_positions_are_held():
    cache = WindowedKV(8, 2)
    cache.update_and_fetch(*rows(0, 40))
    assert held(cache).positions == [0, 1, *range(33, 40)]
    assert positions(held(cache).keys) == [0, 1, *range(33, 40)]
    assert kept_positions([cache]) == 9
    assert cache.size() == 40


def test_the_state_round_trips():
    cache = WindowedKV(8, 2)
    cache.update_and_fetch(*rows(0, 20))
    other = WindowedKV.from_state(cache.state)
    assert (other.window, other.sink, other.offset) == (8, 2, 20)
    assert mx.array_equal(other.make_mask(3), cache.make_mask(3)).item()


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text", "gpt_oss", "mistral"])
def test_text_is_that_of_native_caches(family: str):
    target = Target(families.build(family))
    native, full = (
        tokens_of(list(decode(target, None, PROMPT, max_tokens=24, policy=policy)))
        for policy in (parse_policy("native"), FULL)
    )
    assert full == native


def test_a_turn_that_leaves_the_text_earlier_is_resumed_where_a_ring_starts_over():
    target = Target(families.build("gemma3_text"))
    changed = [*PROMPT[:20], 7, 7, 7]
    fresh = tokens_of(list(decode(target, None, changed, max_tokens=12)))
    for policy, kept in ((parse_policy("native"), 0), (FULL, 20)):
        with Session(target, None, headroom=4, policy=policy) as session:
            list(decode(target, None, PROMPT, max_tokens=12, session=session))
            assert session.resume(changed) == kept
            assert tokens_of(list(decode(target, None, changed, max_tokens=12, session=session))) == fresh


def test_resident_bytes_are_those_of_all_positions():
    model = families.build("gemma3_text")
    caches = new_caches(model, 4, FULL)
    mx.eval(model(mx.array([PROMPT]), cache=caches))
    classes, nbytes = resident(caches)
    assert classes == {"KVCache": 2, "WindowedKV": 4}
    assert nbytes == sum(cache.keys.nbytes + cache.values.nbytes for cache in caches)
    row = 2 * 2 * tiny.build("gemma3_text").args.head_dim * 4
    assert nbytes >= 6 * len(PROMPT) * row
