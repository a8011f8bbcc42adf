"""What a cache holds, as a reader of the next query sees it: positions, keys and values, decoded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from engine.cache.coded import CodedKV
from engine.cache.ragged import RaggedKV
from engine.cache.ring import SlidingRing


@dataclass(frozen=True)
class Held:
    """Rows of one attention layer.

    Attributes:
        positions: of the rows, ascending.
        keys: [1, KV heads, n, D]; values alike.
        values: see keys.
    """

    positions: list[int]
    keys: mx.array
    values: mx.array


def held(cache: Any) -> Held | None:
    """What the next query sees of an attention layer's cache; None for an empty one and for other kinds."""
    store = cache.stores[0] if type(cache) is CodedKV else cache
    if not hasattr(store, "keys") or store.empty():
        return None
    keys, values = cache.keys_and_values()
    if keys is None or values is None:
        return None
    positions = _positions(store)
    if type(store) is SlidingRing:  # it tells what the last queries saw, and the next one sees less
        pinned = min(store.sink, len(positions))
        keys, values = (
            mx.concatenate(
                [rows[..., :pinned, :], rows[..., rows.shape[2] - len(positions) + pinned :, :]], axis=2
            )
            for rows in (keys, values)
        )
    return Held(positions, keys, values)


def _positions(store: Any) -> list[int]:
    if type(store) is SlidingRing:
        return _seen(store.offset, store.window, store.sink)
    return list(range(int(store.offset)))


def _seen(length: int, window: int, sink: int) -> list[int]:
    """Positions before `length` that the query there sees through a window with pinned ones."""
    pinned = min(sink, length)
    return [*range(pinned), *range(max(length - window + 1, pinned), length)]


@dataclass(frozen=True)
class KVUse:
    """What coded layers store.

    Attributes:
        layers: their numbers.
        values: numbers of keys and values in them.
        nbytes: bytes of their codes, free rows excluded.
    """

    layers: tuple[int, ...]
    values: int
    nbytes: int


def kv_use(caches: Sequence[Any]) -> KVUse | None:
    """What the coded layers among the caches store; None where there are none."""
    found = {layer: cache.held() for layer, cache in enumerate(caches) if type(cache) is CodedKV}
    if not found:
        return None
    values, nbytes = (sum(pair[part] for pair in found.values()) for part in (0, 1))
    return KVUse(tuple(found), values, nbytes)


def kept_positions(caches: Sequence[Any]) -> int | None:
    """The most positions that the next query sees in a layer with a window: our ring, mlx-lm's, or a batch.

    That is what a bounding policy bounds, and what a model's own window does. None without such layers.
    """
    seen = []
    for cache in caches:
        if type(cache) is SlidingRing:
            seen.append(len(_positions(cache)))
        elif type(cache) is RotatingKVCache:
            seen.append(len(_seen(cache.offset, cache.max_size - cache.keep, cache.keep)))
        elif type(cache) is RaggedKV and cache.window is not None:
            seen += [len(_seen(length, cache.window, cache.sink)) for length in cache.lengths]
    return max(seen, default=None)
