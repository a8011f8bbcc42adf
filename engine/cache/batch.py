"""Several sequences decoded together: caches merged after their prompts, and a transaction for all of them.

Each sequence keeps its own number of the block's positions. Keys and values are cut by a length a sequence;
recurrent states are replayed with mlx-lm's own machinery for prompts of different lengths (a mask, and
``lengths`` on the cache), projections being answered from the record as for a single sequence.

Not covered, and refused up front: mlx-lm's quantized and chunked caches, those that could only be carried,
and recurrent families whose update does not take lengths.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from engine.cache.coded import CodedKV
from engine.cache.ragged import RaggedKV
from engine.cache.recorder import Wiring
from engine.cache.recurrent import RecurrentRollback
from engine.cache.restored import RestoredKV
from engine.cache.ring import SlidingRing
from engine.cache.transaction import members_of
from engine.errors import ModelError

# mlx-lm modules whose recurrent layers heed a mask and `lengths` exactly; the tests go through this list.
RAGGED_FAMILIES = (
    "falcon_h1", "kimi_linear", "lfm2", "mamba2", "qwen3_5", "qwen3_5_moe", "qwen3_next",
)  # fmt: skip
MERGED = (KVCache, RestoredKV, SlidingRing, ArraysCache)


def refuse_single(model: Any, sequences: Sequence[Sequence[Any]]) -> None:
    """Raise ModelError where caches of this model, empty ones too, cannot be batched; see `merge`."""
    kinds = {type(member) for caches in sequences for cache in caches for member in members_of(cache)}
    if odd := sorted(kind.__name__ for kind in kinds if kind not in MERGED):
        raise ModelError(f"sequences with {', '.join(odd)} layers cannot be decoded together")
    family = type(model).__module__.rsplit(".", 1)[-1]
    if ArraysCache in kinds and family not in RAGGED_FAMILIES:
        raise ModelError(f"recurrent layers of {family} do not take sequences of different lengths")


def merge(model: Any, sequences: Sequence[Sequence[Any]]) -> list[Any]:
    """Caches of single sequences, each with its prompt computed and nothing carried, as caches of a batch.

    Args:
        model: the model they belong to.
        sequences: the caches of each sequence, from `new_caches` with the same headroom. They are copied.

    Raises:
        ModelError: a layer's cache cannot be batched; the message names it.
        ValueError: a sequence's caches are empty.
    """
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


def extract(caches: Sequence[Any], row: int) -> list[Any]:
    """The caches of one sequence of a batch, a copy: it can go on alone, or join another batch."""
    return [cache.extract(row) for cache in caches]


class BatchTransaction:
    """All caches of a batch, moved forward and back together. Close it to restore the model."""

    def __init__(self, model: Any, caches: Sequence[Any]) -> None:
        """Bind to the caches `merge` has made for the model."""
        self.caches = list(caches)
        members = [member for cache in caches for member in members_of(cache)]
        self._ragged = [member for member in members if isinstance(member, RaggedKV)]
        self._states = [member for member in members if type(member) is ArraysCache]
        self._wiring = Wiring.of(model) if self._states else None
        self._rollbacks = [
            RecurrentRollback(state, self._wiring.recorder(state)) for state in self._states if self._wiring
        ]
        rooms = [member.headroom for member in self._ragged if member.headroom is not None]
        self.room: int | None = min(rooms, default=None)
        """The most positions `begin` takes; None: any number."""
        self._open: int | None = None
        self._starts: list[list[int]] = []

    def begin(self, positions: int) -> None:
        """Open a transaction: exactly ``positions`` positions follow for every sequence.

        Raises:
            ValueError: one is open already, or there are more positions than `room`.
        """
        if self._open is not None:
            raise ValueError("a transaction is already open")
        if self.room is not None and positions > self.room:
            raise ValueError(f"{positions} pending positions do not fit the headroom of {self.room}")
        self._open = positions
        self._starts = [member.lengths for member in self._ragged]
        for rollback in self._rollbacks:
            rollback.begin(positions)

    def commit(self, kept: Sequence[int]) -> None:
        """Keep, of each sequence, the first so many of the positions announced to `begin`.

        Raises:
            ValueError: more than announced, or not one number a sequence; the transaction stays open.
            ModelError: a recurrent layer was not updated by a module that took its cache.
        """
        if self._open is None or not all(0 <= count <= self._open for count in kept):
            raise ValueError(f"cannot keep {list(kept)} of {self._open} positions")
        if any(len(kept) != len(starts) for starts in self._starts):
            raise ValueError(f"{len(kept)} counts for {len(self._starts[0])} sequences")
        if any(count < self._open for count in kept):
            for rollback in self._rollbacks:
                if not rollback.divide_rows(kept):
                    raise ModelError("a recurrent layer changes its state where it cannot be replayed")
        for rollback in self._rollbacks:
            rollback.commit(0)
        for member, starts in zip(self._ragged, self._starts, strict=True):
            member.truncate([start + count for start, count in zip(starts, kept, strict=True)])
        self._open = None

    def abort(self) -> None:
        """Restore the state of `begin`; without an open transaction, nothing."""
        if self._open is not None:
            for rollback in self._rollbacks:
                rollback.abort()
            for member, starts in zip(self._ragged, self._starts, strict=True):
                member.truncate(starts)
            self._open = None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Abort an open transaction when the block is left by an exception."""
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def filter(self, rows: Sequence[int]) -> None:
        """Keep these sequences, in this order, and drop the others.

        Raises:
            ValueError: a transaction is open.
        """
        if self._open is not None:
            raise ValueError("a transaction is open")
        for cache in self.caches:
            cache.filter(list(rows))

    def close(self) -> None:
        """Abort what is open and give the model's modules their classes back. Closing twice does nothing."""
        self.abort()
        if self._wiring is not None:
            self._wiring.release(self._states)
            self._wiring = None
