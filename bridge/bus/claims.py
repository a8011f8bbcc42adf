"""Who runs a request: the claim, its heartbeat, and taking over one whose holder fell silent.

A claim is a ref holding a parentless commit with ``status.json``; every change is a compare-and-swap on the
remote. Pushing the object a ref already holds reports success even with a stale lease, so every claim commit
is unique. A claim and each of its heartbeats are signed by the runner; a holder that knows whose signature
counts (`Counts`) puts its claim back where somebody squatted it. When others may take over is in `leases`.

Where a server declines the bridge's own refs, a branch serves instead. A push covers one of the two places
only, so the own ref goes first: whoever holds the branch looks there with each heartbeat, and gives way.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from bridge.bus import refs
from bridge.bus.claimed import read_status
from bridge.bus.drafts import Draft, Identity, Sign, draft
from bridge.bus.git import Git, Update
from bridge.bus.leases import DEFAULT_LEASE_S, MAX_LEASE_S, LeaseWatch, Silent
from bridge.bus.mirror import Pending
from bridge.bus.objects import Entry
from bridge.errors import BusError, LeaseLost, PushRejected, RemoteUnreachable
from bridge.manifest import format_time, parse_time
from bridge.result import STATUS_NAME, STATUS_SIGNATURE_NAME, Phase, Progress, RunStatus

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

# Whether a claim of this request, a commit that is in the repository, is one that must be respected.
Counts = Callable[[Git, str, str], bool]

_PUSH_TIMEOUT_S = 30.0
_CONTENTION_TRIES = 5
# A server that has the request among the bridge's own refs takes them: one that declines is asked again.
_REFUSALS = 2
_MAX_FETCH_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Beat:
    """What a heartbeat says about the job."""

    phase: Phase
    elapsed_s: float
    progress: Progress | None = None
    log_tail: tuple[str, ...] = ()


def _unsigned(_: bytes) -> None:
    return None


def all_count(_git: Git, _commit: str, _nonce: str) -> bool:
    """Respect every claim that stands in the place of ours."""
    return True


class Claim:
    """A request that this process holds. Made by `claim` or `take_over`; not safe for use by two threads."""

    def __init__(
        self,
        git: Git,
        remote: str,
        *,
        ref: str,
        commit: str,
        status: RunStatus,
        sign: Sign = _unsigned,
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
                    timeout_s=_PUSH_TIMEOUT_S,
                    limit_bytes=_MAX_FETCH_BYTES,
                )
            except RemoteUnreachable:
                raise
            except BusError:  # more than any claim has
                return True
            return scratch.exists(commit) and not self._counts(scratch, commit, self.status.nonce)

    def is_second(self, found: Mapping[str, str] | None = None) -> bool:
        """Whether ours is on a branch while one that must be respected is among the bridge's own refs.

        Args:
            found: What the remote holds; None: it is asked, if need be.

        Raises:
            RemoteUnreachable: The remote did not answer.
        """
        own = refs.claim_ref(self.status.nonce)
        if self.ref == own:
            return False
        if found is None:
            found = self._git.ls_remote(self._remote, own, timeout_s=_PUSH_TIMEOUT_S)
        return own in found and not self.is_squatted(found[own], own)

    def beat(self, beat: Beat) -> None:
        """Renew the lease and say how far the job is.

        Raises:
            LeaseLost: Somebody else holds the claim, or it was deleted: the job must stop.
            RemoteUnreachable: The remote did not answer; the lease runs on, try again.
            PushRejected: The remote said no.
        """
        if self.is_second():
            with contextlib.suppress(BusError):
                self.release()
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
        found = self._git.ls_remote(self._remote, self.ref, inbox, timeout_s=_PUSH_TIMEOUT_S)
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
                self._git.push(self._remote, [Update(self.ref, None, held)], timeout_s=_PUSH_TIMEOUT_S)
            except LeaseLost:
                continue
            return

    def _swap(self, status: RunStatus) -> None:
        signature = self._sign(status.to_bytes())
        with self._git.scratch() as scratch:
            commit = _write(scratch, status, signature)
            try:
                scratch.push(
                    self._remote, [Update(self.ref, commit, self._commit)], timeout_s=_PUSH_TIMEOUT_S
                )
            except (RemoteUnreachable, PushRejected):  # a server may hang up, or say no, and have taken it
                self._unanswered.add(commit)
                raise
        self._commit, self.status = commit, status
        self._unanswered.clear()


def claim(
    git: Git,
    remote: str,
    pending: Pending,
    identity: Identity,
    *,
    attempt: int = 1,
    lease_s: float = DEFAULT_LEASE_S,
    standing: Mapping[str, str] | None = None,
    sign: Sign = _unsigned,
    counts: Counts = all_count,
    drafted: Draft | None = None,
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

    Raises:
        PushRejected: The remote takes claims neither as its own refs nor as branches.
        RemoteUnreachable: It did not answer.
    """
    drafted = drafted or draft(pending, identity, lease_s=lease_s, attempt=attempt, sign=sign)
    taker = _Taker(git, remote, drafted, standing or {}, sign, counts)
    own, branch = refs.claim_ref(pending.nonce), refs.BRANCH_CLAIMS + pending.nonce
    for _ in range(_REFUSALS if pending.ref is None else 1):
        with contextlib.suppress(PushRejected):
            return taker.take(own, expected="", beside=branch)
    held = taker.take(branch, expected="", beside=own)
    if held is not None and held.is_second():
        with contextlib.suppress(PushRejected):  # a server may keep its branches; the first place counts
            held.release()
        return None
    return held


def take_over(
    git: Git,
    remote: str,
    pending: Pending,
    identity: Identity,
    *,
    silent: Silent,
    lease_s: float = DEFAULT_LEASE_S,
    standing: Mapping[str, str] | None = None,
    sign: Sign = _unsigned,
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
            commit = _write(scratch, self.draft.status, self.draft.signature())
            # What must stand is "pushed" as it is: git then checks the lease and sends nothing for it.
            untouched = [Update(other, held, held) for other, held in standing.items()]
            for _ in range(_CONTENTION_TRIES):
                try:
                    updates = [Update(ref, commit, expected), *untouched]
                    scratch.push(remote, updates, timeout_s=_PUSH_TIMEOUT_S)
                    return self._held(ref, commit)
                except (LeaseLost, RemoteUnreachable, PushRejected) as error:
                    # Lost to another claim, or only to the server's lock on the ref? Or only the answer?
                    found = scratch.ls_remote(remote, *places, *standing, timeout_s=_PUSH_TIMEOUT_S)
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


def _write(git: Git, status: RunStatus, signature: bytes | None) -> str:
    files = {STATUS_NAME: status.to_bytes()}
    if signature is not None:
        files[STATUS_SIGNATURE_NAME] = signature
    tree = git.write_tree(
        [Entry("100644", "blob", git.write_blob(data), name) for name, data in files.items()]
    )
    return git.commit_tree(tree, [], f"kakeya-mac claim: {status.nonce} [skip ci]\n")


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
