"""A claim that is ours: renewed with each heartbeat, put back where somebody squatted it, given back.

Each heartbeat is a claim commit of its own in the place of the one before, and signed like that one. Whose
claims need not be respected is the holder's to know (`Counts`). How a claim is got, and why one on a branch
gives way, is in `claims`.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from bridge.bus.claimed import write_claim
from bridge.bus.drafts import Sign, unsigned
from bridge.bus.git import Git, Update
from bridge.bus.leases import MAX_LEASE_S
from bridge.errors import BusError, LeaseLost, PushRejected, RemoteUnreachable
from bridge.protocol import refs
from bridge.protocol.manifest import format_time, parse_time
from bridge.protocol.result import Phase, Progress, RunStatus

# Whether a claim of this request, a commit that is in the repository, is one that must be respected.
Counts = Callable[[Git, str, str], bool]

PUSH_TIMEOUT_S = 30.0
_MAX_FETCH_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Beat:
    """What a heartbeat says about the job."""

    phase: Phase
    elapsed_s: float
    progress: Progress | None = None
    log_tail: tuple[str, ...] = ()


def all_count(_git: Git, _commit: str, _nonce: str) -> bool:
    """Respect every claim that stands in the place of ours."""
    return True


class Claim:
    """A request that this process holds. Made in `claims`; not safe for use by two threads."""

    def __init__(
        self,
        git: Git,
        remote: str,
        *,
        ref: str,
        commit: str,
        status: RunStatus,
        sign: Sign = unsigned,
        counts: Counts = all_count,
    ) -> None:
        self.ref = ref
        self.status = status
        self._git = git
        self._remote = remote
        self._commit = commit
        self._sign = sign
        self._counts = counts
        # Commits of ours that the remote may hold although the answer to their push was lost.
        self._unanswered: set[str] = set()

    @property
    def commit(self) -> str:
        """The claim commit that the remote holds, as far as we know."""
        return self._commit

    @property
    def attempt(self) -> int:
        """How often this request has been claimed, this time included."""
        return self.status.attempt

    def holds(self, commit: str) -> bool:
        """Whether this commit is ours, one whose push was never answered included."""
        return commit == self._commit or commit in self._unanswered

    def is_squatted(self, commit: str, ref: str | None = None) -> bool:
        """Whether the commit that stands in the place of ours, or on `ref`, need not be respected.

        Raises:
            RemoteUnreachable: The remote did not answer.
        """
        if self._counts is all_count:
            return False
        with self._git.scratch() as scratch:
            try:
                scratch.fetch(
                    self._remote,
                    [ref or self.ref],
                    depth=1,
                    timeout_s=PUSH_TIMEOUT_S,
                    limit_bytes=_MAX_FETCH_BYTES,
                )
            except RemoteUnreachable:
                raise
            except BusError:  # more than any claim has
                return True
            return scratch.exists(commit) and not self._counts(scratch, commit, self.status.nonce)

    def is_alone(self, found: Mapping[str, str]) -> bool:
        """Whether no claim that must be respected stands in the other place.

        Args:
            found: What the remote holds.

        Raises:
            RemoteUnreachable: The remote did not answer.
        """
        own, branch = refs.claim_places(self.status.nonce)
        other = branch if self.ref == own else own
        return other not in found or self.is_squatted(found[other], other)

    def gives_way(self, found: Mapping[str, str] | None = None) -> bool:
        """Give the claim up if it is on a branch, and another is among the bridge's own refs; whether it was.

        Args:
            found: What the remote holds; None: it is asked, if need be.

        Raises:
            RemoteUnreachable: The remote did not answer.
        """
        own, _ = refs.claim_places(self.status.nonce)
        if self.ref == own:
            return False
        if found is None:
            found = self._git.ls_remote(self._remote, own, timeout_s=PUSH_TIMEOUT_S)
        if self.is_alone(found):
            return False
        with contextlib.suppress(BusError):  # a server may keep its branches; the first place counts
            self.release()
        return True

    def beat(self, beat: Beat) -> None:
        """Renew the lease and say how far the job is.

        Raises:
            LeaseLost: Somebody else holds the claim, or it was deleted: the job must stop.
            RemoteUnreachable: The remote did not answer; the lease runs on, try again.
            PushRejected: The remote said no.
        """
        if self.gives_way():
            raise LeaseLost(f"the claim {self.ref} gives way to another runner's", "the job was stopped")
        status = _next_status(self.status, beat)
        try:
            self._swap(status)
        except LeaseLost:
            self._commit = self._regained()
            self._unanswered.clear()
            self._swap(_next_status(self.status, beat))

    def _regained(self) -> str:
        """What stands in the claim's place and may be replaced by ours; empty: nothing does.

        Raises:
            LeaseLost: It is another runner's, or the request waits no more.
            RemoteUnreachable: The remote did not answer, or it is ours and locked.
        """
        inbox = refs.inbox_ref(self.status.nonce)
        found = self._git.ls_remote(self._remote, self.ref, inbox, timeout_s=PUSH_TIMEOUT_S)
        held = found.get(self.ref, "")
        if held == self._commit:  # a push beside this one, or one cut short, has it locked
            raise RemoteUnreachable(f"the server has the claim {self.ref} locked", "try again")
        if held in self._unanswered or (held and self.is_squatted(held)):
            return held
        waits = found.get(inbox) == self.status.request_commit
        if not held and waits and self._counts is not all_count:
            return held  # no runner deletes a claim and leaves the request
        raise LeaseLost(f"the claim {self.ref} is no longer ours", "the job was stopped")

    def hold(self, line: str | None = None) -> None:
        """Renew the lease for as long as a lease may be: what follows is a push that may take its time.

        Args:
            line: Put at the end of the log lines shown, if it does not stand there yet.

        Raises:
            LeaseLost: Somebody else holds the claim.
            RemoteUnreachable: The remote did not answer.
            PushRejected: The remote said no.
        """
        tail = self.status.log_tail
        if line is not None and line not in tail:
            tail = (*tail, line)
        since = datetime.now(UTC) - parse_time(self.status.updated_at)
        elapsed_s = self.status.elapsed_s + max(0.0, since.total_seconds())
        status = _next_status(self.status, Beat(Phase.PUBLISHING, elapsed_s, None, tail))
        self._swap(status.model_copy(update={"lease_s": MAX_LEASE_S}))

    def release(self) -> None:
        """Give the request back: the claim is deleted if it is still ours. Never raises for a lost one.

        Raises:
            RemoteUnreachable: The remote did not answer; the lease will run out by itself.
            PushRejected: The remote said no.
        """
        for held in (self._commit, *self._unanswered):
            try:
                self._git.push(self._remote, [Update(self.ref, None, held)], timeout_s=PUSH_TIMEOUT_S)
            except LeaseLost:
                continue
            return

    def _swap(self, status: RunStatus) -> None:
        signature = self._sign(status.to_bytes())
        with self._git.scratch() as scratch:
            commit = write_claim(scratch, status, signature)
            try:
                scratch.push(self._remote, [Update(self.ref, commit, self._commit)], timeout_s=PUSH_TIMEOUT_S)
            except (RemoteUnreachable, PushRejected):  # a server may hang up, or say no, and have taken it
                self._unanswered.add(commit)
                raise
        self._commit, self.status = commit, status
        self._unanswered.clear()


def _next_status(status: RunStatus, beat: Beat) -> RunStatus:
    changes = {
        "unique": secrets.token_hex(16),
        "beat": status.beat + 1,
        "updated_at": format_time(datetime.now(UTC)),
        "phase": beat.phase,
        "elapsed_s": max(0.0, beat.elapsed_s),
        "progress": beat.progress,
        "log_tail": tuple(line[:500] for line in beat.log_tail[-40:]),
    }
    return status.model_copy(update=changes)
