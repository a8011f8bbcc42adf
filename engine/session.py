"""One sequence's state: the target's caches, the drafter's memory, and which tokens both hold.

A session can be decoded in again: what a new prompt has in common with the tokens held is not computed twice,
as far as caches and drafter can go back to the end of the common part. Where they cannot, a snapshot taken
there brings any number of sessions to that point, also at the same time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.cache.policy import NATIVE, KVPolicy, RestoredKV
from engine.cache.saved import fill, state_of
from engine.cache.transaction import Transaction, new_caches, resident, rewindable
from engine.device import wait
from engine.drafters.base import Drafter
from engine.restoration.session import RestorationPlan, restoration_for
from engine.target.attention import CodedAttention
from engine.target.compiled import CompiledForward
from engine.target.model import Target

COMPARED = 512  # tokens at once; prompts are long and begin alike


@dataclass(frozen=True)
class SessionSnapshot:
    """What a session held: handles on its arrays, so that nothing is copied until a session goes on."""

    tokens: tuple[int, ...]
    caches: tuple[Any, ...]  # of all layers, outside of a transaction
    uncached: int  # of the tokens, the last ones, which no cache holds
    drafter: Drafter | None  # a fork that observes nothing more

    def common(self, prompt: Sequence[int]) -> int:
        """Count the tokens of a prompt that a session which begins here would keep; see `Session.resume`."""
        common = common_length(self.tokens, prompt[:-1])
        return common if self.rewindable(len(self.tokens) - common) else 0

    def rewindable(self, count: int) -> bool:
        """Whether the last ``count`` tokens can be forgotten."""
        drafter = self.drafter is None or self.drafter.rewindable(count)
        return drafter and rewindable(self.caches, max(count - self.uncached, 0))

    def state(self) -> dict[str, Any]:
        """What `filled` needs besides the tokens: a tree that `engine.cache.saved` can save."""
        drafter = self.drafter.state() if self.drafter else None
        return {"caches": state_of(self.caches), "uncached": self.uncached, "drafter": drafter}

    @property
    def nbytes(self) -> int:
        """Bytes of caches and drafter, those that other snapshots and sessions hold too included."""
        return resident(self.caches)[1] + (self.drafter.nbytes if self.drafter else 0)


def filled(empty: SessionSnapshot, tokens: Sequence[int], state: Mapping[str, Any]) -> SessionSnapshot:
    """The snapshot that had this state, from one of an empty session of the same kind, which is used up."""
    fill(empty.caches, state["caches"])
    if empty.drafter is not None:
        empty.drafter.restore(tokens, state["drafter"])
    return SessionSnapshot(tuple(tokens), empty.caches, state["uncached"], empty.drafter)


class Session(AbstractContextManager["Session"]):
    """The state of one sequence; `close` it, or use it as a context."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        headroom: int,
        caches: list[Any] | None = None,
        compiled: bool = True,
        policy: KVPolicy = NATIVE,
        restoration: RestorationPlan | None = None,
    ) -> None:
        """Begin an empty sequence, whose drafter, bound to ``target``, serves it alone until it is closed.

        ``headroom`` is the largest block that will be verified; ``caches`` are empty ones of the policy, to
        look into until the session starts over; ``compiled`` allows compiled graphs for short blocks.
        """
        self.target, self.drafter, self.headroom, self.policy = target, drafter, headroom, policy
        self._turn = object()  # identifies the continuation that uses the session
        self.tokens: list[int] = []  # committed: the caches hold all but the last `transaction.uncached`
        self._restoration_plan, self._compiles = restoration, compiled
        if drafter is not None:
            drafter.start()
        self._open(caches or new_caches(target.model, headroom, policy))

    def _open(self, caches: list[Any]) -> None:
        target, drafter = self.target, self.drafter
        with ExitStack() as opened:  # what fails half way leaves the model as it was
            self.transaction = Transaction(target.model, caches)
            opened.callback(lambda: self.transaction.close())  # noqa: PLW0108 - the one of then
            if self.policy.attended:
                opened.callback(CodedAttention(target.model).close)
            self._restoration = restoration_for(self._restoration_plan, target, self.caches)
            if self._restoration is not None:
                opened.callback(self._restoration.close)
            self._hooks = (
                target.hook_layers(drafter.target_layers) if drafter and drafter.target_layers else None
            )
            if self._hooks is not None:
                opened.callback(self._hooks.close)
            ids = self._hooks.ids if self._hooks else ()
            self._compiled = CompiledForward.of(target, ids, self.caches) if self._compiles else None
            self._opened = opened.pop_all()

    def lend(self) -> list[Any]:
        """Hand the caches over to a batch; until `adopt` nothing can be decoded here."""
        caches = self.caches
        if self.drafter is not None:
            self.drafter.rewind(0)  # drafts may have been asked for
        self.close()
        self.transaction = Transaction(self.target.model, [])
        return caches

    def adopt(self, caches: list[Any]) -> None:
        """Go on with caches that hold the session's tokens, as they come back from a batch."""
        if self.drafter is not None:
            self.drafter.rewind(0)  # drafts may have been asked for there
        self._open(caches)

    def close(self) -> None:
        """Restore the target's layers; the caches may still be read."""
        self._opened.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def caches(self) -> list[Any]:
        """The caches of all layers."""
        return self.transaction.caches

    @property
    def restored(self) -> int:
        """Positions times layers whose keys and values were replaced."""
        return sum(cache.replaced for cache in self.caches if isinstance(cache, RestoredKV))

    @property
    def uncached(self) -> list[int]:
        """Committed tokens the caches do not hold; they go in front of the next forward."""
        count = self.transaction.uncached
        return self.tokens[len(self.tokens) - count :] if count else []

    def resume(self, prompt: Sequence[int]) -> int:
        """Keep what is held of a prompt, its last token excepted, and return how many tokens that is."""
        common = common_length(self.tokens, prompt[:-1])
        surplus = len(self.tokens) - common
        if surplus:
            restored = self._restoration is None or self._restoration.rewind(common)
            if not restored or not self.transaction.rewind(surplus):
                self._start_over()
                return 0
        del self.tokens[common:]
        # by 0, too: a turn that was left midway had drafts asked for
        if self.drafter is not None and not self.drafter.rewind(surplus):
            self._start_over()
            return 0
        return common

    def snapshot(self) -> SessionSnapshot:
        """Return what is held now, for `restore`; ends what is open of a continuation that was left midway.

        Raises ValueError for a session whose policy restores evicted positions.
        """
        if self._restoration is not None:
            raise ValueError("a session with restored positions has no snapshots")
        self.transaction.abort()
        if self.drafter is not None:
            self.drafter.rewind(0)  # forgets a proposal on its way
        drafter = self.drafter.fork() if self.drafter is not None else None
        # copies of arrays are handles: nothing is copied until one side writes
        caches = tuple(deepcopy(self.caches))
        return SessionSnapshot(tuple(self.tokens), caches, self.transaction.uncached, drafter)

    def restore(self, snapshot: SessionSnapshot) -> None:
        """Hold what a session of the same target, policy, headroom and drafter held; the snapshot is left as
        it is, for any number of sessions. A continuation of this one is ended.
        """
        self._turn = object()
        self._replace(deepcopy(list(snapshot.caches)))
        self.transaction.uncached = snapshot.uncached
        self.tokens[:] = snapshot.tokens
        if snapshot.drafter is not None:
            self.drafter = snapshot.drafter.fork()

    def prefill(
        self,
        tokens: Sequence[int],
        read: Callable[[mx.array], mx.array] | None = None,
        *,
        settle: Callable[..., None] = wait,
    ) -> mx.array | None:
        """Compute a part of a prompt, for good; where that fails, the session starts over.

        Returns what ``read`` makes of its logits [N, V], which nothing else computes. ValueError for one with
        a restoration, whose forwards have none. With ``settle=launch`` nothing is waited for.
        """
        if read is not None and self._restoration is not None:
            raise ValueError("a session that restores keys and values has no logits of its prompt")
        found = None
        restoration = self._restoration
        size = restoration.chunk if restoration else len(tokens)
        for done in range(0, len(tokens), size):
            part, uncached = tokens[done : done + size], self.uncached
            try:
                fed = mx.array([[*uncached, *part]], mx.int32)
                if restoration is None:
                    logits, rows = self.forward(fed)
                    found = None if read is None else read(logits[0, len(uncached) :])
                else:  # and restore what this pushes out of the window
                    rows = restoration.forward(fed, self.caches, self._hooks, len(part), len(self.tokens))
                self.transaction.settle()
                waiting = restoration.waiting if restoration else None
                # not for the rows: what a drafter alone reads of the last layers is computed when it drafts
                settle([cache.state for cache in self.caches], waiting, found)
            except BaseException:
                self._start_over()
                raise
            self.note(part, rows if rows is None else rows[:, len(uncached) :])
            mx.clear_cache()
        return found

    def forward(self, tokens: mx.array) -> tuple[mx.array, mx.array | None]:
        """One forward over [1, N] tokens: logits [1, N, V] and hidden states."""
        if self._compiled is not None and tokens.shape[1] <= self.headroom:
            most = self.transaction.open_positions or self.headroom
            done = self._compiled.forward(tokens, self.caches, most)
            if done is not None:
                return done
        return self.target.forward(tokens, self.caches, self._hooks)

    def commit(self, tokens: Sequence[int], rows: mx.array | None) -> None:
        """Keep the positions of these N tokens; ``rows`` are hidden states, [1, at least N, K·hidden]."""
        self.transaction.commit(self.transaction.uncached + len(tokens))
        self.note(tokens, rows if rows is None else rows[:, : len(tokens)])

    @contextmanager
    def guarded(self) -> Iterator[Callable[[], None]]:
        """Use the session for one continuation; the check raises ValueError once another starts."""
        self.transaction.abort()
        self._turn = turn = object()

        def check() -> None:
            if self._turn is not turn:
                raise ValueError("this continuation has ended: another one was started in its session")

        try:
            yield check
        except BaseException:
            if self._turn is turn:
                self.transaction.abort()
            raise

    def note(self, tokens: Sequence[int], rows: mx.array | None) -> None:
        """Note committed tokens [N] and their hidden states, [1, N, K·hidden]."""
        self.tokens.extend(tokens)
        if self.drafter is not None:
            self.drafter.observe(tokens, rows)

    def _start_over(self) -> None:
        self._replace(new_caches(self.target.model, self.headroom, self.policy))
        self.tokens.clear()
        if self._restoration is not None:
            self._restoration.start()
        if self.drafter is not None:
            self.drafter.start()

    def _replace(self, caches: list[Any]) -> None:
        before = self.transaction
        before.abort()
        self.transaction = Transaction(self.target.model, caches)
        before.close()  # not earlier: others that listen to the model's modules would be closed with it


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Count the tokens that both begin with."""
    shorter = min(len(left), len(right))
    for start in range(0, shorter, COMPARED):
        end = min(start + COMPARED, shorter)
        ours, theirs = list(left[start:end]), list(right[start:end])
        if ours != theirs:
            same = [one == other for one, other in zip(ours, theirs, strict=True)]
            return start + same.index(False)
    return shorter
