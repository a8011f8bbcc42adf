"""How long to wait between two looks at the queue: hardly after activity, longer the longer it is idle.

A remote that fails is asked ever more seldom. On a busy machine a look takes long, and looking all the time
would keep it busy: but for the first moments on a local remote, a pause is not shorter than the look before.
"""

from __future__ import annotations

from collections.abc import Callable

IDLE_S = 5.0
FAST_S = 0.1
FAST_WINDOW_S = 20.0
# On a local remote, just after activity.
FASTEST_S = 0.01
LONGEST_FASTEST_S = 0.03
FASTEST_WINDOW_S = 2.0
MAX_BACKOFF_S = 60.0


class Polling:
    """The pace of one runner.

    Args:
        idle_s: Longest pause on an idle queue.
        local: Whether the remote is on this machine.
        clock: Monotonic seconds.
    """

    def __init__(self, *, idle_s: float, local: bool, clock: Callable[[], float]) -> None:
        self._idle_s = idle_s
        self._local = local
        self._clock = clock
        self._active_at = clock()
        self._look_s = 0.0
        self.failures = 0

    def active(self) -> None:
        """Something was done: more may follow."""
        self._active_at = self._clock()

    def calm(self) -> None:
        """Nothing can be done for now, although there is something: looks as on an idle queue."""
        self._active_at = self._clock() - FAST_WINDOW_S - 4 * self._idle_s

    def looked(self, seconds: float) -> None:
        """A look took so long."""
        self._look_s = seconds

    @property
    def is_fast(self) -> bool:
        """Whether the last activity is so fresh that looks follow each other fast."""
        return not self.failures and self._clock() - self._active_at < FAST_WINDOW_S

    def pause(self) -> float:
        """Seconds until the next look."""
        if self.failures:
            return min(self._idle_s * (1 << min(self.failures - 1, 8)), MAX_BACKOFF_S)
        quiet = self._clock() - self._active_at
        if self._local and quiet < FASTEST_WINDOW_S:
            return min(max(FASTEST_S, self._look_s), LONGEST_FASTEST_S)
        if quiet < FAST_WINDOW_S:
            return max(FAST_S, self._look_s)
        # What a first request waits at most: the look that finds it and its claim are part of the interval.
        longest = max(self._idle_s / 2, self._idle_s - 5 * self._look_s)
        growing = max(FAST_S, (quiet - FAST_WINDOW_S) / 4)
        return max(min(longest, growing), min(self._look_s, self._idle_s))
