"""Renews a claim while a job runs, and shows how far it is.

One thread owns the claim until `stop`. A claim that somebody else took sets `lost`; a remote that is away is
tried again at the next beat.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from bridge.bus.claims import Beat, Claim
from bridge.errors import BusError, LeaseLost
from bridge.evidence.redact import redact
from bridge.result import Phase, Progress

TAIL_LINES = 12
# Phases of a short job follow each other faster than they can be pushed.
_SETTLE_S = 0.05
_PROGRESS = re.compile(r"progress (\d{1,9})/(\d{1,9})(?: (.*))?")


class Heartbeat:
    """Beats every `interval_s`, and at once when the phase changes.

    Args:
        claim: The claim to renew; not touched by anyone else until `stop` returned.
        interval_s: Seconds between beats.
        secrets: Values that must not appear in the lines shown.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        claim: Claim,
        *,
        interval_s: float,
        secrets: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._claim = claim
        self._interval_s = interval_s
        self._secrets = secrets
        self._clock = clock
        self._started = clock()
        self._phase = Phase.CLAIMED
        self._progress: Progress | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._lost = threading.Event()
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    @property
    def lost(self) -> bool:
        """Whether somebody else holds the claim now: the job must stop, its result is not ours to give."""
        return self._lost.is_set()

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def enter(self, phase: Phase) -> None:
        """Say which phase the job is in."""
        self._phase = phase
        self._wake.set()

    def line(self, text: str) -> None:
        """Take a line of the job's output: progress, or a line of the log's tail."""
        match = _PROGRESS.fullmatch(text.rstrip())
        if match is None:
            self._tail.append(redact(text.encode(), self._secrets).decode("utf-8", "replace")[:500])
        else:
            done, total, step = int(match[1]), int(match[2]), match[3] or ""
            self._progress = Progress(done=min(done, total), total=total, step=step[:200])

    def stop(self) -> None:
        """End beating; the claim is free to be used by the caller when this returns."""
        self._ending.set()
        self._wake.set()
        self._thread.join()

    def _beat(self) -> None:
        while True:
            self._wake.wait(self._interval_s)
            # Cleared before `_ending` is asked: a stop that comes between the two is not slept through.
            self._wake.clear()
            if self._ending.wait(_SETTLE_S):
                return
            elapsed = self._clock() - self._started
            try:
                self._claim.beat(Beat(self._phase, elapsed, self._progress, tuple(self._tail)))
            except LeaseLost:
                self._lost.set()
                return
            except (BusError, OSError):  # the next beat may find the remote, or room on the disk, again
                continue
