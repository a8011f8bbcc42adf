"""begin(n) → the verify forward appends n positions → commit(k) keeps the first k: for all layers at once.

A literal table says how each kind of cache is rolled back. A cache that is not in it is refused before any
work, because speculation on it could not be undone. Recurrent layers and pinned sinks are not covered yet.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from engine.cache.ring import SlidingRing
from engine.errors import ModelError


class Journal(Protocol):
    """How one layer's cache takes back positions."""

    def begin(self, positions: int) -> None:
        """Up to ``positions`` rows follow."""

    def commit(self, dropped: int) -> None:
        """Forget the last ``dropped`` rows, keep the others for good."""

    def abort(self) -> None:
        """Forget every row since `begin`."""


class TrimJournal:
    """Caches that grow at the end and whose `trim` is exact: plain and quantized keys and values."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._start: int | None = None

    def begin(self, positions: int) -> None:  # noqa: ARG002 - such a cache grows without limit
        """Remember where the transaction starts."""
        self._start = self._cache.offset

    def commit(self, dropped: int) -> None:
        """Trim the dropped rows."""
        self._cache.trim(dropped)
        self._start = None

    def abort(self) -> None:
        """Trim what has arrived since `begin`, which may be nothing."""
        if self._start is not None:
            self._cache.trim(self._cache.offset - self._start)
            self._start = None


def _itself(cache: SlidingRing) -> Journal:
    return cache


JOURNALS: dict[type, Any] = {KVCache: TrimJournal, QuantizedKVCache: TrimJournal, SlidingRing: _itself}


class Transaction:
    """All layer caches of one sequence, moved forward and back together."""

    def __init__(self, caches: Sequence[Any]) -> None:
        """Bind to the caches of a model, one per layer.

        Raises:
            ModelError: a cache cannot be rolled back.
        """
        self.caches = list(caches)
        if odd := sorted({type(cache).__name__ for cache in caches if type(cache) not in JOURNALS}):
            raise ModelError(f"speculation cannot be undone on a target with {', '.join(odd)} layers")
        self._journals: list[Journal] = [JOURNALS[type(cache)](cache) for cache in caches]
        self._open: int | None = None

    @property
    def offset(self) -> int:
        """Positions in the caches."""
        return int(self.caches[0].offset)

    def begin(self, positions: int) -> None:
        """Open a transaction of at most ``positions`` positions."""
        if self._open is not None:
            raise ValueError("a transaction is already open")
        self._open = positions
        try:
            for journal in self._journals:
                journal.begin(positions)
        except ValueError:
            self.abort()
            raise

    def commit(self, kept: int) -> None:
        """Keep the first ``kept`` of the positions announced to `begin` and drop the others."""
        if self._open is None or not 0 <= kept <= self._open:
            raise ValueError(f"cannot keep {kept} of {self._open} positions")
        for journal in self._journals:
            journal.commit(self._open - kept)
        self._open = None

    def abort(self) -> None:
        """Restore the state of `begin`; without an open transaction, nothing."""
        if self._open is not None:
            for journal in self._journals:
                journal.abort()
            self._open = None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Abort an open transaction when the block is left by an exception."""
        try:
            yield
        except BaseException:
            self.abort()
            raise


def new_caches(model: Any, headroom: int) -> list[Any]:
    """The model's own caches, with rings of ours in place of mlx-lm's rotating ones.

    Args:
        model: an mlx-lm language model.
        headroom: the largest block that will be verified.

    Raises:
        ModelError: a rotating cache pins sink entries, which the ring does not.
    """
    caches = []
    for cache in make_prompt_cache(model):
        if type(cache) is RotatingKVCache:
            if cache.keep:
                raise ModelError(f"a rotating cache with {cache.keep} pinned entries is not supported")
            caches.append(SlidingRing(cache.max_size, headroom))
        else:
            caches.append(cache)
    return caches


def resident(caches: Sequence[Any]) -> tuple[dict[str, int], int]:
    """Class names with their counts, and the sum of ``nbytes``, of the caches as they are now."""
    names = [type(cache).__name__ for cache in caches]
    return {name: names.count(name) for name in sorted(set(names))}, sum(int(c.nbytes) for c in caches)
