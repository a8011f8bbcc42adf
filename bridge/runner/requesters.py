"""Who asked for what is pending, found out before anything else is examined, a bounded number in each look.

Checking a signature starts programs, and anyone with push rights can push thousands of them; so each look
does a fixed amount of work, in the order in which requests were first seen, and the rest stays unknown until
a later one. What is learnt only says whose turn it is: whether a request may run is asked anew by
`bridge.runner.check`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from bridge.bus.git import Git
from bridge.bus.mirror import Pending
from bridge.bus.requests import ReadRequest, bound_manifest, read_request
from bridge.errors import BusError, ManifestError
from bridge.protocol.manifest import Manifest
from bridge.runner.check import Refusal, requester_of
from bridge.runner.station import Station
from bridge.runner.turns import Asking, Requester
from bridge.signing.owned import stamps

READINGS = 500
VERIFICATIONS = 50


@dataclass(frozen=True)
class _Known:
    """What was learnt of one request; `manifest` None: it is not a request that can be read."""

    requester: Requester
    manifest: Manifest | None

    def counts_for(self, now: datetime) -> Requester:
        """Whose it is. One that expired is nobody's: an old signed request can be pushed again by anyone."""
        expired = self.manifest is None or now >= self.manifest.expires_at
        return None if expired else self.requester

    def is_carried(self, transports: Collection[str]) -> bool:
        """Whether a daemon that takes these transports answers it at all."""
        return self.manifest is None or self.manifest.transport in transports


class Requesters:
    """The requesters of one mirror's pending requests.

    Args:
        git: The mirror's repository.
        station: The runner.
        readings: How many new requests are read in one look.
        verifications: How many signatures are checked in one look.
    """

    def __init__(
        self,
        git: Git,
        station: Station,
        *,
        readings: int = READINGS,
        verifications: int = VERIFICATIONS,
    ) -> None:
        self._git = git
        self._station = station
        self._readings = readings
        self._verifications = verifications
        # By nonce and commit, in the order first seen: a signed commit put under another nonce is not its
        # signer's.
        self._known: dict[tuple[str, str], _Known | None] = {}
        self._lists: tuple[tuple[object, ...], ...] = ()

    def look(self, pending: Sequence[Pending], claimed: Collection[str], now: datetime) -> list[Asking]:
        """What is pending, with who asked where that is known by now. Requests for others are left out.

        Args:
            pending: From the mirror.
            claimed: Nonces that some runner holds.
            now: The time by which expiry is judged (aware).
        """
        lists = stamps(self._station.allowed_signers, self._station.revoked_keys)
        if lists != self._lists:  # whose key is whose may be another matter now
            self._lists, self._known = lists, dict.fromkeys(self._known)
        keys = dict.fromkeys((request.nonce, request.commit) for request in pending)
        kept = {key: known for key, known in self._known.items() if key in keys}
        self._known = {**kept, **{key: None for key in keys if key not in kept}}
        self._learn(now)
        asking = []
        for nonce, commit in keys:
            known = self._known[nonce, commit]
            if known is None:
                asking.append(Asking(nonce, None, known=False, claimed=nonce in claimed))
            elif known.is_carried(self._station.transports):
                asking.append(Asking(nonce, known.counts_for(now), claimed=nonce in claimed))
        return asking

    def _learn(self, now: datetime) -> None:
        readings, verifications = self._readings, self._verifications
        for (nonce, commit), known in self._known.items():
            if known is not None:
                continue
            if not readings:
                return
            readings -= 1
            request, manifest = self._read(nonce, commit)
            requester = None
            if request is not None and request.signature is not None:
                if not verifications:
                    return
                verifications -= 1
                requester = self._signer(request, now)
            self._known[nonce, commit] = _Known(requester, manifest)

    def _read(self, nonce: str, commit: str) -> tuple[ReadRequest | None, Manifest | None]:
        """A request and its manifest; both None where it is refused for them when its turn comes."""
        try:
            request = read_request(self._git, commit)
            return request, bound_manifest(request, nonce)
        except (ManifestError, BusError):
            return None, None
        except Exception:  # whatever one request provokes, the others must have their turn; its own says why
            return None, None

    def _signer(self, request: ReadRequest, now: datetime) -> Requester:
        """Who signed it; None for a broken signature, too, which is refused when its turn comes."""
        try:
            signer = requester_of(request, self._station, now)
        except Refusal:
            return None
        return None if signer is None else signer.name
