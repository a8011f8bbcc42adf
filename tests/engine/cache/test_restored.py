"""A restored cache is a plain one whose held rows can be replaced, and says how many were."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from engine.cache.batch import extract, merge
from engine.cache.policy import RestoredKV
from engine.cache.transaction import Transaction
from tests.engine import tiny

HELD = 20


def filled(kind: type[KVCache]) -> KVCache:
    cache = kind()
    rows = mx.arange(2.0 * HELD * 4).reshape(1, 2, HELD, 4)
    cache.update_and_fetch(rows, rows + 1000)
    return cache


def test_only_the_named_positions_change() -> None:
    cache, plain = filled(RestoredKV), filled(KVCache)
    assert isinstance(cache, RestoredKV)
    new = mx.full((1, 2, 3, 4), -1.0)
    cache.overwrite(5, new, new - 1)
    for ours, theirs, value in zip(cache.keys_and_values(), plain.keys_and_values(), (-1, -2), strict=True):
        assert mx.array_equal(ours[:, :, 5:8], mx.full((1, 2, 3, 4), value))
        assert mx.array_equal(ours[:, :, :5], theirs[:, :, :5])
        assert mx.array_equal(ours[:, :, 8:], theirs[:, :, 8:])
    assert cache.replaced == 3
    assert (cache.offset, cache.nbytes) == (plain.offset, plain.nbytes)


@pytest.mark.parametrize("start", [-1, HELD - 2])
def test_positions_that_are_not_held_are_refused(start: int) -> None:
    cache = filled(RestoredKV)
    assert isinstance(cache, RestoredKV)
    rows = mx.zeros((1, 2, 3, 4))
    with pytest.raises(ValueError, match=f"positions {start} to {start + 2} cannot be replaced: 20 are held"):
        cache.overwrite(start, rows, rows)
    assert cache.replaced == 0


def test_a_block_is_taken_back_without_carrying() -> None:
    model = tiny.build("llama")
    caches = [RestoredKV() for _ in model.layers]
    transaction = Transaction(model, caches)
    model(mx.array([[1, 2, 3]]), cache=caches)
    transaction.begin(4)
    model(mx.array([[4, 5, 6, 7]]), cache=caches)
    transaction.commit(2)
    assert transaction.uncached == 0
    assert [cache.offset for cache in caches] == [5, 5, 5]


def test_restored_sequences_are_decoded_together_as_plain_ones_are() -> None:
    model = tiny.build("llama")
    sequences = []
    for tokens in ([1, 2, 3], [4, 5, 6, 7, 8]):
        caches = [RestoredKV() for _ in model.layers]
        model(mx.array([tokens]), cache=caches)
        sequences.append(caches)
    rows = mx.zeros((1, 2, 1, 8))
    sequences[1][0].overwrite(2, rows, rows)
    batch = merge(model, sequences)
    together = model(mx.array([[9], [9]]), cache=batch)
    for row, caches in enumerate(sequences):
        alone = model(mx.array([[9]]), cache=caches)
        assert mx.allclose(together[row], alone[0], rtol=1e-4, atol=1e-4)
    assert not extract(batch, 1)[0].keys[:, :, 2].any().item()
