"""A workflow run's hold on its request: GitHub gave it to this machine, and nobody takes it away."""

from __future__ import annotations

from collections.abc import Callable

from bridge.bus.holding import Beat
from bridge.protocol.result import Phase


class Turn:
    """The hold of one run; each new phase is a line of its log.

    Args:
        attempt: Which attempt of the run this is, from 1.
        say: Takes one line.
    """

    def __init__(self, attempt: int, say: Callable[[str], None]) -> None:
        self._attempt = attempt
        self._say = say
        self._phase: Phase | None = None

    @property
    def attempt(self) -> int:
        """Which attempt of the run this is."""
        return self._attempt

    def beat(self, beat: Beat) -> None:
        """Say which phase the job is in, when that is news."""
        if beat.phase is not self._phase:
            self._phase = beat.phase
            self._say(f"{beat.phase} ({beat.elapsed_s:.1f} s)")
