"""When a claim of somebody else's may be taken over: its heartbeat did not go on for its lease.

Leases are judged by the observer's own monotonic clock since it first saw a heartbeat: clocks need not agree.
Whether a claim must be respected at all is `bridge.runner.peers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bridge.bus.handles import Held
from bridge.protocol.result import RunStatus

DEFAULT_LEASE_S = 120.0
# A squatted claim must not hold a request for longer than this, whatever lease it asks for.
MAX_LEASE_S = 900.0


@dataclass(frozen=True)
class Silent:
    """A claim that may be replaced: its heartbeat stopped for longer than its lease, or it is squatted.

    Attributes:
        ref: Where it stands.
        commit: What that ref holds.
        attempt: How often the request has been claimed, as far as that is known.
        squatted: It is no known runner's, and its lease may still run.
    """

    ref: str
    commit: str
    attempt: int
    squatted: bool = False


class LeaseWatch:
    """Notices claims that fell silent, by this process's own clock.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[str, float]] = {}
        # The highest attempt and beat of each request that a known runner signed.
        self._news: dict[str, tuple[int, int]] = {}

    def observe(
        self, nonce: str, held: Held, status: RunStatus | None, *, signed: bool = False
    ) -> Silent | None:
        """Note what a claim holds now; a `Silent` when that has not changed for its lease.

        Args:
            nonce: The request.
            held: The claim's ref and the commit it holds.
            status: What it says; None: unreadable, then the default lease counts.
            signed: A known runner signed it. Then only a heartbeat after the last one renews the lease: an
                old one that somebody put back does not.
        """
        now = self._clock()
        before = self._seen.get(nonce)
        if before is None or (before[0] != held.commit and self._is_news(nonce, status, signed)):
            self._seen[nonce] = (held.commit, now)
            self._note(nonce, status, signed)
            return None
        lease = DEFAULT_LEASE_S if status is None else min(status.lease_s, MAX_LEASE_S)
        if now - before[1] < lease:
            return None
        return Silent(held.ref, held.commit, 1 if status is None else status.attempt)

    def attempts(self, nonce: str) -> int:
        """How often a request has been claimed by known runners, as far as was seen."""
        return self._news.get(nonce, (0, 0))[0]

    def forget(self, still_pending: Sequence[str]) -> None:
        """Drop what is known of claims of requests that no longer wait."""
        kept = set(still_pending)
        self._seen = {nonce: seen for nonce, seen in self._seen.items() if nonce in kept}
        self._news = {nonce: news for nonce, news in self._news.items() if nonce in kept}

    def _is_news(self, nonce: str, status: RunStatus | None, signed: bool) -> bool:
        if not signed or status is None:
            return True
        return (status.attempt, status.beat) > self._news.get(nonce, (0, -1))

    def _note(self, nonce: str, status: RunStatus | None, signed: bool) -> None:
        if signed and status is not None:
            self._news[nonce] = max(self._news.get(nonce, (0, -1)), (status.attempt, status.beat))
