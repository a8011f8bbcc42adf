"""Sliding-window keys and values that can be rolled back exactly, also after the window has wrapped.

mlx-lm's `RotatingKVCache` overwrites entries the next query still sees. This ring has ``headroom`` spare
rows: what a block overwrites had left the window before it came. A rollback is a smaller number. Keys are
rotated already, so the order of rows does not matter to attention.

    row of position p:   p                              for p < sink (pinned for good)
                         sink + (p - sink) mod M        otherwise, M = window + headroom

A query at q sees positions p ≤ q with p > q - window or p < sink, also inside a block, where mlx-lm's
`RotatingKVCache(keep=k)` hides pinned entries from all but the first query.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, _BaseCache

STEP = 256  # rows by which buffers grow that have no bound
Mask = mx.array | str | None  # as mlx-lm's `create_attention_mask` gives it, for a number of queries called N


def widened(buffer: mx.array | None, rows: int, like: mx.array) -> mx.array:
    """A buffer [B, heads, rows, D] with free rows behind its own; `like` has its other dimensions."""
    held = 0 if buffer is None else buffer.shape[2]
    free = mx.zeros((*like.shape[:2], rows - held, like.shape[3]), like.dtype)
    return free if buffer is None else mx.concatenate([buffer, free], axis=2)


def whole_steps(rows: int) -> int:
    """The next multiple of `STEP`."""
    return -(-rows // STEP) * STEP


def layout(cache: Any) -> tuple[int, ...]:
    """Window, headroom and pinned positions of a cache; 0 for none."""
    if type(cache) is SlidingRing:
        return cache.window, cache.headroom, cache.sink
    return (cache.window, 0, cache.sink) if type(cache) is WindowedKV else (0, 0, 0)


def sees(query: mx.array, row: mx.array, window: int, sink: int) -> mx.array:
    """Whether queries see rows, both given by position."""
    recent = row > query - window
    return (row <= query) & (recent | (row < sink) if sink else recent)


class WindowedKV(KVCache):
    """A sliding layer that keeps all positions: the mask alone hides what has left the window."""

    def __init__(self, window: int, sink: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.window, self.sink = window, sink

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:  # noqa: N803
        """Mask [N, offset + N] for N new queries; a query at q sees p ≤ q with p > q - window or p < sink."""
        window, end = min(window_size or self.window, self.window), self.offset + N
        if end <= window + self.sink:
            plain: Mask = super().make_mask(N, window_size=None, return_array=return_array)  # type: ignore[no-untyped-call]
            return plain
        return sees(mx.arange(self.offset, end)[:, None], mx.arange(end)[None], window, self.sink)

    @property
    def state(self) -> Any:
        return self.keys, self.values, self.offset, self.window, self.sink

    @state.setter
    def state(self, value: Any) -> None:
        self.keys, self.values, self.offset, self.window, self.sink = value


class SlidingRing(_BaseCache):
    """One sliding layer of a single sequence."""

    def __init__(self, window: int, headroom: int, sink: int = 0) -> None:
        """``window`` counts the query, not the pinned positions: mlx-lm's ``max_size - keep``;
        ``headroom`` is the most to be pending.
        """
        if window < 1 or headroom < 1 or sink < 0:
            text = f"window {window} and headroom {headroom} must be positive, sink {sink} not less"
            raise ValueError(text)
        self.window, self.headroom, self.sink = window, headroom, sink
        self.offset = 0  # positions seen in all; the absolute position of the next one
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.floor = 0  # every position in [max(floor, sink), offset) is in its row
        self._began = 0  # offset at the last update
        self._chunk: tuple[mx.array, mx.array] | None = None  # what the last update returned, if long
        self._pending: int | None = None  # offset at `begin`, None outside a transaction
        self._before: tuple[int, tuple[mx.array, mx.array] | None] = (0, None)  # the two others at `begin`
        self._promised = 0  # positions announced to `begin`
        self._tables: dict[int, mx.array] = {}

    def begin(self, positions: int) -> None:
        if self._pending is not None:
            raise ValueError("a transaction is already open on this ring")
        if positions > self.headroom:
            raise ValueError(f"{positions} pending positions do not fit the headroom of {self.headroom}")
        self._pending, self._promised = self.offset, positions
        self._before = self._began, self._chunk

    def divide(self, kept: int) -> bool:  # noqa: ARG002 - it can keep any number
        return True

    def commit(self, dropped: int) -> None:
        if self._pending is None or not 0 <= dropped <= self.offset - self._pending:
            raise ValueError(f"cannot drop {dropped} rows of this transaction")
        self._back(self.offset - dropped)

    def abort(self) -> None:
        if self._pending is not None:
            self._back(self._pending)

    def _back(self, offset: int) -> None:
        if offset == self._pending:
            self._began, self._chunk = self._before
        self.offset, self._pending, self._before = offset, None, (0, None)

    def rewindable(self, count: int) -> bool:
        left = self.offset - count
        first = max(left - self.window + 1, self.sink)  # the oldest one the next query would see
        return left >= 0 and (left <= self.sink or first >= self.floor)

    def rewind(self, count: int) -> None:
        self.offset -= count
        if count:
            self._chunk = None

    def is_trimmable(self) -> bool:
        return self._pending is None

    def trim(self, n: int) -> int:
        """Forget up to ``n`` positions and return how many; ValueError where rows to be seen are gone."""
        count = min(n, self.offset)
        if self._pending is not None or not self.rewindable(count):
            bound = f"the ring takes back {self.headroom} of them outside a transaction"
            raise ValueError(f"cannot trim {count} of {self.offset} positions: {bound}")
        self.rewind(count)
        return count

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append rows [1, KV heads, N, head dim]; return the rows that `make_mask` describes."""
        end = self.offset + keys.shape[2]
        if self._pending is not None and end > self._pending + self._promised:
            raise ValueError(f"{keys.shape[2]} more rows than the transaction was opened for")
        self._began, self._chunk = self.offset, None
        if self._is_long(keys.shape[2]):
            return self._replace(keys, values)
        rows = min(end, self.capacity)
        self.keys = self._written(self.keys, keys, rows)
        self.values = self._written(self.values, values, rows)
        self.offset = end
        self.floor = max(self.floor, end - self._turn)
        if rows == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[..., :rows, :], self.values[..., :rows, :]

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:  # noqa: N803
        """Mask [N, rows] for N new queries over the rows `update_and_fetch` will return (True: visible)."""
        window = min(window_size or self.window, self.window)
        end = self.offset + N
        if end <= window + self.sink:
            if N == 1:
                return None
            causal: mx.array | str = create_causal_mask(N, self.offset) if return_array else "causal"
            return causal
        if self.headroom + 1 < N:
            return self._long_mask(N, window)
        return self.turned_mask(N, min(end, self.capacity), window)

    def turned_mask(self, new: int, rows: int, window: int) -> mx.array:
        """Mask [new, rows] over the buffer's first rows, for at most headroom + 1 queries."""
        end = self.offset + new
        start = self._turn - 1 - (end - 1 - self.sink) % self._turn
        table = self._table(window)[-new:, start : start + rows - self.sink]
        if not self.sink:
            return table
        pinned = mx.arange(self.sink) <= mx.arange(self.offset, end)[:, None]
        return mx.concatenate([pinned, table], axis=1)

    def appended(self, count: int, written: int) -> None:
        """Count rows that a compiled forward wrote: ``count`` positions, and ``written`` rows in all."""
        self.floor = max(self.floor, self.offset + written - self._turn)
        self._began, self._chunk = self.offset, None
        self.offset += count

    @property
    def _turn(self) -> int:
        """Positions this far apart share a row."""
        return self.window + self.headroom

    @property
    def capacity(self) -> int:
        return self.sink + self._turn

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Where positions [start, stop) are, in their order, as ranges of rows."""
        while start < stop:
            row = start if start < self.sink else self.sink + (start - self.sink) % self._turn
            length = min(stop - start, self.capacity - row)
            yield row, row + length
            start += length

    def _written(self, buffer: mx.array | None, new: mx.array, rows: int) -> mx.array:
        """The buffer, of at least ``rows`` rows, with new ones written behind position offset - 1."""
        if buffer is None or buffer.shape[2] < rows:
            buffer = widened(buffer, min(2 * rows, self.capacity), new)
        done = 0
        for first, last in self.runs(self.offset, self.offset + new.shape[2]):
            buffer[..., first:last, :] = new[..., done : done + last - first, :]
            done += last - first
        return buffer

    def _read(self, buffer: mx.array, start: int, stop: int) -> list[mx.array]:
        return [buffer[..., first:last, :] for first, last in self.runs(start, stop)]

    def _seen(self, buffer: mx.array | None) -> list[mx.array]:
        if buffer is None:
            return []
        pinned = min(self.sink, self.offset)
        recent = max(self.offset - self.window + 1, pinned)
        return self._read(buffer, 0, pinned) + self._read(buffer, recent, self.offset)

    def _table(self, window: int) -> mx.array:
        """What a query sees of the ring, [headroom + 1, 2·M - 1]; slices of it are the masks of all offsets.

        Row -1-i is the i-th query from the last. Column c is for the row whose newest position is (M-1-c) mod
        M positions older than the last query.
        """
        if window not in self._tables:
            age = (self._turn - 1 - mx.arange(2 * self._turn - 1)) % self._turn
            since = age - mx.arange(self.headroom, -1, -1)[:, None]
            self._tables[window] = (since >= 0) & (since < window)
        return self._tables[window]

    def _is_long(self, new: int) -> bool:
        """Whether new rows would overwrite what their own first query sees."""
        return new > self.headroom + 1 and self.offset + new > self.capacity

    def _replace(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Attend to what is held and all of the chunk; keep the newest positions and the pinned ones."""
        end = self.offset + keys.shape[2]
        keys = mx.concatenate([*self._seen(self.keys), keys], axis=2)
        values = mx.concatenate([*self._seen(self.values), values], axis=2)
        self.keys, self.values = self._turned(keys, end), self._turned(values, end)
        self.offset, self.floor = end, end - self._turn
        self._chunk = keys, values
        return keys, values

    def _turned(self, rows: mx.array, end: int) -> mx.array:
        """A full buffer: pinned rows first, then the last M positions before ``end``, each in its row."""
        split = rows.shape[2] - (end - self.sink) % self._turn  # the newest position in the ring's first row
        first = rows.shape[2] - self._turn
        parts = [rows[..., : self.sink, :], rows[..., split:, :], rows[..., first:split, :]]
        return mx.concatenate(parts, axis=2)

    def _long_mask(self, new: int, window: int) -> mx.array:
        """Mask for a chunk that finds its rows, or is given them by `_replace`, in the order of positions."""
        end = self.offset + new
        pinned = min(self.sink, self.offset)
        recent = max(self.offset - self.window + 1, pinned) if self._is_long(new) else pinned
        held = mx.concatenate([mx.arange(pinned), mx.arange(recent, end)])[None]
        return sees(mx.arange(self.offset, end)[:, None], held, window, self.sink)

    @property
    def state(self) -> Any:
        rows = self.keys, self.values, self.offset, self._began, self.floor, self._chunk
        return *rows, self.window, self.headroom, self.sink

    @state.setter
    def state(self, value: Any) -> None:
        *rows, window, headroom, sink = value
        self.__init__(window, headroom, sink)  # type: ignore[misc]  # `from_state` makes it without
        self.keys, self.values, self.offset, self._began, self.floor, self._chunk = rows

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        """Rows that the last update's queries saw, by position, as of mlx-lm's rotating cache."""
        if self.keys is None or self.values is None:
            return None, None
        if self._chunk is not None:
            return self._chunk
        pinned, first = min(self.sink, self.offset), min(self._began, self.offset - 1)
        start = max(first - self.window + 1, self.floor, pinned)
        start = min(start, max(self.offset - self.window + 1, pinned))  # rewritten below the floor
        keys, values = (
            mx.concatenate([buffer[..., :pinned, :], *self._read(buffer, start, self.offset)], axis=2)
            for buffer in (self.keys, self.values)
        )
        return keys, values

    def release(self) -> None:
        """Drop the rows of a long chunk, which no ``nbytes`` counts."""
        self._chunk = None

    def size(self) -> int:
        return min(self.offset, self.sink + self.window)

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes
