"""What a runner does for the bus when it has nothing else to do: retire old results and forgotten cards.

A little at a time, so that a request that comes meanwhile waits for seconds. Several idle runners do it
beside each other without harm; each begins at another moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime

from bridge.bus.archive import DEFAULT_OLDER_THAN, prune
from bridge.bus.catalogue import forget_cards
from bridge.bus.git import Git
from bridge.errors import BusError, MachineError, described
from bridge.runner.station import Station

INTERVAL_S = 6 * 3600.0
FIRST_S = 600.0
# Between two helpings while there is more to retire.
NEXT_S = 20.0
HELPING = 100


class Upkeep:
    """The upkeep of one runner's remote.

    Args:
        station: The runner.
        git: Any repository of this machine; nothing is left in it.
        say: Takes one line for the owner.
        clock: Monotonic seconds.
        now: The time of day (aware).
    """

    def __init__(
        self,
        station: Station,
        git: Git,
        *,
        say: Callable[[str], None],
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._station = station
        self._git = git
        self._say = say
        self._clock = clock
        self._now = now
        self._due_at = clock() + random.uniform(FIRST_S / 2, FIRST_S)  # noqa: S311 - only spreads the work

    def work(self) -> None:
        """Do a helping if it is time. What fails is told to the owner and tried later."""
        if self._clock() < self._due_at:
            return
        more = False
        try:
            more = self._retire()
        except (BusError, MachineError, OSError) as error:
            self._say(f"old results are not retired: {described(error)}")
        pause = NEXT_S if more else INTERVAL_S * random.uniform(0.75, 1.25)  # noqa: S311 - as above
        self._due_at = self._clock() + pause

    def _retire(self) -> bool:
        """Whether there is more of it."""
        station, git = self._station, self._git
        done = prune(station.folder, station.remote, now=self._now(), limit=HELPING, origin=git)
        if done.archived:
            self._say(f"{len(done.archived)} finished request(s) moved into the archive")
        if done.refused is not None:
            self._say(f"the server does not delete what was archived: {done.refused}")
            return False
        if not done.remaining:
            forget_cards(git, station.remote, older_than=DEFAULT_OLDER_THAN, now=self._now())
        return done.remaining > 0
