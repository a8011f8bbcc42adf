"""Who runs a request: the claim, its heartbeat, and taking over one whose holder fell silent.

A claim is a ref holding a parentless commit with ``status.json``; every change is a compare-and-swap on the
remote. Pushing the object a ref already holds reports success even with a stale lease, so every claim commit
is unique. Leases are judged by the observer's own monotonic clock since it first saw a commit: clocks need
not agree. Claims are not signed: whoever can push can squat one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from bridge.bus import refs
from bridge.bus.git import Git, Update
from bridge.bus.handles import Held
from bridge.bus.mirror import Pending
from bridge.bus.objects import Entry
from bridge.bus.untrusted import clean_line
from bridge.errors import BusError, LeaseLost, PushRejected, RemoteUnreachable, ResultError
from bridge.manifest import format_time, parse_time
from bridge.result import MAX_BYTES, STATUS_NAME, Phase, Progress, RunStatus, parse_status

DEFAULT_LEASE_S = 120.0
# A squatted claim must not hold a request for longer than this, whatever lease it asks for.
MAX_LEASE_S = 900.0

_PUSH_TIMEOUT_S = 30.0
_CONTENTION_TRIES = 5
# Of an attempt that somebody claims to have made.
_MOST_ATTEMPTS = 1000


@dataclass(frozen=True)
class Identity:
    """A runner: its name for people, its random id, and its process's (16 hex digits each)."""

    name: str
    id: str
    session: str


@dataclass(frozen=True)
class Beat:
    """What a heartbeat says about the job."""

    phase: Phase
    elapsed_s: float
    progress: Progress | None = None
    log_tail: tuple[str, ...] = ()


class Claim:
    """A request that this process holds. Made by `claim` or `take_over`; not safe for use by two threads."""

    def __init__(self, git: Git, remote: str, *, ref: str, commit: str, status: RunStatus) -> None:
        self.ref = ref
        self.status = status
        self._git = git
        self._remote = remote
        self._commit = commit
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

    def beat(self, beat: Beat) -> None:
        """Renew the lease and say how far the job is.

        Raises:
            LeaseLost: Somebody else holds the claim, or it was deleted: the job must stop.
            RemoteUnreachable: The remote did not answer; the lease runs on, try again.
            PushRejected: The remote said no.
        """
        status = _next_status(self.status, beat)
        try:
            self._swap(status)
        except LeaseLost:
            held = self._git.ls_remote(self._remote, self.ref, timeout_s=_PUSH_TIMEOUT_S).get(self.ref)
            if held == self._commit:  # it is ours; a push beside this one, or one cut short, has it locked
                raise RemoteUnreachable(f"the server has the claim {self.ref} locked", "try again") from None
            if held is None or held not in self._unanswered:
                raise LeaseLost(f"the claim {self.ref} is no longer ours", "the job was stopped") from None
            self._commit = held
            self._unanswered.clear()
            self._swap(_next_status(self.status, beat))

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
        with self._git.scratch() as scratch:
            commit = _write(scratch, status)
            try:
                scratch.push(
                    self._remote, [Update(self.ref, commit, self._commit)], timeout_s=_PUSH_TIMEOUT_S
                )
            except RemoteUnreachable:
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
    lease_s: float = DEFAULT_LEASE_S,
    standing: Mapping[str, str] | None = None,
) -> Claim | None:
    """Try to become the one runner of a request; None: somebody else has it, or it stands no more.

    Args:
        git: Any repository of this machine; nothing is left in it.
        remote: Address of the bus.
        pending: The request.
        identity: Who claims.
        lease_s: Seconds without a heartbeat after which others may take over.
        standing: Refs and the commits they must still hold for the claim to succeed. So a request that was
            answered since it was seen is not claimed again.

    Raises:
        PushRejected: The remote takes claims neither as its own refs nor as branches.
        RemoteUnreachable: It did not answer.
    """
    status = _first_status(pending, identity, lease_s, attempt=1)
    standing = standing or {}
    try:
        return _take(git, remote, refs.claim_ref(pending.nonce), status, expected="", standing=standing)
    except PushRejected:
        ref = refs.BRANCH_CLAIMS + pending.nonce
        return _take(git, remote, ref, status, expected="", standing=standing)


def take_over(
    git: Git,
    remote: str,
    pending: Pending,
    identity: Identity,
    *,
    silent: Silent,
    lease_s: float = DEFAULT_LEASE_S,
    standing: Mapping[str, str] | None = None,
) -> Claim | None:
    """Swap a silent runner's claim for our own, `attempt` one higher; None: it moved after all.

    Raises:
        PushRejected: The remote said no.
        RemoteUnreachable: It did not answer.
    """
    status = _first_status(pending, identity, lease_s, min(silent.attempt, _MOST_ATTEMPTS) + 1)
    return _take(git, remote, silent.ref, status, expected=silent.commit, standing=standing or {})


@dataclass(frozen=True)
class Silent:
    """A claim whose heartbeat stopped for longer than its lease."""

    ref: str
    commit: str
    attempt: int


class LeaseWatch:
    """Notices claims that fell silent, by this process's own clock.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[str, float]] = {}

    def observe(self, nonce: str, held: Held, status: RunStatus | None) -> Silent | None:
        """Note what a claim holds now; a `Silent` when that has not changed for its lease.

        Args:
            nonce: The request.
            held: The claim's ref and the commit it holds.
            status: What it says; None: unreadable, then the default lease counts.
        """
        now = self._clock()
        before = self._seen.get(nonce)
        if before is None or before[0] != held.commit:
            self._seen[nonce] = (held.commit, now)
            return None
        lease = DEFAULT_LEASE_S if status is None else min(status.lease_s, MAX_LEASE_S)
        if now - before[1] < lease:
            return None
        return Silent(held.ref, held.commit, 1 if status is None else status.attempt)

    def forget(self, still_claimed: Sequence[str]) -> None:
        """Drop what is known of claims that are no longer there."""
        self._seen = {nonce: seen for nonce, seen in self._seen.items() if nonce in set(still_claimed)}


def read_status(git: Git, commit: str) -> RunStatus | None:
    """A claim's heartbeat, from a commit that is in this repository; None when it is not one of ours.

    Anyone with push rights can write one, so its texts come back without anything a terminal would obey.
    """
    try:
        data = git.read_blob(commit, STATUS_NAME, MAX_BYTES)
        status = None if data is None else parse_status(data)
    except (ResultError, BusError):  # not ours, or too large to be
        return None
    if status is None:
        return None
    progress = status.progress
    shown = progress and progress.model_copy(update={"step": clean_line(progress.step)})
    tail = tuple(clean_line(line) for line in status.log_tail)
    return status.model_copy(
        update={"runner": clean_line(status.runner), "progress": shown, "log_tail": tail}
    )


def _take(
    git: Git, remote: str, ref: str, status: RunStatus, *, expected: str, standing: Mapping[str, str]
) -> Claim | None:
    with git.scratch() as scratch:
        commit = _write(scratch, status)
        # What must stand is "pushed" as it is: git then checks the lease and sends nothing for it.
        untouched = [Update(other, held, held) for other, held in standing.items()]
        for _ in range(_CONTENTION_TRIES):
            try:
                scratch.push(remote, [Update(ref, commit, expected), *untouched], timeout_s=_PUSH_TIMEOUT_S)
                return Claim(git, remote, ref=ref, commit=commit, status=status)
            except (LeaseLost, RemoteUnreachable) as error:
                # Lost to another claim, or only to the server's lock on the ref? Or only the answer?
                found = scratch.ls_remote(remote, ref, *standing, timeout_s=_PUSH_TIMEOUT_S)
                if found.get(ref) == commit:
                    return Claim(git, remote, ref=ref, commit=commit, status=status)
                if isinstance(error, RemoteUnreachable):
                    raise
                moved = any(found.get(other) != held for other, held in standing.items())
                if moved or found.get(ref, "") != expected:
                    return None
    return None


def _write(git: Git, status: RunStatus) -> str:
    tree = git.write_tree([Entry("100644", "blob", git.write_blob(status.to_bytes()), STATUS_NAME)])
    return git.commit_tree(tree, [], f"kakeya-mac claim: {status.nonce} [skip ci]\n")


def _first_status(pending: Pending, identity: Identity, lease_s: float, attempt: int) -> RunStatus:
    return RunStatus(
        nonce=pending.nonce,
        request_commit=pending.commit,
        runner=identity.name,
        runner_id=identity.id,
        pid=os.getpid(),
        unique=secrets.token_hex(16),
        attempt=attempt,
        beat=0,
        lease_s=lease_s,
        session=identity.session,
        updated_at=format_time(datetime.now(UTC)),
        phase=Phase.CLAIMED,
        elapsed_s=0.0,
    )


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
