"""Who gets to run a request: the claim, and taking over one whose holder fell silent.

A claim is a ref holding a parentless commit with ``status.json``, signed by the runner; every change is a
compare-and-swap on the remote. Pushing the object a ref already holds reports success even with a stale
lease, so every claim commit is unique. What its holder does with it is in `holding`, when others may take
over in `leases`.

Where a server declines the bridge's own refs, a branch serves instead. A push is sure of one of the two
places only, so the own ref goes first: whoever holds the branch looks there again, and gives way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bridge.bus.claimed import read_status, write_claim
from bridge.bus.drafts import Draft, Identity, Sign, draft, unsigned
from bridge.bus.git import Git, Update
from bridge.bus.holding import PUSH_TIMEOUT_S, Beat, Claim, Counts, all_count
from bridge.bus.leases import DEFAULT_LEASE_S, MAX_LEASE_S, LeaseWatch, Silent
from bridge.bus.mirror import Pending
from bridge.errors import LeaseLost, PushRejected, RemoteUnreachable
from bridge.protocol import refs

__all__ = [
    "DEFAULT_LEASE_S",
    "MAX_LEASE_S",
    "Beat",
    "Claim",
    "Draft",
    "Identity",
    "LeaseWatch",
    "Silent",
    "all_count",
    "claim",
    "draft",
    "read_status",
    "take_over",
]

_CONTENTION_TRIES = 5
# A server that has the request among the bridge's own refs takes them: one that declines is asked again.
_REFUSALS = 2
# Where it still declines, others may be let in: who saw the request before our branch has pushed by then.
_SETTLE_S = 2.0


def claim(
    git: Git,
    remote: str,
    pending: Pending,
    identity: Identity,
    *,
    attempt: int = 1,
    lease_s: float = DEFAULT_LEASE_S,
    standing: Mapping[str, str] | None = None,
    sign: Sign = unsigned,
    counts: Counts = all_count,
    drafted: Draft | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Claim | None:
    """Try to become the one runner of a request; None: somebody else has it, or it stands no more.

    Args:
        git: Any repository of this machine; nothing is left in it.
        remote: Address of the bus.
        pending: The request.
        identity: Who claims.
        attempt: How often the request will have been claimed.
        lease_s: Seconds without a heartbeat after which others may take over.
        standing: Refs and the commits they must still hold for the claim to succeed. So a request that was
            answered since it was seen is not claimed again.
        sign: Signs this claim and its heartbeats.
        counts: Which claims of others must be respected once this one is ours; the default: all.
        drafted: This claim as `draft` made it for the right attempt; None: it is made now.
        sleep: Waits so many seconds.

    Raises:
        PushRejected: The remote takes claims neither as its own refs nor as branches.
        RemoteUnreachable: It did not answer.
    """
    drafted = drafted or draft(pending, identity, lease_s=lease_s, attempt=attempt, sign=sign)
    taker = _Taker(git, remote, drafted, standing or {}, sign, counts)
    own, branch = refs.claim_places(pending.nonce)
    takes_ours = pending.ref is None
    for _ in range(_REFUSALS if takes_ours else 1):
        with contextlib.suppress(PushRejected):
            return taker.take(own, expected="", beside=branch)
    held = taker.take(branch, expected="", beside=own)
    if held is not None and takes_ours:
        sleep(_SETTLE_S)
    return None if held is None or held.gives_way() else held


def take_over(
    git: Git,
    remote: str,
    pending: Pending,
    identity: Identity,
    *,
    silent: Silent,
    lease_s: float = DEFAULT_LEASE_S,
    standing: Mapping[str, str] | None = None,
    sign: Sign = unsigned,
    counts: Counts = all_count,
    drafted: Draft | None = None,
) -> Claim | None:
    """Swap a silent runner's claim for our own, `attempt` one higher; None: it moved after all.

    For the arguments see `claim`.

    Raises:
        PushRejected: The remote said no.
        RemoteUnreachable: It did not answer.
    """
    attempt = silent.attempt + 1
    drafted = drafted or draft(pending, identity, lease_s=lease_s, attempt=attempt, sign=sign)
    taker = _Taker(git, remote, drafted, standing or {}, sign, counts)
    return taker.take(silent.ref, expected=silent.commit)


@dataclass(frozen=True)
class _Taker:
    """A claim on its way to the remote."""

    git: Git
    remote: str
    draft: Draft
    standing: Mapping[str, str]
    sign: Sign
    counts: Counts

    def take(self, ref: str, *, expected: str, beside: str | None = None) -> Claim | None:
        """Put it where `expected` stands; None: something else does, or what must stand moved.

        Args:
            ref: The place.
            expected: What it holds; empty: nothing.
            beside: The other place for such a claim: where the push fails, nothing may stand there.

        Raises:
            PushRejected: The remote said no, and it was looked: neither place holds a claim.
            RemoteUnreachable: It did not answer.
        """
        remote, standing = self.remote, self.standing
        places = (ref, beside) if beside else (ref,)
        with self.git.scratch() as scratch:
            commit = write_claim(scratch, self.draft.status, self.draft.signature())
            # What must stand is "pushed" as it is: git then checks the lease and sends nothing for it.
            untouched = [Update(other, held, held) for other, held in standing.items()]
            for _ in range(_CONTENTION_TRIES):
                try:
                    updates = [Update(ref, commit, expected), *untouched]
                    scratch.push(remote, updates, timeout_s=PUSH_TIMEOUT_S)
                    return self._held(ref, commit)
                except (LeaseLost, RemoteUnreachable, PushRejected) as error:
                    # Lost to another claim, or only to the server's lock on the ref? Or only the answer?
                    found = scratch.ls_remote(remote, *places, *standing, timeout_s=PUSH_TIMEOUT_S)
                    if found.get(ref) == commit:
                        return self._held(ref, commit)
                    if isinstance(error, RemoteUnreachable):
                        raise
                    moved = any(found.get(other) != held for other, held in standing.items())
                    if moved or found.get(ref, "") != expected or (beside and beside in found):
                        return None
                    if isinstance(error, PushRejected):
                        raise
        return None

    def _held(self, ref: str, commit: str) -> Claim:
        return Claim(
            self.git,
            self.remote,
            ref=ref,
            commit=commit,
            status=self.draft.status,
            sign=self.sign,
            counts=self.counts,
        )
