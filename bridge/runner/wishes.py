"""Who wants a request stopped, and whether that counts: wishes that a look brought, and those asked for anew.

Where the policy listens to nobody who did not sign, a wish counts only with the requester's signature. Else
everybody's counts, and a branch that was deleted is one, too; over GitHub Actions only when it stays deleted,
for a client without a token deletes and pushes it again to start a run anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from bridge.bus.cancels import objection, read_cancel
from bridge.bus.handles import Held
from bridge.bus.mirror import Mirror, Standing
from bridge.protocol.manifest import Manifest
from bridge.runner.check import Checked
from bridge.runner.station import Station
from bridge.runner.strays import Strays

# Over GitHub Actions: so long a branch may be away.
AWAY_S = 30.0


class Wishes:
    """The wishes to stop of one remote.

    Args:
        station: The runner.
        mirror: Its copy of the queue.
        say: Takes one line for the owner.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        station: Station,
        mirror: Mirror,
        *,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        # Since when the branches of requests are away.
        self._away: dict[str, float] = {}
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

    def deleted_just_now(self, manifest: Manifest | None) -> str | None:
        """What a branch says that was there a moment ago; None: nothing yet."""
        return None if manifest is not None and _may_come_back(manifest) else self.by_deletion

    def misses_branch(self, nonce: str) -> bool:
        """Whether a request's branch, which may come back, was away at the last `ask`."""
        return nonce in self._away

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

    def of_others(self, nonce: str) -> dict[str, Held]:
        """Those that may count of every request but this one, by nonce."""
        return {
            other: held
            for other, held in self._held.items()
            if other != nonce and held.commit not in self._objected
        }

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
        if self.by_deletion is not None and self._is_deleted(checked.manifest, standing):
            return self.by_deletion
        self._held = {**self._held, **standing.cancels}
        self._seen |= standing.cancels.keys()
        if standing.cancel is None:
            return None
        return self._weigh(checked, standing.cancel)

    def _is_deleted(self, manifest: Manifest, standing: Standing) -> bool:
        """Whether the request's branch is gone for good."""
        if standing.branch is not None:
            self._away.pop(manifest.nonce, None)
            return False
        if not _may_come_back(manifest):
            return True
        return self._clock() - self._away.setdefault(manifest.nonce, self._clock()) >= AWAY_S

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


def _may_come_back(manifest: Manifest) -> bool:
    """Whether a request's branch may be deleted for a moment, see `bridge.client.resend`."""
    return manifest.transport == "actions"
