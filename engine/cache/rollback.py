"""How each kind of cache is taken back: one rollback a cache, in a literal table.

Recurrent states have a file of their own (`recurrent`); here are the caches that need no model for it.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache, _BaseCache

from engine.cache.restored import RestoredKV
from engine.cache.ring import SlidingRing


class Rollback(Protocol):
    """How one cache takes back positions. `begin` is followed by one `commit` or `abort`."""

    def begin(self, positions: int) -> None:
        """Exactly ``positions`` rows follow."""

    def divide(self, kept: int) -> bool:
        """Prepare to commit ``kept`` of the announced rows, fewer than all; False where it cannot."""

    def commit(self, dropped: int) -> None:
        """Forget the last ``dropped`` rows, keep the others for good."""

    def abort(self) -> None:
        """Forget every row since `begin`."""

    def rewindable(self, count: int) -> bool:
        """Outside of begin and commit: whether the last ``count`` rows can still be forgotten."""

    def rewind(self, count: int) -> None:
        """Forget the last ``count`` rows, which are rewindable."""


class TrimRollback:
    """Caches that grow at the end and whose `trim` is exact: plain, quantized and chunked keys and values."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._start: int | None = None

    def begin(self, positions: int) -> None:  # noqa: ARG002 - such a cache grows without limit
        """Remember where the transaction starts."""
        self._start = self._cache.offset

    def divide(self, kept: int) -> bool:  # noqa: ARG002 - it can keep any number
        """Rows are independent of each other."""
        return True

    def commit(self, dropped: int) -> None:
        """Trim the dropped rows."""
        if dropped:
            self._cache.trim(dropped)
        self._start = None

    def abort(self) -> None:
        """Trim what has arrived since `begin`, which may be nothing."""
        if self._start is not None:
            self._cache.trim(self._cache.offset - self._start)
            self._start = None

    def rewindable(self, count: int) -> bool:
        """Every row is held; a chunked cache has dropped some of those of earlier chunks."""
        left, first = self._cache.offset - count, 0
        if type(self._cache) is ChunkedKVCache and self._cache.start_position:
            first, left = self._cache.start_position, left - left % self._cache.chunk_size
        return bool(left >= first)

    def rewind(self, count: int) -> None:
        """Trim the rows."""
        self._cache.trim(count)


class RingRollback:
    """Our ring, which keeps its own."""

    def __init__(self, ring: SlidingRing) -> None:
        self.begin, self.commit, self.abort = ring.begin, ring.commit, ring.abort
        self.rewindable, self.rewind = ring.rewindable, ring.rewind

    def divide(self, kept: int) -> bool:  # noqa: ARG002 - it can keep any number
        """Rows are independent of each other."""
        return True


class CarryRollback:
    """Any other cache: it is put back as it was, and the caller feeds what it keeps once more.

    A snapshot holds the cache's arrays, so the first write into one of them after `begin` copies it: such
    a round costs the size of the cache, not of the block.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._snapshot: Snapshot | None = None

    def begin(self, positions: int) -> None:  # noqa: ARG002 - such a cache grows as it likes
        """Take a snapshot."""
        self._snapshot = Snapshot(self._cache)

    def divide(self, kept: int) -> bool:  # noqa: ARG002 - whatever the number
        """Nothing is known about its rows."""
        return False

    def commit(self, dropped: int) -> None:
        """Keep everything.

        Raises:
            ValueError: rows are to be dropped, which `divide` has refused.
        """
        if dropped:
            raise ValueError(f"{dropped} rows of a {type(self._cache).__name__} cannot be dropped alone")
        self._snapshot = None

    def abort(self) -> None:
        """Put the snapshot back."""
        if self._snapshot is not None:
            self._snapshot.restore()
            self._snapshot = None

    def rewindable(self, count: int) -> bool:
        """Nothing is known about its rows."""
        return count == 0

    def rewind(self, count: int) -> None:
        """Nothing to do for the only count that is rewindable."""


class Snapshot:
    """A cache object's attributes, as they were.

    Arrays get handles of their own: writing into an array changes every name that refers to it, not those.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._attributes = {name: _kept(value) for name, value in vars(cache).items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays it holds."""
        return sum(array.nbytes for array in _arrays(list(self._attributes.values())))

    def restore(self) -> Any:
        """Give the object back the attributes it had; returns the object."""
        vars(self._cache).clear()
        vars(self._cache).update({name: _restored(value) for name, value in self._attributes.items()})
        return self._cache


def _arrays(value: Any) -> Iterator[mx.array]:
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, Snapshot):
        yield from _arrays(list(value._attributes.values()))
    elif isinstance(value, dict):
        yield from _arrays(list(value.values()))
    elif type(value) in {list, tuple}:
        for inner in value:
            yield from _arrays(inner)


def _kept(value: Any) -> Any:
    if isinstance(value, mx.array):
        return mx.array(value)
    if isinstance(value, _BaseCache):
        return Snapshot(value)
    if isinstance(value, dict):
        return {key: _kept(inner) for key, inner in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_kept(inner) for inner in value)
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, mx.array):
        return mx.array(value)  # the snapshot may be needed again
    if isinstance(value, Snapshot):
        return value.restore()
    if isinstance(value, dict):
        return {key: _restored(inner) for key, inner in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_restored(inner) for inner in value)
    return value


ROLLBACKS: dict[type, Any] = {
    KVCache: TrimRollback,
    RestoredKV: TrimRollback,
    QuantizedKVCache: TrimRollback,
    ChunkedKVCache: TrimRollback,
    SlidingRing: RingRollback,
}
