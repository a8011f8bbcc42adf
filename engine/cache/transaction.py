"""begin(n) → the verify forward appends n positions → commit(k) keeps the first k: for all layers at once.

`engine.cache.rollback` has how each kind of cache goes back. One that can only be put back as it was leaves
the k tokens **uncached**: committed, but held by no cache. The caller puts them in front of the next forward;
`begin` and `commit` count them. Nothing here waits for the device.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlx_lm.models.cache import ArraysCache, CacheList

from engine.cache.coded import CodedKV
from engine.cache.policy import NATIVE, KVPolicy
from engine.cache.ring import SlidingRing
from engine.cache.rollback import RecurrentRollback, Wiring, rollback_of


class TransactionBase:
    """What transactions of one sequence and of a batch have in common."""

    def __init__(self, model: Any, caches: Sequence[Any]) -> None:
        """Listen to the model's modules, until `close`, where a state can only go back by a replay."""
        self.caches = list(caches)
        members = {id(member): member for cache in caches for member in members_of(cache)}.values()
        self._members = list(members)
        self._wiring = Wiring.of(model) if ArraysCache in map(type, members) else None
        self._rollbacks = [self._rollback(member) for member in members]
        bounds = [member.headroom for member in members if getattr(member, "headroom", 0)]
        # The most positions `begin` takes, those of uncached tokens included; None: any number.
        self.open_positions: int | None = min(bounds, default=None)
        self.uncached = 0  # committed tokens that no cache holds
        self._open: int | None = None

    def _rollback(self, member: Any) -> Any:
        if type(member) is ArraysCache and self._wiring is not None:
            return RecurrentRollback(member, self._wiring)
        return rollback_of(member)

    def begin(self, positions: int) -> None:
        """Announce exactly ``positions`` positions, those of uncached tokens first; ValueError: too many."""
        if self._open is not None:
            raise ValueError("a transaction is already open")
        if positions <= self.uncached:
            text = f"{positions} positions do not suffice for {self.uncached} uncached tokens and a new one"
            raise ValueError(text)
        self._open = positions
        try:
            for rollback in self._rollbacks:
                rollback.begin(positions)
        except ValueError:
            self.abort()
            raise

    def abort(self) -> None:
        if self._open is not None:
            for rollback in self._rollbacks:
                rollback.abort()
            self._open = None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def _refuse_open(self) -> None:
        if self._open is not None:
            raise ValueError("a transaction is open")

    def close(self) -> None:
        """Abort what is open and give the model's modules their classes back; idempotent."""
        self.abort()
        if self._wiring is not None:
            self._wiring.release(self._members)
            self._wiring = None


class Transaction(TransactionBase):
    """All caches of one sequence, moved forward and back together. Close it to restore the model."""

    def commit(self, kept: int) -> None:
        """Keep the first ``kept`` announced positions; ValueError, and still open, for another number."""
        if self._open is None or not self.uncached <= kept <= self._open:
            raise ValueError(f"cannot keep {kept} of {self._open} positions; {self.uncached} are uncached")
        dropped = self._open - kept
        nothing_new = kept == self.uncached
        if dropped and (nothing_new or not all(rollback.divide(kept) for rollback in self._rollbacks)):
            self.abort()
            self.uncached = kept
            return
        for rollback in self._rollbacks:
            rollback.commit(dropped)
        self.uncached = 0
        self._open = None

    def settle(self) -> None:
        """A forward outside of any transaction was built, behind the uncached tokens."""
        self.uncached = 0
        for rollback in self._rollbacks:
            if type(rollback) is SlidingRing:
                rollback.release()

    def rewind(self, count: int) -> bool:
        """Forget the last ``count`` committed tokens; False, and no change, where a layer no longer can."""
        self._refuse_open()
        rows = max(count - self.uncached, 0)
        if not all(rollback.rewindable(rows) for rollback in self._rollbacks):
            return False
        for rollback in self._rollbacks:
            rollback.rewind(rows)
        self.uncached -= count - rows
        return True


def rewindable(caches: Sequence[Any], count: int) -> bool:
    """Whether caches outside of a transaction can forget the last ``count`` positions they hold."""
    members = (member for cache in caches for member in members_of(cache))
    return all(rollback_of(member).rewindable(count) for member in members)


def members_of(cache: Any) -> Iterator[Any]:
    """The caches inside a `CacheList` and the stores of a coded one, or the cache itself."""
    if type(cache) is CacheList:
        for inner in cache.caches:
            yield from members_of(inner)
    elif type(cache) is CodedKV:
        yield from cache.stores
    else:
        yield cache


def new_caches(model: Any, headroom: int, policy: KVPolicy = NATIVE) -> list[Any]:
    """Empty caches for one sequence of an mlx-lm model; ``headroom`` is the largest block to verify."""
    return policy.new_caches(model, headroom)


def resident(caches: Sequence[Any]) -> tuple[dict[str, int], int]:
    """Class names with their counts, and the sum of ``nbytes``, of the caches."""
    counts = Counter(type(cache).__name__ for cache in caches)
    return dict(sorted(counts.items())), sum(int(cache.nbytes) for cache in caches)
