"""Recurrent states (gated delta, state space, short convolution): the old state and a replayed update."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from engine.cache.recorder import Recorder
from engine.cache.rollback import Snapshot


class RecurrentRollback:
    """An `ArraysCache`, whose arrays are replaced as a whole by every forward."""

    def __init__(self, cache: Any, recorder: Recorder) -> None:
        self._cache = cache
        self._recorder = recorder
        self._snapshot: Snapshot | None = None
        self._before: list[Any] = []  # the arrays at `begin`, to see which ones are replaced

    def begin(self, positions: int) -> None:
        """Keep the state, and record how more than one position change it."""
        self._snapshot, self._before = Snapshot(self._cache), list(self._cache.cache)
        if positions > 1:
            self._recorder.start(positions)

    def divide(self, kept: int) -> bool:
        """Put the old state back and replay the first ``kept`` positions.

        Returns:
            False where the record does not explain what happened to the state: the update was made outside
            of any module that was called with this cache. The state of `begin` is to be restored then.
        """
        return self._replayed(lambda: self._recorder.replay(kept))

    def divide_rows(self, kept: Sequence[int]) -> bool:
        """The same for a batch: the first ``kept[s]`` positions of sequence s."""
        if self._recorder.positions:
            return self._replayed(lambda: self._recorder.replay_rows(kept))
        if self._snapshot is None:
            return False
        after = list(self._cache.cache)  # of a single position: the new state or the old one
        self._snapshot.restore()
        pairs = zip(self._cache.cache, after, strict=True)
        self._cache.cache = [_chosen(kept, new, old) for old, new in pairs]
        return True

    def _replayed(self, replay: Callable[[], bool]) -> bool:
        if self._snapshot is None:
            return False
        after = list(self._cache.cache)
        self._snapshot.restore()
        restored = list(self._cache.cache)
        if not replay():
            return False
        slots = zip(self._before, after, restored, self._cache.cache, strict=True)
        return all(then is before or now is not old for before, then, old, now in slots)

    def commit(self, dropped: int) -> None:  # noqa: ARG002 - `divide` has dropped them
        """Forget the record and the old state."""
        self._recorder.clear()
        self._snapshot, self._before = None, []

    def abort(self) -> None:
        """Put the old state back."""
        self._recorder.clear()
        if self._snapshot is not None:
            self._snapshot.restore()
            self._snapshot, self._before = None, []

    def rewindable(self, count: int) -> bool:
        """Older states are not kept."""
        return count == 0

    def rewind(self, count: int) -> None:
        """Nothing to do for the only count that is rewindable."""


def _chosen(kept: Sequence[int], new: mx.array | None, old: mx.array | None) -> mx.array | None:
    """The new state of sequences that keep something, [S, …], the old one of the others."""
    if new is None or old is None:
        return new
    return mx.where(mx.array(list(kept)).reshape(-1, *[1] * (new.ndim - 1)) > 0, new, old)
