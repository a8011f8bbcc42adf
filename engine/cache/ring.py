"""Sliding-window keys and values that can be rolled back exactly, also after the window has wrapped.

mlx-lm's `RotatingKVCache` overwrites the oldest entry in place, so after a wrap nothing can be taken back.
Here entries stay in temporal order in a buffer of ``window + headroom`` rows. New rows go behind the old
ones; the old ones leave only when room is needed and nothing is pending, so a rollback is a smaller number.

Attention to the last ``window`` positions is exact. Pinned sink entries are not covered.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import _BaseCache


class SlidingRing(_BaseCache):
    """KV cache of one sliding layer, for a single sequence (batch size 1).

    Args:
        window: positions a query sees, itself included.
        headroom: the most positions that may be pending at once, and the slack between evictions.
    """

    def __init__(self, window: int, headroom: int) -> None:
        if window < 1 or headroom < 1:
            raise ValueError(f"window {window} and headroom {headroom} must be positive")
        self.window = window
        self.headroom = headroom
        self.offset = 0  # positions seen in all; the absolute position of the next one
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._end = 0  # rows in use in the buffer; the last one is position offset - 1
        self._pending: int | None = None  # offset at `begin`, None outside a transaction

    # --- transaction -------------------------------------------------------------------------------

    def begin(self, positions: int) -> None:
        """Promise that up to ``positions`` rows follow which may be taken back.

        Raises:
            ValueError: more than the headroom, or a transaction is already open.
        """
        if self._pending is not None:
            raise ValueError("a transaction is already open on this ring")
        if positions > self.headroom:
            raise ValueError(f"{positions} pending positions do not fit the headroom of {self.headroom}")
        if self.keys is not None:
            self._make_room(positions, self.keys, self.values)
        self._pending = self.offset

    def commit(self, dropped: int) -> None:
        """Close the transaction, forgetting its last ``dropped`` rows."""
        if self._pending is None or not 0 <= dropped <= self.offset - self._pending:
            raise ValueError(f"cannot drop {dropped} rows of this transaction")
        self._rewind(dropped)
        self._pending = None

    def abort(self) -> None:
        """Close the transaction as if it had never begun, whatever part of it arrived."""
        if self._pending is not None:
            self._rewind(self.offset - self._pending)
            self._pending = None

    def _rewind(self, rows: int) -> None:
        self.offset -= rows
        self._end -= rows

    # --- what a model's layer calls -----------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append rows and return all that the new queries may see.

        Args:
            keys: [1, KV heads, N, head dim]; values alike.
            values: see keys.

        Returns:
            The newest ``min(offset, window - 1) + N`` rows in temporal order, as `make_mask` expects.
        """
        new, seen = keys.shape[2], self._seen()
        if self._pending is None and seen + new > self.window + self.headroom:
            return self._replace(keys, values, seen)
        self._make_room(new, keys, values)
        assert self.keys is not None  # noqa: S101 - _make_room has just set them
        assert self.values is not None  # noqa: S101
        end = self._end + new
        self.keys[..., self._end : end, :] = keys
        self.values[..., self._end : end, :] = values
        first = self._end - seen
        self._end = end
        self.offset += new
        return self.keys[..., first:end, :], self.values[..., first:end, :]

    def make_mask(
        self,
        N: int,  # noqa: N803 - the name models call it by
        window_size: int | None = None,
        return_array: bool = False,
    ) -> mx.array | str | None:
        """Mask for N new queries over the rows `update_and_fetch` will return (True: visible)."""
        window = min(window_size or self.window, self.window)
        seen = self._seen()
        if seen + N > window or return_array:
            if N == 1 and seen + 1 <= window:
                return None
            mask: mx.array = create_causal_mask(N, seen, window_size=window)
            return mask
        return "causal" if N > 1 else None

    def _seen(self) -> int:
        """Rows before the next position that its query can still see."""
        return min(self._end, self.window - 1)

    def _make_room(self, new: int, keys: Any, values: Any) -> None:
        """Have ``new`` free rows behind the rows in use, growing up to window + headroom, then evicting."""
        if self.keys is not None and self._end + new <= self.keys.shape[2]:
            return
        if self._pending is not None and self.keys is not None:
            raise ValueError(f"{new} more rows than the transaction was opened for")
        held = self._seen()
        limit = self.window + self.headroom
        # Grow by halves of what is needed until the limit; from then on the size stays.
        capacity = limit if 2 * (held + new) >= limit else 2 * (held + new)
        self.keys = _moved(self.keys, self._end, held, capacity, keys)
        self.values = _moved(self.values, self._end, held, capacity, values)
        self._end = held

    def _replace(self, keys: mx.array, values: mx.array, seen: int) -> tuple[mx.array, mx.array]:
        """A chunk too long for the buffer: attend to all of it, keep what later queries can see."""
        first, end = self._end - seen, self._end
        if self.keys is not None and self.values is not None and seen:
            keys = mx.concatenate([self.keys[..., first:end, :], keys], axis=2)
            values = mx.concatenate([self.values[..., first:end, :], values], axis=2)
        rows = keys.shape[2]
        held = min(rows, self.window - 1)
        self.keys = _moved(keys, rows, held, self.window + self.headroom, keys)
        self.values = _moved(values, rows, held, self.window + self.headroom, values)
        self._end = held
        self.offset += rows - seen
        return keys, values

    # --- what mlx-lm and accounting ask ----------------------------------------------------------------

    @property
    def state(self) -> Any:
        """Everything that defines the cache, as mlx-lm saves it."""
        return self.keys, self.values, self.offset, self.window, self.headroom, self._end

    @state.setter
    def state(self, value: Any) -> None:
        self.keys, self.values, self.offset, self.window, self.headroom, self._end = value
        self._pending = None

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        """The rows the next query can see, oldest first."""
        if self.keys is None or self.values is None:
            return None, None
        rows = slice(self._end - self._seen(), self._end)
        return self.keys[..., rows, :], self.values[..., rows, :]

    def size(self) -> int:
        """Positions that are attended to."""
        return min(self.offset, self.window)

    def empty(self) -> bool:
        """Whether nothing has been stored."""
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Resident bytes of the buffers, free rows included."""
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes


def _moved(old: mx.array | None, end: int, held: int, capacity: int, like: mx.array) -> mx.array:
    """A buffer of ``capacity`` rows that starts with rows [end - held, end) of ``old``."""
    room = mx.zeros((*like.shape[:2], capacity - held, like.shape[3]), like.dtype)
    if old is None or held == 0:
        return room
    return mx.concatenate([old[..., end - held : end, :], room], axis=2)
