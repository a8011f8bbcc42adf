"""A supervisor that waits for the next job, so that the job need not wait for a supervisor."""

from __future__ import annotations

import time

from bridge.runner import isolation
from bridge.runner.child import Standby, Supervised
from bridge.runner.station import Station

# What a supervisor hides is what was there when it started, so it does not wait long.
OLDEST_S = 30.0


class Reserve:
    """At most one waiting supervisor of a runner.

    Args:
        station: The runner.
    """

    def __init__(self, station: Station) -> None:
        self._station = station
        self._standby: Standby | None = None

    def take(self) -> Supervised:
        """A supervisor that holds the machine's lock: the waiting one, if it is fresh, or a new one.

        Raises:
            MachineBusy: Another job holds the lock.
            MachineError: It did not start.
        """
        standby, self._standby = self._standby, None
        if standby is not None and (self._is_old(standby) or not standby.alive):
            standby.close()
            standby = None
        return Supervised(standby or self._new())

    def fill(self) -> None:
        """Have a fresh one wait."""
        if self._standby is not None and self._is_old(self._standby):
            self.empty()
        if self._standby is None:
            self._standby = self._new()

    def empty(self) -> None:
        """Let the waiting one go."""
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.close()

    def _is_old(self, standby: Standby) -> bool:
        return time.monotonic() - standby.since > OLDEST_S

    def _new(self) -> Standby:
        station = self._station
        hide = isolation.hidden(station.home, station.environment, *station.private)
        return Standby(station.lock, hide=hide, keep=[station.jobs])
