"""Keeps a request ours while its job runs, shows how far it is, and hears who wants it stopped.

One thread owns the hold until `stop`. One that somebody else took sets `lost`, a wish to stop sets `wish`; a
remote that is away is tried again at the next beat.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable

from bridge.bus.holding import Beat
from bridge.errors import BusError, LeaseLost, MachineError, described
from bridge.evidence.redact import Secrets
from bridge.protocol.result import Phase, Progress
from bridge.runner.hold import Hold

TAIL_LINES = 12
_LINE = 500  # characters of a line that are shown
# Phases of a short job follow each other faster than anybody could see them.
_SETTLE_S = 0.25
_LOOK_S = 1.5
_PROGRESS = re.compile(r"progress (\d{1,9})/(\d{1,9})(?: (.*))?")


class Heartbeat:
    """Beats every `interval_s`, and shortly after the phase changed.

    Args:
        hold: What is told of each beat; not touched by anyone else until `stop` returned.
        interval_s: Seconds between beats.
        secrets: Values that must not appear in the lines shown.
        look: Asks the remote whether the job shall stop: a sentence that says so, or None. May raise what a
            remote that is away raises.
        look_s: Seconds between two such questions.
        say: Takes one line for the owner.
        show: Takes each line of the job's output, without the secrets.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        hold: Hold,
        *,
        interval_s: float,
        secrets: Secrets,
        look: Callable[[], str | None] = lambda: None,
        look_s: float = _LOOK_S,
        say: Callable[[str], None] = lambda _: None,
        show: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hold = hold
        self._interval_s = interval_s
        self._secrets = secrets
        self._look = look
        self._look_s = look_s
        self._say = say
        self._show = show
        self._clock = clock
        self._started = clock()
        self._phase = Phase.CLAIMED
        self._progress: Progress | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._lost = threading.Event()
        self._wish: str | None = None
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    @property
    def lost(self) -> bool:
        """Whether somebody else holds the claim now: the job must stop, its result is not ours to give."""
        return self._lost.is_set()

    @property
    def wish(self) -> str | None:
        """Who wants the job to stop, in a sentence; None: nobody."""
        return self._wish

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def enter(self, phase: Phase) -> None:
        """Say which phase the job is in."""
        self._phase = phase
        self._wake.set()

    def line(self, text: str) -> None:
        """Take a line of the job's output: progress, or a line of the log's tail."""
        text = self._secrets.cut_text(text, broken_off=len(text) > _LINE)
        self._show(text)
        match = _PROGRESS.fullmatch(text.rstrip())
        if match is None:
            self._tail.append(text[:_LINE])
        else:
            done, total, step = int(match[1]), int(match[2]), match[3] or ""
            self._progress = Progress(done=min(done, total), total=total, step=step[:200])
            if self._tail and _PROGRESS.fullmatch(self._tail[-1]):
                self._tail.pop()  # of progress, the log's tail shows the newest
            self._tail.append(text.rstrip()[:_LINE])

    def stop(self) -> None:
        """End beating; the hold is free to be used by the caller when this returns."""
        self._ending.set()
        self._wake.set()
        self._thread.join()

    def _beat(self) -> None:
        next_beat, next_look = self._started + self._interval_s, self._started + self._look_s
        while True:
            woken = self._wake.wait(max(0.0, min(next_beat, next_look) - self._clock()))
            # Cleared before `_ending` is asked: a stop that comes between the two is not slept through.
            self._wake.clear()
            if self._ending.wait(_SETTLE_S if woken else 0):
                return
            if woken or self._clock() >= next_beat:
                self._renew()
                next_beat = self._clock() + self._interval_s
            if self.lost:
                return
            if self._wish is None and self._clock() >= next_look:
                with contextlib.suppress(BusError, MachineError, OSError):
                    self._wish = self._look()
                next_look = self._clock() + self._look_s

    def _renew(self) -> None:
        elapsed = self._clock() - self._started
        try:
            self._hold.beat(Beat(self._phase, elapsed, self._progress, tuple(self._tail)))
        except LeaseLost:
            self._lost.set()
        except (BusError, MachineError, OSError):
            pass  # the next beat may find the remote, or room on the disk
        except Exception as error:  # a bug of ours must not end the heartbeat
            self._say(f"the claim was not renewed: {described(error)}")
