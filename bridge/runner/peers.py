"""Which claims count on this machine: those of its own runners, and of the runners its owner listed.

The list is ``known_runners`` in the folder of the policy, in the format of allowed signers. It matters where
the policy requires signatures: there a claim that no known runner signed is one that anybody with push rights
may have squatted, and a signed one counts only as long as it is news. Two such machines that do not list each
other take each other's claims away and both run the request; the owner is told whose key is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from bridge import signing
from bridge.bus.claimed import Claimed, read_claim
from bridge.bus.git import Git
from bridge.bus.leases import MAX_LEASE_S
from bridge.bus.standing import Signature, Standing, Trust
from bridge.errors import KeyListError
from bridge.protocol.manifest import parse_time
from bridge.protocol.result import RunStatus
from bridge.runner.station import Station
from bridge.signing.owned import stamps

# What a known runner's key may sign.
NAMESPACES = (signing.CLAIM_NAMESPACE, signing.RUNNER_NAMESPACE)
# By so much clocks may differ where an old claim is told from a new one.
SKEW = timedelta(minutes=5)
# Of so many keys that nobody listed the owner is told: whoever can push can make any number.
_MOST_TOLD = 8


class Peers:
    """The runners whose claims are respected.

    Args:
        station: This runner.
        say: Takes one line for the owner.
    """

    def __init__(self, station: Station, say: Callable[[str], None] = lambda _: None) -> None:
        self._station = station
        self._say = say
        # Keys that nobody listed and of which the owner knows.
        self._told: set[str] = set()
        self._trust = Trust.by(station.known_runners)
        self._read: dict[tuple[str, str], Claimed | None] = {}
        self._lists: tuple[tuple[object, ...], ...] = ()

    def claim(self, git: Git, commit: str, nonce: str) -> Claimed | None:
        """What a claim of a request says, and what its signature is worth here; None: it is none.

        Args:
            git: A repository that holds the claim.
            commit: The claim.
            nonce: The request.
        """
        key = (nonce, commit)
        if key not in self._read:
            claimed = self._read_claim(git, commit, nonce)
            if claimed is not None and claimed.signature.signer in self._own():
                name = self._station.identity.name
                claimed = replace(claimed, signature=Signature(Standing.TRUSTED, name))
            self._read[key] = claimed
        return self._read[key]

    def counts(self, git: Git, commit: str, nonce: str) -> bool:
        """Whether a claim is one of a known runner. For the arguments see `claim`."""
        claimed = self.claim(git, commit, nonce)
        return claimed is not None and claimed.signature.standing is Standing.TRUSTED

    def respects(self, git: Git, commit: str, nonce: str) -> bool:
        """`counts`; where only the key is not known here, the owner is told, once a key."""
        claimed = self.claim(git, commit, nonce)
        if claimed is None or claimed.signature.standing is Standing.TRUSTED:
            return claimed is not None
        unlisted = claimed.signature.standing is Standing.UNTRUSTED_KEY
        key = str(claimed.signature.signer)
        if unlisted and key not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(key)
            self._say(
                f"{nonce}: a claim of {claimed.status.runner} is not respected, for no line of known_runners"
                f" lists its key {key}. If that Mac is yours, both may run what is asked for: have each list"
                " the other (kakeya_mac runner key prints the command for the other one)"
            )
        return False

    def listed(self) -> Mapping[str, str]:
        """Whose cards count now, names by fingerprint; none where the list says nothing."""
        try:
            return self._trust.names(signing.RUNNER_NAMESPACE)
        except KeyListError:  # the owner is told of it where the policy is read
            return {}

    def forget(self, still_claimed: Collection[str]) -> None:
        """Drop what is known of claims that are no longer there; of all, where whose key counts has changed.

        Args:
            still_claimed: Commits of those that are.
        """
        lists = stamps(self._trust.keys, self._trust.revoked)
        kept = set(still_claimed) if lists == self._lists else set()
        self._lists = lists
        self._read = {key: claimed for key, claimed in self._read.items() if key[1] in kept}

    def _read_claim(self, git: Git, commit: str, nonce: str) -> Claimed | None:
        try:
            return read_claim(git, commit, nonce, self._trust)
        except KeyListError:  # then only claims of this machine count; see `listed`
            nobody = self._station.folder / "nobody"
            return read_claim(git, commit, nonce, Trust(nobody, nobody))

    def _own(self) -> set[str]:
        """Fingerprints of the keys of this machine's runners: they have one owner and one folder."""
        found = set()
        for path in self._station.folder.parent.glob("*/id_ed25519.pub"):
            found.add(_fingerprint(path))
        return found


def is_old(status: RunStatus, now: datetime) -> bool:
    """Whether a heartbeat was made so long ago that somebody put it back; clocks may differ by `SKEW`."""
    lease = timedelta(seconds=min(status.lease_s, MAX_LEASE_S))
    return abs(now - parse_time(status.updated_at)) > lease + SKEW


def _fingerprint(path: Path) -> str:
    return signing.fingerprint(path.read_text(encoding="utf-8"))
