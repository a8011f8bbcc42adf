"""Who holds what is pending, and whether this runner may take its place.

A claim is left to its holder while its heartbeat goes on, unless it is one of this runner's own, from before
a crash. Where requests must be signed, a claim on a signed one counts only if a known runner made it. What
was begun here counts as an attempt, whatever became of its claim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import datetime

from bridge.bus.claims import LeaseWatch, Silent, read_status
from bridge.bus.handles import Held
from bridge.bus.mirror import Mirror
from bridge.runner.begun import Begun
from bridge.runner.peers import Peers, is_old
from bridge.runner.station import Station
from bridge.runner.turns import Requester


class Holders:
    """The claims of one remote, as of the last look.

    Args:
        station: The runner.
        mirror: Its copy of the queue.
        peers: Whose claims are respected.
        begun: What was begun here.
        clock: Monotonic seconds.
        now: The time of day (aware).
    """

    def __init__(
        self,
        station: Station,
        mirror: Mirror,
        peers: Peers,
        begun: Begun,
        *,
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._station = station
        self._mirror = mirror
        self._peers = peers
        self._begun = begun
        self._now = now
        self._watch = LeaseWatch(clock)
        self._claims: dict[str, Held] = {}
        # Processes of this runner, this one among them: claims of theirs are ours.
        self.sessions = frozenset({station.identity.session})

    def update(self, nonces: Collection[str]) -> None:
        """Take in what the mirror saw at its last look, and forget what is not pending any more.

        Args:
            nonces: What is.
        """
        self._claims = self._mirror.claims() if nonces else {}
        self._watch.forget(list(nonces))
        self._peers.forget([held.commit for held in self._claims.values()])

    def claimed(self) -> Collection[str]:
        """Requests that a runner holds."""
        if not self._station.policy.require_signature or not self._station.policy.max_running_per_requester:
            return self._claims
        git = self._mirror.git
        return [nonce for nonce, held in self._claims.items() if self._peers.counts(git, held.commit, nonce)]

    def others_at_work(self) -> bool:
        """Whether somebody else holds a claim, so that others may be about to take what we see."""
        statuses = (read_status(self._mirror.git, held.commit) for held in self._claims.values())
        return any(status is None or status.session not in self.sessions for status in statuses)

    def place(self, nonce: str, requester: Requester) -> tuple[int | None, Silent | None]:
        """The attempt we would be, with the claim we would replace; (None, None): its holder is at work.

        Args:
            nonce: The request.
            requester: Who signed it, as far as that is known.
        """
        held, begun = self._claims.get(nonce), self._begun.attempts(nonce)
        if held is None:
            return self.attempt(nonce), None
        silent = self._replaceable(nonce, held, requester)
        if silent is None:
            return None, None
        silent = replace(silent, attempt=max(silent.attempt, begun))
        return silent.attempt + 1, silent

    def attempt(self, nonce: str) -> int:
        """The attempt that a claim in nobody's place would be."""
        return self._begun.attempts(nonce) + 1

    def _replaceable(self, nonce: str, held: Held, requester: Requester) -> Silent | None:
        """A claim as one that may be replaced by ours; None: its holder is at work.

        One on a request that no listed signer made is left to its lease: a machine beside this one may take
        it, and whoever squats thousands of them must not have each examined again at every look.
        """
        git, strict = self._mirror.git, self._station.policy.require_signature and requester is not None
        signed = strict and self._peers.respects(git, held.commit, nonce)
        status = read_status(git, held.commit)
        silent = self._watch.observe(nonce, held, status, signed=signed)
        attempts = self._watch.attempts(nonce)
        if strict and not signed:  # what it says of attempts is nobody's word
            return Silent(held.ref, held.commit, attempts, squatted=silent is None)
        if silent is not None or status is None:
            return silent
        if signed and is_old(status, self._now()):
            return Silent(held.ref, held.commit, max(attempts, status.attempt))
        if status.session in self.sessions:
            # Ours, from before a crash: we hold the name's lock, so no other process of ours has it.
            return Silent(held.ref, held.commit, status.attempt)
        return None
