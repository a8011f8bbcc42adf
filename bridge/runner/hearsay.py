"""What other runners answered: so that a signed request that somebody puts back is refused on every machine.

Known runners tell it on their signed cards; a claim of theirs that was seen, and went together with its
request, is an answer too; and the runners of this machine read each other's ledgers. What was heard once
stays known over restarts, whatever becomes of cards and results on the remote. What nobody can know is what
was answered while this runner was away, if somebody deleted the card, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from pathlib import Path

from bridge.bus.catalogue import read_card
from bridge.bus.handles import Held
from bridge.bus.mirror import Mirror
from bridge.errors import described
from bridge.protocol import refs
from bridge.protocol.manifest import MAX_LIFETIME, MAX_NONCE_SKEW
from bridge.runner.ledger import Ledger, nonces_in
from bridge.runner.peers import Peers
from bridge.runner.station import Station

# More than runners answer in the time for which requests are valid.
MOST_HEARD = 200_000
# Signatures that are checked in one look.
_CLAIMS_AT_ONCE, _CARDS_AT_ONCE = 20, 50


class Hearsay:
    """The requests that other runners are known to have answered.

    Args:
        station: This runner.
        mirror: Its copy of the queue, cards included.
        peers: Whose word counts.
        name: Of the file in which a runner keeps its answers on this remote; see `Ledger`.
        say: Takes one line for the owner.
        now: The time of day (aware).
    """

    def __init__(
        self,
        station: Station,
        mirror: Mirror,
        peers: Peers,
        name: str,
        *,
        say: Callable[[str], None],
        now: Callable[[], datetime],
    ) -> None:
        self._station = station
        self._mirror = mirror
        self._peers = peers
        self._say = say
        self._now = now
        self._name = name
        self._heard = Ledger(station.folder / f"{name}-elsewhere", now())
        # Of the other runners of this machine: when their ledgers were written, and what they hold.
        self._siblings: dict[Path, tuple[tuple[int, int], set[str]]] = {}
        # Requests that a known runner was seen to hold.
        self._held: set[str] = set()
        # Claims that were weighed: in which look, and the commit.
        self._weighed: dict[str, tuple[int, str]] = {}
        self._looks = 0
        # Cards that were read, by ref and commit.
        self._read: set[tuple[str, str]] = set()
        self._said: str | None = None

    def __contains__(self, nonce: object) -> bool:
        """Whether another runner is known to have answered a request."""
        self._read_siblings()
        return nonce in self._heard.nonces or any(nonce in known for _, known in self._siblings.values())

    def look(self, pending: Collection[str]) -> None:
        """Take in what the mirror saw at its last look.

        Args:
            pending: Every request that waits.
        """
        claims = self._mirror.claims()
        self._note({nonce for nonce in self._held if nonce not in claims and nonce not in pending})
        self._held = {nonce for nonce in self._held if nonce in claims}
        names = self._peers.listed()
        if names:
            self._look_at_claims(claims, pending)
            self._look_at_cards(names)

    def _look_at_claims(self, claims: Mapping[str, Held], pending: Collection[str]) -> None:
        """Weigh some claims, those first that waited longest for it: a crowd of squatted ones hides none."""
        self._looks += 1
        self._weighed = {nonce: known for nonce, known in self._weighed.items() if nonce in claims}
        before = {nonce: self._weighed.get(nonce, (0, "")) for nonce in claims if nonce in pending}
        fresh = [
            nonce
            for nonce, (_, commit) in sorted(before.items(), key=lambda item: item[1][0])
            if nonce not in self._held and commit != claims[nonce].commit
        ]
        for nonce in fresh[:_CLAIMS_AT_ONCE]:
            self._weighed[nonce] = (self._looks, claims[nonce].commit)
            if self._peers.counts(self._mirror.git, claims[nonce].commit, nonce):
                self._held.add(nonce)

    def _look_at_cards(self, names: Mapping[str, str]) -> None:
        cards = set(self._mirror.cards().items())
        self._read &= cards
        oldest = refs.nonce_time(self._now() - MAX_LIFETIME - MAX_NONCE_SKEW)
        for ref, commit in sorted(cards - self._read)[:_CARDS_AT_ONCE]:
            self._read.add((ref, commit))
            seen = read_card(self._mirror.git, ref, commit, names)
            if seen is not None and seen.card.audience == self._station.audience:
                self._note({nonce for nonce in seen.card.answered if nonce > oldest})

    def _note(self, nonces: Collection[str]) -> None:
        for nonce in sorted(set(nonces) - self._heard.nonces):
            if len(self._heard.nonces) >= MOST_HEARD:
                self._complain(f"more than {MOST_HEARD} answers of other runners are not remembered")
                return
            try:
                self._heard.add(nonce)
            except OSError as error:
                self._complain(
                    f"what other runners answered is known to this process only: {described(error)}"
                )

    def _read_siblings(self) -> None:
        folder = self._station.folder
        for path in folder.parent.glob(f"*/{self._name}"):
            with contextlib.suppress(FileNotFoundError):
                if path.parent != folder:
                    status = path.stat()
                    written = (status.st_mtime_ns, status.st_size)
                    if self._siblings.get(path, (None,))[0] != written:
                        self._siblings[path] = (written, nonces_in(path))

    def _complain(self, words: str) -> None:
        if words != self._said:
            self._said = words
            self._say(words)
