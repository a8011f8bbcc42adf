"""From a request in the queue to one that is ours: looked at, claimed, or left to somebody else.

A claim succeeds only while the request still stands as it was seen, in the inbox and on its branch. Where
the branch moved, the request is taken without it and its result goes elsewhere; where the branch was deleted,
that is a wish to stop it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, replace
from datetime import datetime

from bridge.bus.claims import (
    Claim,
    Draft,
    Silent,
    all_count,
    claim,
    draft,
    read_status,
    take_over,
)
from bridge.bus.git import Update
from bridge.bus.handles import state_of
from bridge.bus.mirror import Mirror, Pending
from bridge.bus.requests import has_result
from bridge.errors import BrokenObject, BusError, LeaseLost, PushRejected
from bridge.protocol import refs
from bridge.protocol.result import Reason, RunStatus
from bridge.runner.check import Checked, Refusal, examine
from bridge.runner.holders import Holders
from bridge.runner.lineage import Lineage
from bridge.runner.peers import Peers
from bridge.runner.policy.types import BRANCHES
from bridge.runner.station import Station
from bridge.runner.turns import Requester
from bridge.runner.wishes import Wishes

# A claim pushed faster than this leaves nobody time to claim, run and publish in between.
_SURE_S = 0.05
# A claim that was signed longer ago is signed anew.
_DRAFT_S = 1.0


@dataclass(frozen=True)
class Taken:
    """A request that is ours now, and what its run may not rely on.

    Attributes:
        claim: Ours.
        wish: Why it is to end before it starts; None: it may start.
        last: The last sign of the runner that held it before.
    """

    claim: Claim
    wish: str | None
    last: RunStatus | None = None


class Desk:
    """Where pending requests are looked at and claimed.

    Args:
        station: The runner.
        mirror: Its copy of the queue.
        peers: Whose claims are respected.
        holders: Who has claimed what.
        wishes: Who wants requests stopped.
        say: Takes one line for the owner.
        now: The time of day (aware).
    """

    def __init__(
        self,
        station: Station,
        mirror: Mirror,
        peers: Peers,
        holders: Holders,
        wishes: Wishes,
        *,
        say: Callable[[str], None],
        now: Callable[[], datetime],
    ) -> None:
        self._station = station
        self._mirror = mirror
        self._say = say
        self._now = now
        self._peers = peers
        self._holders = holders
        self._wishes = wishes
        # The claim that is being signed, of which attempt, and since when; and for which requests one was.
        self._draft: tuple[Draft, int, float] | None = None
        self._drafted: set[str] = set()
        # Requests that were found answered although they stand in the inbox.
        self._answered: set[tuple[str, str]] = set()
        # Requests whose objects could not be read, and for which the mirror was made again.
        self._renewed: set[str] = set()
        folder = mirror.git.directory
        self._lineage = Lineage(station, mirror.git, folder.with_name(f"workloads-of-{folder.name}"))

    def update(self, pending: Collection[Pending]) -> None:
        """Take in what the mirror saw at its last look, and forget what is not pending any more."""
        nonces = {request.nonce for request in pending}
        self._answered = {known for known in self._answered if known[0] in nonces}
        self._renewed &= nonces
        self._drafted &= {request.commit for request in pending}

    def place(self, pending: Pending, requester: Requester) -> tuple[int | None, Silent | None]:
        """The attempt we would be, with the silent claim we would replace; (None, None): not ours to take.

        Args:
            pending: The request.
            requester: Who signed it, as far as that is known.
        """
        if (pending.nonce, pending.commit) in self._answered:
            return None, None
        return self._holders.place(pending.nonce, requester)

    def begin(self, pending: Pending, attempt: int) -> None:
        """Begin to sign the claim of a request that is about to be examined, once for each request."""
        if pending.commit in self._drafted or (self._draft is not None and not self._draft[0].is_made()):
            return
        self._drafted.add(pending.commit)
        station = self._station
        made = draft(
            pending,
            station.identity,
            lease_s=station.lease_s,
            attempt=attempt,
            sign=station.sign_claim,
            beside=True,
        )
        self._draft = (made, attempt, time.monotonic())

    def _drafted_for(self, pending: Pending, attempt: int) -> Draft | None:
        """What `begin` made, if it was for this and has just been: its time is in it. Good for one use."""
        begun, self._draft = self._draft, None
        if begun is None or time.monotonic() - begun[2] > _DRAFT_S:
            return None
        made, number, _ = begun
        ours = (made.status.nonce, made.status.request_commit, number)
        return made if ours == (pending.nonce, pending.commit, attempt) else None

    def examine(
        self, pending: Pending, answered: Container[str], over_quota: str | None = None
    ) -> Checked | None:
        """`check.examine`; None: the copy here is broken, it was made again, look again.

        Raises:
            RemoteUnreachable: There is no remote to make it again from.
        """
        checked = examine(
            self._mirror.git,
            pending,
            self._station,
            now=self._now(),
            answered=answered,
            lineage=self._lineage.check,
            over_quota=over_quota,
        )
        refusal = checked.refusal
        if refusal is None and self._station.policy.allow_refs is not None:
            return self._placed(checked)
        if refusal is None or refusal.reason is not Reason.BAD_COMMIT or pending.nonce in self._renewed:
            return checked
        cause = refusal.__context__
        if not isinstance(cause, BusError) or isinstance(cause, BrokenObject):
            return checked
        self._renewed.add(pending.nonce)
        self._say(f"{pending.nonce}: {refusal.message}")
        self._mirror.remake()
        return None

    def _placed(self, checked: Checked) -> Checked:
        """Refuse what does not stand on its branch, where the branch decides: to the inbox all may push."""
        pending, manifest = checked.pending, checked.manifest
        assert manifest is not None  # noqa: S101 - what is not refused has one
        tip = self._mirror.standing(pending.nonce, manifest.result_ref).branch
        deleted = tip is None and self._wishes.by_deletion is not None
        if deleted or tip == pending.commit or (tip and has_result(self._mirror.git, tip, pending.nonce)):
            return checked
        branch = manifest.result_ref.removeprefix(BRANCHES)
        message = (
            f"the branch {branch} does not hold this request, and this machine's policy goes by branches"
        )
        return replace(checked, refusal=Refusal(Reason.POLICY, message, key=("allow_refs",)))

    def take(self, checked: Checked, silent: Silent | None) -> Taken | None:
        """Claim a request; None: somebody else has it, or it is answered.

        Args:
            checked: The request, and what was found of it.
            silent: The claim that ours replaces; see `place`.
        """
        pending = checked.pending
        branch = pending.ref if checked.manifest is None else checked.manifest.result_ref
        standing = {} if pending.ref else {refs.inbox_ref(pending.nonce): pending.commit}
        whole = {**standing, branch: pending.commit} if branch else standing
        guarded = checked.requester is not None and self._station.policy.require_signature
        held, wish = self._claim(pending, silent, whole, guarded), None
        if held is None and branch and standing:
            wish, open_still = self._what_moved(checked, silent, branch)
            runs = wish is None and checked.refusal is None
            if open_still and not (runs and self._station.policy.allow_refs is not None):
                held = self._claim(pending, silent, standing, guarded)
        if held is None and pending.ref:
            self._mirror.scan_next()
        if held is None:
            return None
        if silent is not None and silent.squatted:
            self._say(f"{pending.nonce}: its claim was of no runner known here, and was replaced")
        last = None if silent is None or silent.squatted else read_status(self._mirror.git, silent.commit)
        return Taken(held, wish or self._wishes.counted(checked), last)

    def is_open(self, pending: Pending) -> bool:
        """Whether the request still waits for its answer, by one look at the remote."""
        found = self._mirror.git.ls_remote(self._station.remote)
        return state_of(found, pending.nonce).is_open(pending.commit)

    def _claim(
        self, pending: Pending, silent: Silent | None, standing: dict[str, str], guarded: bool
    ) -> Claim | None:
        """Push a claim; a guarded one gives way to known runners only."""
        station, git = self._station, self._mirror.git
        counts = self._peers.respects if guarded else all_count
        began = time.monotonic()
        attempt = self._holders.attempt(pending.nonce) if silent is None else silent.attempt + 1
        drafted = self._drafted_for(pending, attempt)
        if silent is None:
            held = claim(
                git,
                station.remote,
                pending,
                station.identity,
                attempt=attempt,
                lease_s=station.lease_s,
                standing=standing,
                sign=station.sign_claim,
                counts=counts,
                drafted=drafted,
            )
        else:
            held = take_over(
                git,
                station.remote,
                pending,
                station.identity,
                silent=silent,
                lease_s=station.lease_s,
                standing=standing,
                sign=station.sign_claim,
                counts=counts,
                drafted=drafted,
            )
        if held is None or time.monotonic() - began < _SURE_S:
            return held
        found = git.ls_remote(station.remote)
        if state_of(found, pending.nonce).is_open(pending.commit) and held.is_alone(found):
            return held
        held.release()
        return None

    def _what_moved(self, checked: Checked, silent: Silent | None, branch: str) -> tuple[str | None, bool]:
        """Why the claim failed where nobody else has it: a wish to stop, and whether it is open still."""
        pending = checked.pending
        found = self._mirror.git.ls_remote(self._station.remote)
        state = state_of(found, pending.nonce)
        if state.claim is not None and (silent is None or state.claim.commit != silent.commit):
            return None, False
        if state.inbox != pending.commit or state.result is not None:
            return None, False
        standing = self._mirror.standing(pending.nonce, branch)
        if standing.branch is None:
            return self._wishes.deleted_just_now(checked.manifest), True
        if has_result(self._mirror.git, standing.branch, pending.nonce):
            self._answered.add((pending.nonce, pending.commit))
            self._say(f"{pending.nonce}: it has its answer on {branch}, and leaves the inbox")
            left = Update(refs.inbox_ref(pending.nonce), None, pending.commit)
            with contextlib.suppress(PushRejected, LeaseLost):  # a server may keep its refs, others be faster
                self._mirror.git.push(self._station.remote, [left])
            return None, False
        return None, True
