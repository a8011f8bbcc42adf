"""Whether a request had its answer: here, from another runner, or so long ago that it is archived."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from bridge.bus.archived import is_archived
from bridge.bus.git import Git
from bridge.bus.retire import SETTLED
from bridge.protocol import refs
from bridge.runner.hearsay import Hearsay
from bridge.runner.ledger import Ledger
from bridge.runner.station import Station


class Answered:
    """What this runner knows of the answers on one remote.

    Args:
        station: The runner.
        git: Any repository of this machine, to list the remote's refs with.
        ledger: Its own answers.
        hearsay: Those of others.
        now: The time of day (aware).
    """

    def __init__(
        self, station: Station, git: Git, ledger: Ledger, hearsay: Hearsay, *, now: Callable[[], datetime]
    ) -> None:
        self._station = station
        self._git = git
        self._ledger = ledger
        self._hearsay = hearsay
        self._now = now

    def knows(self, nonce: str) -> bool:
        """Whether a request had its answer. What the archive says of it is noted, and not asked again.

        Raises:
            RemoteUnreachable: The remote did not answer, and must be asked about one so old.
            OSError: It cannot be noted.
        """
        if nonce not in self._ledger.nonces and self._is_archived(nonce):
            self._ledger.add(nonce)
        return nonce in self._ledger.nonces or nonce in self._hearsay

    def _is_archived(self, nonce: str) -> bool:
        if nonce > refs.nonce_time(self._now() - SETTLED):
            return False  # nothing so young is archived
        found = self._git.ls_remote(self._station.remote)
        return is_archived(self._station.folder, self._station.remote, nonce, found=found)
