"""When a claim of somebody else's may be taken over: its heartbeat did not go on for its lease.

Leases are judged by the observer's own monotonic clock since it first saw a heartbeat: clocks need not agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bridge.bus.handles import Held
from bridge.result import RunStatus

DEFAULT_LEASE_S = 120.0
# A squatted claim must not hold a request for longer than this, whatever lease it asks for.
MAX_LEASE_S = 900.0


@dataclass(frozen=True)
class Silent:
    """A claim whose heartbeat stopped for longer than its lease."""

    ref: str
    commit: str
    attempt: int


class LeaseWatch:
    """Notices claims that fell silent, by this process's own clock.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[str, float]] = {}

    def observe(self, nonce: str, held: Held, status: RunStatus | None) -> Silent | None:
        """Note what a claim holds now; a `Silent` when that has not changed for its lease.

        Args:
            nonce: The request.
            held: The claim's ref and the commit it holds.
            status: What it says; None: unreadable, then the default lease counts.
        """
        now = self._clock()
        before = self._seen.get(nonce)
        if before is None or before[0] != held.commit:
            self._seen[nonce] = (held.commit, now)
            return None
        lease = DEFAULT_LEASE_S if status is None else min(status.lease_s, MAX_LEASE_S)
        if now - before[1] < lease:
            return None
        return Silent(held.ref, held.commit, 1 if status is None else status.attempt)

    def forget(self, still_claimed: Sequence[str]) -> None:
        """Drop what is known of claims that are no longer there."""
        self._seen = {nonce: seen for nonce, seen in self._seen.items() if nonce in set(still_claimed)}
