"""A request that this machine would refuse, left for a while to another one that says it takes it.

Macs on one bus need not be alike: what one has not installed, or does not allow, another may run. Cards are
hints that anybody can write, so a request waits for them only so long; then it is refused after all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime

from bridge.bus.catalogue import Seen, read_cards
from bridge.bus.git import Git
from bridge.errors import BusError
from bridge.protocol.result import Reason
from bridge.protocol.runner_info import is_live
from bridge.runner.station import Station

# Refusals about this machine that a card tells of, so that two machines never wait for each other.
OWN_REASONS = frozenset((Reason.UNKNOWN_PRESET, Reason.POLICY, Reason.MACHINE_UNFIT, Reason.MODEL_MISSING))
PATIENCE_S = 300.0
_READ_EVERY_S = 30.0


class Yielding:
    """Who else would take what.

    Args:
        station: This runner.
        git: Any repository of this machine; nothing is left in it.
        clock: Monotonic seconds.
        now: The time of day (aware).
    """

    def __init__(
        self, station: Station, git: Git, *, clock: Callable[[], float], now: Callable[[], datetime]
    ) -> None:
        self._station = station
        self._git = git
        self._clock = clock
        self._now = now
        self._since: dict[str, float] = {}
        self._read_at: float | None = None
        self._seen: tuple[Seen, ...] = ()

    def yields(self, nonce: str, preset: str, reason: Reason) -> bool:
        """Whether to leave a request that is refused here to somebody else, for now.

        Args:
            nonce: The request.
            preset: Name or alias of what it asks for.
            reason: Why it would be refused here.
        """
        if reason not in OWN_REASONS:
            return False
        if self._clock() - self._since.setdefault(nonce, self._clock()) >= PATIENCE_S:
            return False
        return any(self._takes(seen, preset) for seen in self._others())

    def keep(self, nonces: Collection[str]) -> None:
        """Forget every other request."""
        self._since = {nonce: since for nonce, since in self._since.items() if nonce in nonces}

    def _others(self) -> tuple[Seen, ...]:
        if self._read_at is None or self._clock() - self._read_at >= _READ_EVERY_S:
            self._read_at = self._clock()
            try:
                self._seen = tuple(read_cards(self._git, self._station.remote).seen)
            except BusError:
                self._seen = ()  # nobody is known to take it
        return self._seen

    def _takes(self, seen: Seen, preset: str) -> bool:
        card, identity = seen.card, self._station.identity
        mine = card.id == identity.id and card.session == identity.session
        if mine or card.audience != self._station.audience or not is_live(card, self._now()):
            return False
        offer = card.offer(preset)
        return offer is not None and offer.available
