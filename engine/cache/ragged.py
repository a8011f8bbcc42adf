"""Keys and values of several sequences of different lengths, one row of the batch each.

Every sequence has its own position: new rows are written where that sequence ends, and each keeps as many of
them as it likes. Rows lie as in the single-sequence caches (position p of a plain layer in row p, of a
sliding layer where `SlidingRing` has it), so a sequence enters and leaves the batch by a copy.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache, _BaseCache

from engine.cache.ring import SlidingRing

STEP = 256  # positions by which plain buffers grow


class RaggedKV(_BaseCache):
    """One layer's cache for S sequences: plain, or sliding with or without pinned entries.

    Made by `merge`. ``offset`` is what mlx-lm's models rotate by: the next position of each sequence, [S].
    """

    def __init__(self, keys: mx.array, values: mx.array, caches: Sequence[Any]) -> None:
        """Take over buffers [S, KV heads, rows, head dim] with the rows of ``caches``, one each."""
        self.keys, self.values = keys, values
        ring = caches[0] if type(caches[0]) is SlidingRing else None
        self.window: int | None = ring.window if ring else None
        self.headroom: int | None = ring.headroom if ring else None
        self.sink = ring.sink if ring else 0
        self._turn = ring.window + ring.headroom if ring else 0  # rows a sliding layer's positions share
        self.lengths = [int(cache.offset) for cache in caches]
        self._floors = [cache.floor if ring else 0 for cache in caches]

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> "RaggedKV":
        """The caches of one layer in different sequences, as one; they are left as they are.

        Args:
            caches: of one kind, none of them empty.

        Raises:
            ValueError: the windows differ.
        """
        if type(caches[0]) is SlidingRing:
            if len({_shape(cache) for cache in caches}) > 1:
                raise ValueError("sequences of a batch need the same window, headroom and pinned entries")
            rows = caches[0].capacity
        else:
            rows = _stepped(max(int(cache.offset) for cache in caches))
        keys = mx.concatenate([_fitted(cache.keys, rows) for cache in caches])
        values = mx.concatenate([_fitted(cache.values, rows) for cache in caches])
        return cls(keys, values, caches)

    def extract(self, row: int) -> KVCache | SlidingRing:
        """One sequence's cache on its own, a copy."""
        length = self.lengths[row]
        keys, values = (mx.contiguous(each[row : row + 1]) for each in (self.keys, self.values))
        if self.window is not None and self.headroom is not None:
            ring = SlidingRing(self.window, self.headroom, self.sink)
            ring.state = keys, values, length, length, self._floors[row], None, *_shape(ring)
            return ring
        cache = KVCache()  # type: ignore[no-untyped-call]
        cache.keys, cache.values, cache.offset = keys, values, length
        return cache

    def filter(self, rows: Sequence[int]) -> None:
        """Keep these sequences, in this order."""
        chosen = mx.array(list(rows), mx.int32)
        self.keys, self.values = self.keys[chosen], self.values[chosen]
        self.lengths = [self.lengths[row] for row in rows]
        self._floors = [self._floors[row] for row in rows]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget what every sequence holds beyond its length."""
        self.lengths = list(lengths)

    # --- what a model's layer calls -----------------------------------------------------------------

    @property
    def offset(self) -> mx.array:
        """Position of the next token of each sequence, int32 [S]."""
        return mx.array(self.lengths, mx.int32)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append N rows to every sequence; keys [S, KV heads, N, head dim], values alike.

        Returns:
            The rows `make_mask` speaks of, [S, KV heads, rows, head dim].
        """
        new = keys.shape[2]
        rows = self._rows(new)
        if rows > self.keys.shape[2]:
            self.keys, self.values = _fitted(self.keys, _stepped(rows)), _fitted(self.values, _stepped(rows))
        place = mx.array(self._places(new)[:, None, :, None])
        self.keys = mx.put_along_axis(self.keys, place, keys, axis=2)
        self.values = mx.put_along_axis(self.values, place, values, axis=2)
        self.lengths = [length + new for length in self.lengths]
        if self._turn:
            pairs = zip(self._floors, self.lengths, strict=True)
            self._floors = [max(floor, length - self._turn) for floor, length in pairs]
        return self.keys[..., :rows, :], self.values[..., :rows, :]

    def make_mask(
        self,
        N: int,  # noqa: N803 - the name models call it by
        window_size: int | None = None,
        return_array: bool = False,  # noqa: ARG002 - it always is one
    ) -> mx.array:
        """Which rows N new queries of every sequence see, bool [S, 1, N, rows]."""
        query = (self.offset[:, None] + mx.arange(N))[:, None, :, None]  # [S, 1, N, 1]
        row = mx.arange(self._rows(N))
        if self.window is None:
            seen = row <= query
            return seen if window_size is None else seen & (row > query - window_size)
        window = min(window_size or self.window, self.window)
        newest = query[:, :, -1:]
        position = newest - (newest - row) % self._turn
        seen = (position <= query) & (position > query - window) & (position >= self.sink)
        return mx.where(row < self.sink, row <= query, seen) if self.sink else seen

    def _places(self, new: int) -> npt.NDArray[np.int32]:
        """Rows for the next ``new`` positions of every sequence, [S, new]; worked out on the host."""
        position: npt.NDArray[np.int32] = np.add.outer(self.lengths, np.arange(new)).astype(np.int32)
        if not self._turn:
            return position
        turned = self.sink + (position - self.sink) % self._turn
        return np.where(position < self.sink, position, turned).astype(np.int32)

    def _rows(self, new: int) -> int:
        """Rows attention goes over when every sequence gets ``new`` ones."""
        longest = max(self.lengths) + new
        return min(longest, self.sink + self._turn) if self._turn else longest

    # --- what mlx-lm and accounting ask ----------------------------------------------------------------

    @property  # type: ignore[misc]  # mlx-lm's can be set; batches are not saved
    def state(self) -> Any:
        """The buffers, for those who evaluate a cache."""
        return self.keys, self.values

    def size(self) -> int:
        """Positions of the longest sequence that are attended to."""
        longest = max(self.lengths)
        return longest if self.window is None else min(longest, self.sink + self.window)

    def empty(self) -> bool:
        """Never: sequences join with their prompts."""
        return False

    @property
    def nbytes(self) -> int:
        """Resident bytes of the buffers, free rows included."""
        return self.keys.nbytes + self.values.nbytes


def _shape(ring: SlidingRing) -> tuple[int, int, int]:
    return ring.window, ring.headroom, ring.sink


def _stepped(rows: int) -> int:
    return -(-rows // STEP) * STEP


def _fitted(buffer: mx.array, rows: int) -> mx.array:
    """The first ``rows`` rows, with free ones behind them where there are fewer."""
    missing = rows - buffer.shape[2]
    if missing <= 0:
        return buffer[..., :rows, :]
    room = mx.zeros((*buffer.shape[:2], missing, buffer.shape[3]), buffer.dtype)
    return mx.concatenate([buffer, room], axis=2)
