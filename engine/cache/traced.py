"""Caches as a compiled forward sees them: buffers of a fixed size; places and masks come from outside.

A graph that is compiled once must not know how many positions are held: new rows are written at a given
place, and attention goes over somewhat more rows than are held, with a given mask. The caches here are made
for one forward, and what they hold is read back. Masks are slices of tables made once.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from engine.cache.coded import CodedKV
from engine.cache.policy import RestoredKV
from engine.cache.ring import SlidingRing, WindowedKV, layout, whole_steps, widened
from engine.device import launch

FINEST = 64  # rows by which attention widens, at the beginning
TABLES = 128  # mask tables kept

# What a forward of N positions is told: offset [1], places of the new rows [N], mask [N, attended rows].
# It is the same for caches of one `layout` and size.
Entry = tuple[mx.array, mx.array, mx.array]


class TracedKV:
    """Plain keys and values: position p is in row p."""

    def __init__(self, keys: mx.array, values: mx.array, entry: Entry) -> None:
        self.keys, self.values = keys, values
        self.offset, self._places, self._mask = entry

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write rows [1, KV heads, N, head dim]; returns the rows the mask is for."""
        self._write(keys, values)
        rows = self._mask.shape[1]
        return self.keys[..., :rows, :], self.values[..., :rows, :]

    def _write(self, keys: mx.array, values: mx.array) -> None:
        self.keys = mx.slice_update(self.keys, keys, self.offset, axes=[2])
        self.values = mx.slice_update(self.values, values, self.offset, axes=[2])

    def make_mask(self, *_: Any, **__: Any) -> mx.array:
        """Which of the buffers' first rows the queries of this forward see, bool [N, rows]."""
        return self._mask


class TracedRing(TracedKV):
    """A sliding window with pinned entries: position p is in the row that `SlidingRing` gives it."""

    def _write(self, keys: mx.array, values: mx.array) -> None:
        self.keys[:, :, self._places] = keys
        self.values[:, :, self._places] = values


STAND_INS: dict[type, type[TracedKV]] = dict.fromkeys((KVCache, RestoredKV, WindowedKV), TracedKV)
STAND_INS[SlidingRing] = TracedRing


def traceable(caches: Sequence[Any]) -> bool:
    """Whether every cache has a traced kind, or is coded over stores that have one."""
    return bool(caches) and all(type(store) in STAND_INS for store in stores_of(caches))


def stores_of(caches: Sequence[Any]) -> list[Any]:
    """The caches with the stores of coded ones in their place."""
    return [store for cache in caches for store in (cache.stores if type(cache) is CodedKV else (cache,))]


def stood_in(caches: Sequence[Any], stand_ins: Sequence[TracedKV]) -> list[Any]:
    """Put traced caches in the places of `stores_of`, those of a coded cache under its code."""
    given = iter(stand_ins)
    return [
        cache.over([next(given) for _ in cache.stores]) if type(cache) is CodedKV else next(given)
        for cache in caches
    ]


def reserve(cache: Any, new: int) -> bool:
    """Have free rows for ``new`` more positions; False for an empty cache, whose heads are not known yet."""
    if cache.keys is None or cache.values is None:
        return False
    held = cache.keys.shape[2]
    rows = whole_steps(max(cache.offset + new, held))
    if type(cache) is SlidingRing:
        rows = min(rows, cache.capacity)
    if held < rows:
        cache.keys, cache.values = (widened(each, rows, each) for each in (cache.keys, cache.values))
    return True


def entry(cache: Any, new: int) -> Entry:
    """What a forward of ``new`` positions on a cache with free rows has to be told."""
    offset, rows = cache.offset, min(_wide(cache.offset + new), cache.keys.shape[2])
    if type(cache) is SlidingRing:
        places = mx.array(
            [row for first, last in cache.runs(offset, offset + new) for row in range(first, last)]
        )
    else:
        places = mx.array([offset])
    return mx.array([offset]), places, _mask(cache, new, rows)


def appended(cache: Any, count: int, written: int) -> None:
    """Count what a forward has written: ``count`` positions, and ``written`` rows in all."""
    if type(cache) is SlidingRing:
        cache.appended(count, written)
    else:
        cache.offset += count


def _mask(cache: Any, new: int, rows: int) -> mx.array:
    """Mask [new, rows] of a cache; ``rows`` are all of a ring's once it has wrapped."""
    offset, (window, _, sink) = cache.offset, layout(cache)
    if offset + new > rows:
        mask: mx.array = cache.turned_mask(new, rows, window)
        return mask
    mask = _band(rows, new, window)[:, rows - offset : 2 * rows - offset]  # position p is in row p
    if not sink:
        return mask
    query, row = mx.arange(offset, offset + new)[:, None], mx.arange(rows)[None]
    return mx.where(row < sink, row <= query, mask)


@lru_cache(maxsize=TABLES)
def _band(rows: int, new: int, window: int) -> mx.array:
    """[new, 2·rows]; columns [rows - offset, 2·rows - offset) are the mask over rows in order of position."""
    ahead = mx.arange(-rows, rows)[None] - mx.arange(new)[:, None]
    table = ahead <= 0
    if window:
        table = table & (ahead > -window)
    launch(table)  # not waited for: drafts may be on their way
    return table


def _wide(rows: int) -> int:
    """The next of a few numbers of rows, four for each doubling: there is a graph for each of them."""
    step = max(FINEST, (1 << rows.bit_length()) // 8)
    return -(-rows // step) * step
