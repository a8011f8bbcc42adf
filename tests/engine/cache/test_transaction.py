"""begin, commit and abort over all layers: the caches must be those of plain decoding, layer by layer."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from engine.cache.ring import SlidingRing
from engine.cache.transaction import Transaction, new_caches, resident
from engine.decode import decode
from engine.errors import ModelError
from engine.pace import Fixed
from engine.target import Target
from tests.engine import tiny


def visible_rows(cache, window: int | None) -> tuple[mx.array, mx.array]:
    """What the next query could see, in temporal order."""
    if isinstance(cache, RotatingKVCache):
        keys, values = cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
        keep = min(cache.offset, window - 1)
        return keys[..., -keep:, :], values[..., -keep:, :]
    keys, values = cache.keys_and_values()
    return keys, values


def assert_caches_equal(ours: list, plain: list) -> None:
    """Layer by layer, within rounding. A wrong offset means commit kept the wrong number of rows; equal
    offsets with different rows mean a rollback left or lost an entry."""
    for layer, (a, b) in enumerate(zip(ours, plain, strict=True)):
        assert a.offset == b.offset, f"layer {layer}: {a.offset} positions instead of {b.offset}"
        for x, y in zip(visible_rows(a, tiny.WINDOW), visible_rows(b, tiny.WINDOW), strict=True):
            assert x.shape == y.shape, f"layer {layer}: {x.shape} against {y.shape}"
            assert mx.abs(x - y).max().item() < 2e-4, f"layer {layer}: rows differ"


@pytest.mark.parametrize("prompt_length", [1, 5, 8, 9, 25])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_after_rounds_every_layer_equals_plain_decoding(gemma, prompt_length: int, wrong: float):
    random = tiny.seeded(prompt_length)
    prompt = [random.randrange(5, tiny.VOCAB) for _ in range(prompt_length)]
    truth = tiny.plain_tokens(gemma, prompt, 30)
    target, caches = Target(gemma), new_caches(gemma, 5)
    drafter = tiny.ScriptedDrafter(prompt + truth, wrong)
    tokens = [
        token
        for step in decode(target, drafter, prompt, max_tokens=30, pace=Fixed(5), caches=caches)
        for token in step.tokens
    ]
    assert tokens == truth
    plain = make_prompt_cache(gemma)
    for token in (prompt + truth)[:-1]:
        mx.eval(gemma(mx.array([[token]]), cache=plain))
    assert_caches_equal(caches, plain)


def test_quantized_caches_roll_back_to_the_same_codes(gemma):
    model = tiny.build("qwen3", hidden_size=128, head_dim=32)
    rolled = [QuantizedKVCache(group_size=32, bits=8) for _ in model.layers]
    straight = [QuantizedKVCache(group_size=32, bits=8) for _ in model.layers]
    prompt, wasted, kept = [5, 6, 7, 8], [9, 10, 11], [12, 13]
    transaction = Transaction(rolled)
    mx.eval(model(mx.array([prompt]), cache=rolled))
    transaction.begin(3)
    mx.eval(model(mx.array([wasted]), cache=rolled))
    transaction.commit(1)
    mx.eval(model(mx.array([kept]), cache=rolled))
    mx.eval(model(mx.array([prompt]), cache=straight))
    mx.eval(model(mx.array([wasted[:1]]), cache=straight))
    mx.eval(model(mx.array([kept]), cache=straight))
    for a, b in zip(rolled, straight, strict=True):
        ours = mx.dequantize(*a.keys_and_values()[0], group_size=32, bits=8)
        plain = mx.dequantize(*b.keys_and_values()[0], group_size=32, bits=8)
        assert mx.abs(ours - plain).max().item() < 0.05


def test_an_exception_in_the_middle_of_a_forward_restores_every_layer(gemma):
    caches = new_caches(gemma, 4)
    transaction = Transaction(caches)
    mx.eval(gemma(mx.array([list(range(5, 25))]), cache=caches))
    before = [[mx.array(x) for x in cache.keys_and_values()] for cache in caches]
    third = gemma.layers[3]
    plain = type(third)

    def failing(self, *args, **kwargs):
        raise RuntimeError("out of memory")

    object.__setattr__(third, "__class__", type("Failing", (plain,), {"__call__": failing}))
    try:
        transaction.begin(4)
        with pytest.raises(RuntimeError, match="out of memory"), transaction.guarded():
            gemma(mx.array([[1, 2, 3, 4]]), cache=caches)
    finally:
        object.__setattr__(third, "__class__", plain)
    assert {cache.offset for cache in caches} == {20}
    for cache, rows in zip(caches, before, strict=True):
        for now, then in zip(cache.keys_and_values(), rows, strict=True):
            assert mx.array_equal(now, then).item()


def test_a_cache_that_cannot_be_undone_is_refused_by_name():
    with pytest.raises(ModelError, match="ArraysCache"):
        Transaction([KVCache(), ArraysCache(2)])
    with pytest.raises(ModelError, match="RotatingKVCache"):
        Transaction([RotatingKVCache(8)])


def test_commit_and_begin_out_of_turn_are_errors():
    transaction = Transaction([KVCache()])
    with pytest.raises(ValueError, match="cannot keep"):
        transaction.commit(0)
    transaction.begin(2)
    with pytest.raises(ValueError, match="already open"):
        transaction.begin(2)
    with pytest.raises(ValueError, match="cannot keep 3"):
        transaction.commit(3)
    transaction.abort()
    transaction.abort()


def test_a_block_beyond_the_headroom_opens_nothing_in_any_layer(gemma):
    caches = new_caches(gemma, 4)
    transaction = Transaction(caches)
    mx.eval(gemma(mx.array([[5, 6, 7]]), cache=caches))
    with pytest.raises(ValueError, match="headroom of 4"):
        transaction.begin(5)
    transaction.begin(4)
    mx.eval(gemma(mx.array([[8, 9, 10, 11]]), cache=caches))
    transaction.commit(1)
    assert {cache.offset for cache in caches} == {4}


def test_sliding_layers_become_rings_and_pinned_entries_are_refused(gemma):
    classes, nbytes = resident(new_caches(gemma, 4))
    assert classes == {"KVCache": 2, "SlidingRing": 4}
    assert nbytes == 0

    class Pinned:
        layers = ()

        @staticmethod
        def make_cache():
            return [RotatingKVCache(8, keep=4)]

    with pytest.raises(ModelError, match="4 pinned"):
        new_caches(Pinned(), 4)


def test_resident_bytes_are_what_the_caches_hold(gemma):
    caches = new_caches(gemma, 4)
    mx.eval(gemma(mx.array([list(range(5, 105))]), cache=caches))
    a_row = 2 * 2 * 8 * 4  # keys and values, two heads of eight float32
    rings = [cache for cache in caches if isinstance(cache, SlidingRing)]
    assert [ring.nbytes for ring in rings] == [(tiny.WINDOW + 4) * a_row] * 4
    assert resident(caches)[1] == 4 * (tiny.WINDOW + 4) * a_row + 2 * 256 * a_row
