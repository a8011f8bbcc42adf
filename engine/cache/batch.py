"""Several sequences decoded together: caches merged after their prompts, and a transaction for all of them.

Every sequence has its own position and keeps its own number of a block's positions. Rows lie as in the
caches of one sequence, so a sequence enters and leaves the batch by a copy. Refused up front: quantized and
chunked caches, those that can only be put back, and recurrent families whose update does not take lengths.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, _BaseCache

from engine.cache.coded import CodedKV
from engine.cache.policy import RestoredKV
from engine.cache.ring import SlidingRing, WindowedKV, layout, sees, whole_steps, widened
from engine.cache.rollback import RecurrentRollback
from engine.cache.transaction import TransactionBase, members_of
from engine.errors import ModelError

# mlx-lm modules whose recurrent layers heed a mask and `lengths` exactly; the tests go through this list.
RAGGED_FAMILIES = (
    "falcon_h1", "kimi_linear", "lfm2", "mamba2", "qwen3_5", "qwen3_5_moe", "qwen3_next",
)  # fmt: skip
MERGED = (KVCache, RestoredKV, WindowedKV, SlidingRing, ArraysCache)


class RaggedKV(_BaseCache):
    """One layer's cache for S sequences: plain, or sliding with or without pinned entries."""

    def __init__(self, caches: Sequence[Any]) -> None:
        """Copy the caches of one layer in different sequences, of one kind and none of them empty."""
        if len({layout(cache) for cache in caches}) > 1:
            raise ValueError("sequences of a batch need the same window, headroom and pinned entries")
        self.window, self.headroom, self.sink = layout(caches[0])
        # Positions this far apart share a row of a ring; 0: none do.
        self._turn = self.window + self.headroom if self.headroom else 0
        self.lengths = [int(cache.offset) for cache in caches]
        self._floors = [cache.floor if self._turn else 0 for cache in caches]
        self._starts: list[int] | None = None  # lengths at `begin`; None outside of a transaction
        rows = self.sink + self._turn if self._turn else whole_steps(max(self.lengths))
        self.keys = mx.concatenate([_fitted(cache.keys, rows) for cache in caches])  # [S, KV heads, rows, D]
        self.values = mx.concatenate([_fitted(cache.values, rows) for cache in caches])

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> "RaggedKV":
        return cls(caches)

    def extend(self, other: "RaggedKV") -> None:
        """Take over the sequences of a batch of the same layer, behind one's own."""
        rows = max(self.keys.shape[2], other.keys.shape[2])
        self.keys = mx.concatenate([_fitted(self.keys, rows), _fitted(other.keys, rows)])
        self.values = mx.concatenate([_fitted(self.values, rows), _fitted(other.values, rows)])
        self.lengths = [*self.lengths, *other.lengths]
        self._floors = [*self._floors, *other._floors]

    def extract(self, row: int) -> KVCache | SlidingRing:
        length = self.lengths[row]
        keys, values = (mx.contiguous(each[row : row + 1]) for each in (self.keys, self.values))
        if self.headroom:
            ring = SlidingRing(self.window, self.headroom, self.sink)
            ring.state = keys, values, length, length, self._floors[row], None, *layout(ring)
            return ring
        cache = WindowedKV(self.window, self.sink) if self.window else KVCache()  # type: ignore[no-untyped-call]
        cache.keys, cache.values, cache.offset = keys, values, length
        return cache

    def filter(self, rows: Sequence[int]) -> None:
        chosen = mx.array(list(rows), mx.int32)
        self.keys, self.values = self.keys[chosen], self.values[chosen]
        self.lengths = [self.lengths[row] for row in rows]
        self._floors = [self._floors[row] for row in rows]

    def begin(self, positions: int) -> None:
        if self.headroom and positions > self.headroom:
            raise ValueError(f"{positions} pending positions do not fit the headroom of {self.headroom}")
        self._starts = self.lengths

    def commit(self, kept: Sequence[int]) -> None:
        self.lengths = [start + count for start, count in zip(self._starts or (), kept, strict=True)]
        self._starts = None

    def abort(self) -> None:
        if self._starts is not None:
            self.lengths, self._starts = self._starts, None

    @property
    def offset(self) -> mx.array:
        """Position of the next token of each sequence, int32 [S]: what mlx-lm's models rotate by."""
        return mx.array(self.lengths, mx.int32)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append rows [S, KV heads, N, head dim] to every sequence; return the rows of `make_mask`."""
        new = keys.shape[2]
        rows = self._rows(new)
        if rows > self.keys.shape[2]:
            size = whole_steps(rows)
            self.keys, self.values = _fitted(self.keys, size), _fitted(self.values, size)
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
        window = min((size for size in (window_size, self.window) if size), default=None)
        if window is None:
            return row <= query
        if not self._turn:
            return sees(query, row, window, self.sink)
        newest = query[:, :, -1:]
        position = newest - (newest - row) % self._turn
        seen = (position <= query) & (position > query - window) & (position >= self.sink)
        return mx.where(row < self.sink, row <= query, seen) if self.sink else seen

    def _places(self, new: int) -> npt.NDArray[np.int32]:
        """Rows for the next ``new`` positions of every sequence, [S, new]; computed without the device."""
        position: npt.NDArray[np.int32] = np.add.outer(self.lengths, np.arange(new)).astype(np.int32)
        if not self._turn:
            return position
        turned = self.sink + (position - self.sink) % self._turn
        return np.where(position < self.sink, position, turned).astype(np.int32)

    def _rows(self, new: int) -> int:
        """Rows attention goes over when every sequence gets ``new`` ones."""
        longest = max(self.lengths) + new
        return min(longest, self.sink + self._turn) if self._turn else longest

    @property  # type: ignore[misc]  # mlx-lm's can be set; batches are not saved
    def state(self) -> Any:
        return self.keys, self.values

    def size(self) -> int:
        longest = max(self.lengths)
        return min(longest, self.sink + self.window) if self.window else longest

    def empty(self) -> bool:
        return False  # sequences join with their prompts

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def _fitted(buffer: mx.array, rows: int) -> mx.array:
    """The first ``rows`` rows, with free ones behind them where there are fewer."""
    return widened(buffer, rows, buffer) if buffer.shape[2] < rows else buffer[..., :rows, :]


def refuse_single(model: Any, sequences: Sequence[Sequence[Any]]) -> None:
    """Raise ModelError where caches of this model, empty ones too, cannot be batched."""
    kinds = {type(member) for caches in sequences for cache in caches for member in members_of(cache)}
    if odd := sorted(kind.__name__ for kind in kinds if kind not in MERGED):
        raise ModelError(f"sequences with {', '.join(odd)} layers cannot be decoded together")
    family = type(model).__module__.rsplit(".", 1)[-1]
    if ArraysCache in kinds and family not in RAGGED_FAMILIES:
        raise ModelError(f"recurrent layers of {family} do not take sequences of different lengths")


def merge(model: Any, sequences: Sequence[Sequence[Any]]) -> list[Any]:
    """Copy the caches of sequences, prompts computed; ModelError where a layer's cache cannot be batched."""
    refuse_single(model, sequences)
    return [_merged(layer) for layer in zip(*sequences, strict=True)]


def _merged(caches: Sequence[Any]) -> Any:
    if type(caches[0]) is CacheList:
        merged = CacheList()  # type: ignore[no-untyped-call]
        merged.caches = tuple(_merged(part) for part in zip(*(each.caches for each in caches), strict=True))
        return merged
    if type(caches[0]) is CodedKV:
        stores = zip(*(cache.stores for cache in caches), strict=True)
        return caches[0].over([_merged(store) for store in stores])
    if any(cache.empty() for cache in caches):
        raise ValueError("a sequence joins a batch after its prompt was computed")
    return (ArraysCache if type(caches[0]) is ArraysCache else RaggedKV).merge(caches)


def layout_of(model: Any, caches: Sequence[Any]) -> tuple[Any, ...] | None:
    """What sequences must have in common to share a batch, empty ones too; None where none can."""
    try:
        refuse_single(model, [caches])
    except ModelError:
        return None
    return tuple(_layout(cache) for cache in caches)


def _layout(cache: Any) -> tuple[Any, ...]:
    if type(cache) is CacheList:
        return tuple(_layout(inner) for inner in cache.caches)
    if type(cache) is CodedKV:
        return cache.code, cache.attended, *(_layout(store) for store in cache.stores)
    return (ArraysCache, len(cache.cache)) if type(cache) is ArraysCache else layout(cache)


def extend(caches: Sequence[Any], others: Sequence[Any]) -> None:
    """Add the sequences of a batch to those of another, layer by layer, in place."""
    for cache, other in zip(caches, others, strict=True):
        for member, joining in zip(members_of(cache), members_of(other), strict=True):
            member.extend(joining)


def extract(caches: Sequence[Any], row: int) -> list[Any]:
    """The caches of one sequence of a batch, a copy: it can go on alone, or join another batch."""
    return [cache.extract(row) for cache in caches]


class BatchTransaction(TransactionBase):
    """All caches of a batch, moved forward and back together."""

    def _rollback(self, member: Any) -> Any:
        return member if isinstance(member, RaggedKV) else super()._rollback(member)

    def commit(self, kept: Sequence[int]) -> None:
        """Keep the first ``kept[s]`` announced positions of sequence s; ValueError where that cannot be."""
        if self._open is None or not all(0 <= count <= self._open for count in kept):
            raise ValueError(f"cannot keep {list(kept)} of {self._open} positions")
        ragged = [each for each in self._rollbacks if isinstance(each, RaggedKV)]
        if ragged and len(kept) != len(ragged[0].lengths):
            raise ValueError(f"{len(kept)} counts for {len(ragged[0].lengths)} sequences")
        states = [each for each in self._rollbacks if isinstance(each, RecurrentRollback)]
        partly = any(count < self._open for count in kept)
        if partly and not all(state.divide_rows(kept) for state in states):
            raise ModelError("a recurrent layer changes its state where it cannot be replayed")
        for state in states:
            state.commit(0)
        for member in ragged:
            member.commit(kept)
        self._open = None

    def filter(self, rows: Sequence[int]) -> None:
        self._refuse_open()
        for cache in self.caches:
            cache.filter(list(rows))
