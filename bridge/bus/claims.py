"""Claims: which runner has a request, how it renews its lease, and when another may take over.

Each heartbeat is a new commit, because pushing what a ref already holds succeeds even with a stale lease.
Leases are judged by the observer's own monotonic clock since it first saw a heartbeat.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from bridge import errors
from bridge.bus.requests import RefValue
from bridge.git.repo import SWAP_TIMEOUT_S, GitRepo, RefUpdate, Scratch
from bridge.protocol import refs, result
from bridge.protocol.manifest import format_time, parse_time
from bridge.protocol.sanitize import clean_line
from bridge.signing import CLAIM_NAMESPACE, MAX_SIGNATURE_BYTES
from bridge.signing.trust import Signature, TrustLevel, weigh

DEFAULT_LEASE_S = 120.0
# A claim does not hold a request for longer than this without a heartbeat, whatever lease it asks for.
MAX_LEASE_S = 900.0
# A claim may say any number of attempts; a result counts up to a million.
MAX_ATTEMPT = 1001

# Signs the bytes of a claim; where it gives None, the claim goes unsigned.
Sign = Callable[[bytes], bytes | None]


@dataclass(frozen=True)
class RunnerIdentity:
    """A runner: its name for people, its random id, and its process's (16 hex digits each)."""

    name: str
    id: str
    session: str


@dataclass(frozen=True)
class Heartbeat:
    """What a heartbeat says about the job."""

    phase: result.Phase
    elapsed_s: float
    progress: result.Progress | None = None
    log_tail: tuple[str, ...] = ()


def read_status(git: GitRepo, commit: str) -> result.RunStatus | None:
    """A claim's heartbeat, its texts cleaned, from a commit that is here; None when it is not one of ours."""
    return _parse(git.try_read_file(commit, result.STATUS_NAME, result.MAX_BYTES))


def read_claim(
    git: GitRepo, commit: str, nonce: str, trusted: Path
) -> tuple[result.RunStatus, Signature] | None:
    """A claim, its texts cleaned, and its signature's worth; None when it is none, or another request's.

    The signature covers the exact bytes of ``status.json``; one that does not verify counts as none.
    """
    data = git.try_read_file(commit, result.STATUS_NAME, result.MAX_BYTES)
    status = _parse(data)
    if data is None or status is None or status.nonce != nonce:
        return None
    signature = git.try_read_file(commit, result.STATUS_SIGNATURE_NAME, MAX_SIGNATURE_BYTES)
    try:
        return status, weigh(data, signature, CLAIM_NAMESPACE, trusted)
    except (errors.SignatureError, errors.MachineError):
        return status, Signature(TrustLevel.UNSIGNED)


def claim(
    git: GitRepo,
    remote: str,
    *,
    nonce: str,
    place: RefValue,
    identity: RunnerIdentity,
    attempt: int = 1,
    lease_s: float = DEFAULT_LEASE_S,
    replaces: RefValue | None = None,
    sign: Sign | None = None,
) -> Claim | None:
    """Try to become the one runner of a request; None: another runner has it, or it is answered.

    `place` is where the request was found and still has to be, `replaces` another runner's claim whose lease
    has expired. `sign` signs this claim and its heartbeats.
    """
    status = result.RunStatus(
        nonce=nonce,
        request_commit=place.commit,
        runner=identity.name,
        runner_id=identity.id,
        pid=os.getpid(),
        unique=secrets.token_hex(16),
        attempt=min(attempt, MAX_ATTEMPT),
        beat=0,
        lease_s=lease_s,
        session=identity.session,
        updated_at=format_time(datetime.now(UTC)),
        phase=result.Phase.CLAIMED,
        elapsed_s=0.0,
    )
    new = Claim(git, remote, ref=refs.CLAIMS + nonce, commit="", status=status, sign=sign)
    own, branch = refs.claim_places(nonce)
    if replaces is not None:
        return new if new.take(replaces.ref, place, expected=replaces.commit) else None
    try:
        return new if new.take(own, place, other=branch) else None
    except errors.PushRejected:
        if place.ref.startswith(refs.INBOX):  # the server takes the bridge's own refs
            raise
        return new if new.take(branch, place, other=own) else None


@dataclass
class Claim:
    """A request that this process holds. Not safe for use by two threads."""

    git: GitRepo
    remote: str
    ref: str
    commit: str
    status: result.RunStatus
    sign: Sign | None = None
    # Commits of ours that the remote may hold all the same.
    _unanswered: set[str] = field(default_factory=set)

    @property
    def attempt(self) -> int:
        """How often this request has been claimed, this time included."""
        return self.status.attempt

    def holds(self, commit: str) -> bool:
        """Whether this commit is ours, one whose push was never answered included."""
        return commit == self.commit or commit in self._unanswered

    def take(self, ref: str, place: RefValue, *, expected: str = "", other: str | None = None) -> bool:
        """Put the claim where `expected` is now (empty: nothing); whether it is ours.

        `place` must still hold what it held. Where the push fails, `other`, the other place for such a claim,
        must be empty.
        """
        # "Pushing" what a ref holds already sends nothing, and fails when that has changed.
        same = [RefUpdate(place.ref, place.commit, place.commit)]
        with self.git.scratch() as scratch:
            commit = self._write(scratch, self.status)
            if scratch.swap(self.remote, RefUpdate(ref, commit, expected), same, other=other) is not None:
                return False
        self.ref, self.commit = ref, commit
        return True

    def renew(self, beat: Heartbeat, *, lease_s: float | None = None) -> None:
        """Renew the lease, from now on of `lease_s` seconds if given, and say how far the job is.

        A `LeaseLost`: another runner holds the claim, or it was deleted, and the job must stop. After any
        other error the lease runs on.
        """
        changes = {
            "unique": secrets.token_hex(16),
            "beat": self.status.beat + 1,
            "updated_at": format_time(datetime.now(UTC)),
            "phase": beat.phase,
            "elapsed_s": max(0.0, beat.elapsed_s),
            "progress": beat.progress,
            "log_tail": tuple(line[:500] for line in beat.log_tail[-40:]),
            "lease_s": self.status.lease_s if lease_s is None else lease_s,
        }
        status = self.status.model_copy(update=changes)
        with self.git.scratch() as scratch:
            commit = self._write(scratch, status)
            earlier = set(self._unanswered)
            self._unanswered.add(commit)
            while (found := scratch.swap(self.remote, RefUpdate(self.ref, commit, self.commit))) is not None:
                held = found.get(self.ref, "")
                if held == self.commit:  # another push, or one cut short, has it locked
                    raise errors.RemoteUnreachable(f"the server has the claim {self.ref} locked", "try again")
                if held not in earlier:
                    raise errors.LeaseLost(f"the claim {self.ref} is no longer ours", "the job was stopped")
                self.commit = held
        self.commit, self.status = commit, status
        self._unanswered.clear()

    def hold_for_publishing(self, line: str | None = None, *, lease_s: float = MAX_LEASE_S) -> None:
        """Renew for the push that follows, or for a row of them; `line` joins the log lines."""
        tail = self.status.log_tail
        if line is not None and line not in tail:
            tail = (*tail, line)
        since = datetime.now(UTC) - parse_time(self.status.updated_at)
        elapsed_s = self.status.elapsed_s + max(0.0, since.total_seconds())
        self.renew(Heartbeat(result.Phase.PUBLISHING, elapsed_s, None, tail), lease_s=lease_s)

    def release(self) -> None:
        """Give the request back: delete the claim if it is still ours. Never raises for a lost one."""
        for held in (self.commit, *self._unanswered):
            try:
                self.git.push(self.remote, [RefUpdate(self.ref, None, held)], timeout_s=SWAP_TIMEOUT_S)
            except errors.LeaseLost:
                continue
            return

    def _write(self, scratch: Scratch, status: result.RunStatus) -> str:
        data = status.to_bytes()
        signature = None if self.sign is None else self.sign(data)
        files = {result.STATUS_NAME: data, result.STATUS_SIGNATURE_NAME: signature}
        return scratch.commit_files(None, files, f"kakeya-mac claim: {status.nonce} [skip ci]\n")


def has_expired(lease_s: float | None, silent_s: float) -> bool:
    """Whether a claim that held the same commit for so long has lost its lease; None: it names no lease."""
    return silent_s >= (DEFAULT_LEASE_S if lease_s is None else min(lease_s, MAX_LEASE_S))


def _parse(data: bytes | None) -> result.RunStatus | None:
    try:
        status = result.parse_status(data or b"")
    except errors.ResultError:
        return None
    shown = status.progress and status.progress.model_copy(update={"step": clean_line(status.progress.step)})
    tail = tuple(clean_line(line) for line in status.log_tail)
    changes = {"runner": clean_line(status.runner), "progress": shown, "log_tail": tail}
    return status.model_copy(update=changes)
