"""Who wants a request stopped, and whether that counts: wishes that a look brought, and those asked for anew.

Where the policy listens to nobody who did not sign, a wish counts only with the requester's signature. Else
everybody's counts, and a branch that was deleted is one, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from bridge.bus.cancels import objection, read_cancel
from bridge.bus.handles import Held
from bridge.bus.mirror import Mirror
from bridge.runner.check import Checked
from bridge.runner.station import Station
from bridge.runner.strays import Strays


class Wishes:
    """The wishes to stop of one remote.

    Args:
        station: The runner.
        mirror: Its copy of the queue.
        say: Takes one line for the owner.
    """

    def __init__(self, station: Station, mirror: Mirror, *, say: Callable[[str], None]) -> None:
        self._station = station
        self._mirror = mirror
        self._say = say
        self._held: dict[str, Held] = {}
        # Requests for which one was seen, whether it counts or not.
        self._seen: set[str] = set()
        # Those that did not count, and the owner was told so.
        self._objected: set[str] = set()
        self._strays = Strays(mirror)

    def __contains__(self, nonce: object) -> bool:
        """Whether a wish to stop a request was seen, be it one that does not count."""
        return nonce in self._seen

    @property
    def by_deletion(self) -> str | None:
        """What a deleted branch says; None: nothing, for nobody signed it."""
        return None if self._station.policy.require_signature else "its branch was deleted"

    def update(self, nonces: Collection[str]) -> None:
        """Take in what the mirror saw at its last look, and forget what is not pending any more.

        Args:
            nonces: What is.
        """
        self._held = self._mirror.cancels()
        self._seen = set(nonces) & self._held.keys()
        self._objected &= {held.commit for held in self._held.values()}

    def tidy(self) -> None:
        """Clear wishes away that came too late.

        Raises:
            RemoteUnreachable: The remote did not answer.
        """
        self._strays.clear({nonce: held for nonce, held in self._held.items() if nonce not in self._seen})

    def counted(self, checked: Checked) -> str | None:
        """The wish of the last look in a sentence, if there is one that counts."""
        held = self._held.get(checked.pending.nonce)
        return None if held is None else self._weigh(checked, held.commit)

    def ask(self, checked: Checked) -> str | None:
        """Ask the remote whether a running job shall stop: a sentence that says so, or None.

        Raises:
            RemoteUnreachable: The remote did not answer.
        """
        if checked.manifest is None:
            return None
        nonce = checked.pending.nonce
        standing = self._mirror.standing(nonce, checked.manifest.result_ref)
        if standing.branch is None and self.by_deletion is not None:
            return self.by_deletion
        if standing.cancel is None:
            return None
        self._seen.add(nonce)
        return self._weigh(checked, standing.cancel)

    def _weigh(self, checked: Checked, commit: str) -> str | None:
        """The wish in words, if it counts."""
        station, git, pending = self._station, self._mirror.git, checked.pending
        against = objection(
            git,
            commit,
            nonce=pending.nonce,
            request_commit=pending.commit,
            require_signature=station.policy.require_signature,
            requester=checked.requester,
            allowed_signers=station.allowed_signers,
            revoked_keys=station.revoked_keys,
        )
        if against is not None:
            if commit not in self._objected:
                self._objected.add(commit)
                self._say(f"{pending.nonce}: not stopped: {against}")
            return None
        cancel = read_cancel(git, commit)
        return None if cancel is None else cancel.sentence
