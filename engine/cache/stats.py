"""What caches hold: the rows that the next query sees, and the bytes of codes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from engine.cache.batch import RaggedKV
from engine.cache.coded import CodedKV
from engine.cache.ring import SlidingRing, WindowedKV


@dataclass(frozen=True)
class VisibleRows:
    """Rows of one attention layer, decoded: keys and values [1, KV heads, n, D] at ascending positions."""

    positions: list[int]  # ascending
    keys: mx.array  # [1, KV heads, n, D], decoded
    values: mx.array


def held(cache: Any) -> VisibleRows | None:
    """What the next query sees of an attention layer's cache; None for an empty one and for other kinds."""
    store = cache.stores[0] if type(cache) is CodedKV else cache
    if not hasattr(store, "keys") or store.empty():
        return None
    keys, values = cache.keys_and_values()
    if keys is None or values is None:
        return None
    if type(store) not in {SlidingRing, WindowedKV}:
        return VisibleRows(list(range(int(store.offset))), keys, values)
    positions = _visible(store.offset, store.window, store.sink)
    pinned = min(store.sink, len(positions))
    first = keys.shape[2] - len(positions) + pinned  # there are more: those that the last queries saw, or all
    keys, values = (
        mx.concatenate([rows[..., :pinned, :], rows[..., first:, :]], axis=2) for rows in (keys, values)
    )
    return VisibleRows(positions, keys, values)


def _visible(length: int, window: int, sink: int) -> list[int]:
    pinned = min(sink, length)
    return [*range(pinned), *range(max(length - window + 1, pinned), length)]


@dataclass(frozen=True)
class KVUse:
    """What coded layers store."""

    layers: tuple[int, ...]
    values: int  # of keys and values together
    nbytes: int  # without free rows


def kv_use(caches: Sequence[Any]) -> KVUse | None:
    """What the coded layers among the caches store; None where there are none."""
    coded = {layer: cache for layer, cache in enumerate(caches) if type(cache) is CodedKV}
    values = nbytes = 0
    for cache in coded.values():
        store = cache.stores[0]
        if store.keys is None:
            continue
        batch, heads, capacity, _ = store.keys.shape
        lengths = store.lengths if isinstance(store, RaggedKV) else [int(store.offset)]
        rows = sum(min(length, capacity) for length in lengths)
        values += rows * heads * cache.dims
        nbytes += cache.nbytes * rows // (batch * capacity)
    return KVUse(tuple(coded), values, nbytes) if coded else None


def kept_positions(caches: Sequence[Any]) -> int | None:
    """The most positions that the next query sees in a layer with a window; None without such layers."""
    seen = []
    for cache in caches:
        if type(cache) in {SlidingRing, WindowedKV}:
            seen.append(len(_visible(cache.offset, cache.window, cache.sink)))
        elif type(cache) is RotatingKVCache:
            seen.append(len(_visible(cache.offset, cache.max_size - cache.keep, cache.keep)))
        elif type(cache) is RaggedKV and cache.window:
            seen += [len(_visible(length, cache.window, cache.sink)) for length in cache.lengths]
    return max(seen, default=None)
