"""A supervisor that waits for the next job, so that the job need not wait for a supervisor."""

from __future__ import annotations

import time
from pathlib import Path

from bridge.presets import Preset
from bridge.runner.child import Standby, Supervised
from bridge.runner.isolation.hidden import hidden, kept
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
        self._made_for = station.policy

    def take(self, preset: Preset | None = None) -> Supervised:
        """A supervisor that holds the machine's lock: the waiting one, if it is fresh, or a new one.

        Args:
            preset: Of the job. One that gets the machine's network gets a supervisor of its own: what
                waits has none.

        Raises:
            MachineBusy: Another job holds the lock.
            MachineError: It did not start.
        """
        if preset is not None and self._station.policy.opens_network(preset):
            return Supervised(self._new(network=True))
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
        return time.monotonic() - standby.since > OLDEST_S or self._made_for != self._station.policy

    def _new(self, *, network: bool = False) -> Standby:
        station = self._station
        self._made_for = station.policy
        ours = station.environment
        named = [Path(ours[name]).expanduser() for name in ours if name.startswith("KAKEYA_MODEL_")]
        models = [*station.policy.models.values(), *named, station.home / "kakeya-models"]
        return Standby(
            station.lock,
            writable=[station.jobs],
            network=network,
            hide=hidden(station.home, ours, *station.private),
            keep=kept(station.presets.values(), ours, models, network=network),
        )
