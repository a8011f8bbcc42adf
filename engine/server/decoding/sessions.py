"""Sessions kept between requests, so that the next turn of a conversation computes only what is new.

A session belongs to a model, a KV channel and a drafter: what one channel keeps is of no use to another. A
request takes the idle session of its kind that holds the most of its prompt. One that holds other text
mostly, its mark included, is left to whoever comes back to it, as long as there is room. The least recently
used go first, those that nobody came back to for long go too, and nothing is kept of a request that failed.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.draft_length import DraftLength
from engine.drafters.base import Drafter
from engine.session import Session

logger = logging.getLogger(__name__)
LIKENESS = 0.5  # of what a session holds must be of the prompt, so that it is taken while there is room


@dataclass(frozen=True)
class Key:
    """What sessions of one kind have in common.

    Attributes:
        model: the registry's name.
        channel: the KV channel's name.
        drafter: of `engine.server.decoding.work.Drafting`.
        owner: whose key the requests came with: how much is held of a prompt would tell others what was said.
    """

    model: str
    channel: str
    drafter: str
    owner: str = ""


@dataclass
class Kept:
    """A session, its drafter, and what its draft length has learned.

    Attributes:
        key: which kind it is of.
        session: open.
        drafter: bound to the session's target; serves this session alone.
        draft length: that learns from all its requests.
        used: when its last request ended, seconds of the caller's clock.
    """

    key: Key
    session: Session
    drafter: Drafter | None
    draft_length: DraftLength
    used: float = field(default=0.0)

    @property
    def nbytes(self) -> int:
        """Bytes of its keys and values, and of its drafter's."""
        caches = sum(int(cache.nbytes) for cache in self.session.caches) + self.session.mark_nbytes
        return caches + (self.drafter.nbytes if self.drafter is not None else 0)

    def common(self, prompt: Sequence[int]) -> int:
        """How many tokens at the beginning of a prompt it holds."""
        held = self.session.tokens
        shorter = min(len(held), len(prompt))
        return next((i for i in range(shorter) if held[i] != prompt[i]), shorter)


class Sessions:
    """Idle sessions; used by the engine's thread alone."""

    def __init__(self, most: int, most_bytes: int | None, seconds: float) -> None:
        """Keep some.

        Args:
            most: idle sessions at most; 0 keeps none.
            most_bytes: of all idle sessions; None for no bound.
            seconds: after which an unused one is closed.
        """
        self._most, self._most_bytes, self._seconds = most, most_bytes, seconds
        self._idle: list[Kept] = []  # the least recently used first

    def __len__(self) -> int:
        return len(self._idle)

    @property
    def nbytes(self) -> int:
        """Bytes of all idle sessions."""
        return sum(kept.nbytes for kept in self._idle)

    def take(self, key: Key, prompt: Sequence[int], make: Callable[[], Kept]) -> Kept:
        """The session that suits a prompt best; it is the caller's until `give_back`.

        Args:
            key: of the kind wanted.
            prompt: token ids.
            make: opens a new one.
        """
        own = [kept for kept in self._idle if kept.key == key]
        best = max(own, key=lambda kept: kept.common(prompt), default=None)
        if best is not None:
            common = best.common(prompt)
            alike = common >= LIKENESS * len(best.session.tokens) or common >= best.session.marked > 0
            if alike or len(self._idle) >= self._most:
                self._idle.remove(best)
                return best
        return make()

    def give_back(self, kept: Kept, now: float) -> None:
        """Its request has ended, at this time of the caller's clock."""
        kept.used = now
        self._idle.append(kept)
        while len(self._idle) > self._most or (
            self._most_bytes is not None and self.nbytes > self._most_bytes
        ):
            close_quietly(self._idle.pop(0))

    def expire(self, now: float) -> bool:
        """Close what nobody used for long; whether there was any."""
        old = [kept for kept in self._idle if now - kept.used >= self._seconds]
        for kept in old:
            self._idle.remove(kept)
            close_quietly(kept)
        return bool(old)

    def close(self, model: str | None = None) -> None:
        """Close all, or those of one model."""
        for kept in [kept for kept in self._idle if model in {None, kept.key.model}]:
            self._idle.remove(kept)
            close_quietly(kept)


def close_quietly(kept: Kept) -> None:
    """Close a session; where that fails, others are not to suffer for it, and the log has it."""
    try:
        kept.session.close()
    except Exception:
        logger.exception("a session cannot be closed")
