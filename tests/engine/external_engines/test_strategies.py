"""What caches say of their use."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache

from engine.cache.policy import parse_policy
from engine.cache.ring import SlidingRing
from engine.errors import GenerationError
from engine.external_engines.engine import DraftCounts, positions_in, verify_use
from engine.target.attention import CodedAttention
from tests.engine import families

ROWS = mx.zeros((1, 1, 5, 32))


@pytest.mark.parametrize(
    "cache",
    [
        KVCache(),
        SlidingRing(2, 1, 1),
        QuantizedKVCache(group_size=32),
        CacheList(KVCache(), SlidingRing(4, 1)),
    ],
    ids=lambda cache: type(cache).__name__,
)
def test_positions_are_counted_whatever_is_kept_of_them(cache):
    assert positions_in(cache) == 0
    inner = cache.caches if isinstance(cache, CacheList) else [cache]
    for each in inner:
        each.update_and_fetch(ROWS, ROWS)
        each.update_and_fetch(ROWS[..., :1, :], ROWS[..., :1, :])
    assert positions_in(cache) == 6


def test_a_list_is_as_full_as_its_emptiest_member():
    cache = CacheList(KVCache(), KVCache())
    cache.caches[0].update_and_fetch(ROWS, ROWS)
    assert positions_in(cache) == 0


def test_an_offset_without_rows_counts_for_nothing():
    forged = KVCache()
    forged.offset = 40
    assert positions_in(forged) == 0
    forged.offset = 0
    forged.update_and_fetch(ROWS, ROWS)
    forged.offset = 4000
    assert positions_in(forged) == forged.keys.shape[2] < 4000
    ring = SlidingRing(80, 1)
    ring.update_and_fetch(ROWS, ROWS)
    ring.offset = 4000
    assert positions_in(ring) < 4000


def test_a_copy_counts_for_nothing():
    cache = KVCache()
    copy.deepcopy(cache).update_and_fetch(ROWS, ROWS)
    assert positions_in(cache) == 0


def test_a_recurrent_state_says_only_whether_there_is_one():
    cache = ArraysCache(2)
    assert positions_in(cache) == 0
    cache[0] = ROWS
    assert positions_in(cache) is None


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4", "qwen3_5", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("channel", ["native", "sink-window:2,4", "affine:8,32"])
def test_every_kind_of_cache_is_counted_in_a_real_forward(family, channel):
    model, policy = families.build(family, head_dim=32), parse_policy(channel)
    caches = policy.new_caches(model, 1)
    attention = CodedAttention(model)
    for tokens in ([[5, 6, 7, 8, 9, 10, 11, 12, 13]], [[14]]):
        model(mx.array(tokens), cache=caches)
    attention.close()
    assert {positions_in(cache) for cache in caches} <= {10, None}
    verify_use(caches, 10, "engine e")
    with pytest.raises(GenerationError, match=r"layer \d received 10 of at least 11 positions"):
        verify_use(caches, 11, "engine e")


def test_the_message_names_everything():
    full = KVCache()
    full.update_and_fetch(ROWS, ROWS)
    with pytest.raises(GenerationError) as caught:
        verify_use([full, KVCache()], 5, "engine z, strategy instance, policy native")
    assert str(caught.value) == (
        "engine z, strategy instance, policy native did not use the caches it was given: "
        "layer 1 received 0 of at least 5 positions"
    )


def test_the_acceptance_length_is_that_of_the_told_rounds():
    assert DraftCounts().acceptance_length is None
    assert DraftCounts(rounds=4, accepted=6).acceptance_length == 2.5
