"""Requests that may run and wait for the owner's hours: looked at once, then left until something changed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime

from bridge.protocol.manifest import Manifest
from bridge.runner.station import Station


class Opening:
    """What waits.

    Args:
        station: The runner.
        now: The time of day (aware).
    """

    def __init__(self, station: Station, *, now: Callable[[], datetime]) -> None:
        self._station = station
        self._now = now
        # When each of them expires, and is to be answered after all.
        self._until: dict[str, datetime] = {}
        # Of which a wish to stop was weighed, and did not count.
        self._weighed: set[str] = set()

    @property
    def is_open(self) -> bool:
        """Whether jobs may begin now; outside the hours that an owner wants refused, too: see `check`."""
        policy = self._station.policy
        return policy.refuses_outside_hours or policy.is_open(self._now())

    def hold(self, nonce: str, manifest: Manifest | None, *, weighed: bool = False) -> bool:
        """Leave a request until the hours begin; whether that is new.

        Args:
            nonce: The request.
            manifest: What it asks.
            weighed: There is a wish to stop it, which does not count.
        """
        new = nonce not in self._until
        self._until[nonce] = self._now() if manifest is None else manifest.expires_at
        if weighed:
            self._weighed.add(nonce)
        return new

    def holds(self, nonce: str, *, wished: bool) -> bool:
        """Whether to leave it alone for now.

        Args:
            nonce: The request.
            wished: Somebody wants it stopped.
        """
        if wished and nonce not in self._weighed:
            return False
        return nonce in self._until and self._now() < self._until[nonce] and not self.is_open

    def keep(self, nonces: Collection[str]) -> None:
        """Forget every other request."""
        self._until = {nonce: until for nonce, until in self._until.items() if nonce in nonces}
        self._weighed &= set(nonces)
