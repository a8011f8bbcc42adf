"""Claims: which runner has a request, how it renews its lease, and when another may take over.

A claim is a ref that holds a parentless commit with ``status.json``, signed by the runner; every change is a
compare-and-swap on the remote, and each heartbeat is a new claim commit. Pushing the object that a ref
already holds reports success even with a stale lease, so every claim commit is unique. Where a server
declines the bridge's own refs, a branch serves instead. Leases are judged by the observer's own monotonic
clock since it first saw a heartbeat: clocks need not agree.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from bridge.bus.requests import RefValue
from bridge.errors import (
    LeaseLost,
    MachineError,
    PushRejected,
    RemoteUnreachable,
    ResultError,
    SignatureError,
)
from bridge.git.repo import GitRepo, RefUpdate, Scratch
from bridge.protocol import refs
from bridge.protocol.manifest import format_time, parse_time
from bridge.protocol.result import (
    MAX_BYTES,
    STATUS_NAME,
    STATUS_SIGNATURE_NAME,
    Phase,
    Progress,
    RunStatus,
    parse_status,
)
from bridge.protocol.sanitize import clean_line
from bridge.signing import CLAIM_NAMESPACE, MAX_SIGNATURE_BYTES
from bridge.signing.trust import Signature, Trust, TrustLevel, weigh

DEFAULT_LEASE_S = 120.0
# A claim does not hold a request for longer than this without a heartbeat, whatever lease it asks for.
MAX_LEASE_S = 900.0
# A claim may say any number of attempts; a result counts up to a million.
MAX_ATTEMPT = 1001
PUSH_TIMEOUT_S = 30.0
_CONTENTION_TRIES = 5

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

    phase: Phase
    elapsed_s: float
    progress: Progress | None = None
    log_tail: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClaimRecord:
    """A claim that could be read: what it says, its texts cleaned, and what its signature is worth here."""

    status: RunStatus
    signature: Signature


def read_status(git: GitRepo, commit: str) -> RunStatus | None:
    """A claim's heartbeat, its texts cleaned, from a commit that is here; None when it is not one of ours."""
    return _parse(git.try_read_file(commit, STATUS_NAME, MAX_BYTES))


def read_claim(git: GitRepo, commit: str, nonce: str, trust: Trust) -> ClaimRecord | None:
    """A claim from a commit that is here; None when it is none, or another request's.

    The signature covers the exact bytes of ``status.json``; one that does not verify counts as none.
    """
    data = git.try_read_file(commit, STATUS_NAME, MAX_BYTES)
    status = _parse(data)
    if data is None or status is None or status.nonce != nonce:
        return None
    signature = git.try_read_file(commit, STATUS_SIGNATURE_NAME, MAX_SIGNATURE_BYTES)
    try:
        return ClaimRecord(status, weigh(data, signature, CLAIM_NAMESPACE, trust))
    except (SignatureError, MachineError):
        return ClaimRecord(status, Signature(TrustLevel.UNSIGNED))


def claim(
    git: GitRepo,
    remote: str,
    *,
    nonce: str,
    request_commit: str,
    identity: RunnerIdentity,
    found_on: str | None = None,
    attempt: int = 1,
    lease_s: float = DEFAULT_LEASE_S,
    replaces: RefValue | None = None,
    unchanged: Mapping[str, str] | None = None,
    sign: Sign | None = None,
) -> Claim | None:
    """Try to become the one runner of a request; None: another runner has it, or it has changed.

    Args:
        git: Any repository of this machine; nothing is left in it.
        remote: Address of the bus.
        nonce: The request.
        request_commit: Its commit.
        identity: Who claims.
        found_on: The branch it was found on; None: in the inbox, so the server takes the bridge's own refs.
        attempt: How often the request will have been claimed.
        lease_s: Seconds without a heartbeat after which others may take over.
        replaces: The claim of another runner whose lease has expired; None: there must be none.
        unchanged: Refs and the commits they must still hold: an answered request is not claimed again.
        sign: Signs this claim and its heartbeats.
    """
    status = RunStatus(
        nonce=nonce,
        request_commit=request_commit,
        runner=identity.name,
        runner_id=identity.id,
        pid=os.getpid(),
        unique=secrets.token_hex(16),
        attempt=min(attempt, MAX_ATTEMPT),
        beat=0,
        lease_s=lease_s,
        session=identity.session,
        updated_at=format_time(datetime.now(UTC)),
        phase=Phase.CLAIMED,
        elapsed_s=0.0,
    )
    new = Claim(git, remote, ref=refs.claim_ref(nonce), commit="", status=status, sign=sign)
    if replaces is not None:
        return new if new.take(replaces.ref, replaces.commit, unchanged or {}) else None
    own, branch = refs.claim_places(nonce)
    try:
        return new if new.take(own, "", unchanged or {}, other=branch) else None
    except PushRejected:
        if found_on is None:
            raise
        return new if new.take(branch, "", unchanged or {}, other=own) else None


class Claim:
    """A request that this process holds. Not safe for use by two threads."""

    def __init__(
        self, git: GitRepo, remote: str, *, ref: str, commit: str, status: RunStatus, sign: Sign | None = None
    ) -> None:
        self.ref = ref
        self.commit = commit
        self.status = status
        self._git = git
        self._remote = remote
        self._sign = sign
        # Commits of ours that the remote may hold although the answer to their push was lost.
        self._unanswered: set[str] = set()

    @property
    def attempt(self) -> int:
        """How often this request has been claimed, this time included."""
        return self.status.attempt

    def holds(self, commit: str) -> bool:
        """Whether this commit is ours, one whose push was never answered included."""
        return commit == self.commit or commit in self._unanswered

    def take(
        self, ref: str, expected: str, unchanged: Mapping[str, str], *, other: str | None = None
    ) -> bool:
        """Put the claim where `expected` is now (empty: nothing); whether it is ours.

        The refs of `unchanged` must still hold what they held. Where the push fails, `other`, the other place
        for such a claim, must be empty.
        """
        # "Pushing" what a ref holds already sends nothing, and fails when that has changed.
        same = [RefUpdate(name, held, held) for name, held in unchanged.items()]
        places = [ref, *unchanged, *([other] if other else [])]
        with self._git.scratch() as scratch:
            commit = self._write(scratch, self.status)
            for _ in range(_CONTENTION_TRIES):
                try:
                    update = RefUpdate(ref, commit, expected)
                    scratch.push(self._remote, [update, *same], timeout_s=PUSH_TIMEOUT_S)
                except (LeaseLost, RemoteUnreachable, PushRejected) as error:
                    # Lost to another claim, or only to the server's lock on the ref? Or only the answer?
                    found = self._git.list_refs(self._remote, *places, timeout_s=PUSH_TIMEOUT_S)
                    if found.get(ref) != commit:
                        if isinstance(error, RemoteUnreachable):
                            raise
                        changed = any(found.get(name) != held for name, held in unchanged.items())
                        if changed or found.get(ref, "") != expected or other in found:
                            return False
                        if isinstance(error, PushRejected):
                            raise
                        continue
                self.ref, self.commit = ref, commit
                return True
        return False

    def renew(self, beat: Heartbeat, *, lease_s: float | None = None) -> None:
        """Renew the lease, from now on of `lease_s` seconds if given, and say how far the job is.

        A `LeaseLost`: another runner holds the claim, or it was deleted, and the job must stop. After any
        other error the lease runs on.
        """
        status = _next_status(self.status, beat, lease_s)
        try:
            self._swap(status)
        except LeaseLost:
            held = self._git.list_refs(self._remote, self.ref, timeout_s=PUSH_TIMEOUT_S).get(self.ref, "")
            if held == self.commit:  # another push, or one cut short, has it locked
                raise RemoteUnreachable(f"the server has the claim {self.ref} locked", "try again") from None
            if held not in self._unanswered:
                raise LeaseLost(f"the claim {self.ref} is no longer ours", "the job was stopped") from None
            self.commit = held
            self._swap(status)

    def hold_for_publishing(self, line: str | None = None) -> None:
        """Renew for as long as a lease may be, for the push that follows; `line` joins the log lines."""
        tail = self.status.log_tail
        if line is not None and line not in tail:
            tail = (*tail, line)
        since = datetime.now(UTC) - parse_time(self.status.updated_at)
        elapsed_s = self.status.elapsed_s + max(0.0, since.total_seconds())
        self.renew(Heartbeat(Phase.PUBLISHING, elapsed_s, None, tail), lease_s=MAX_LEASE_S)

    def release(self) -> None:
        """Give the request back: delete the claim if it is still ours. Never raises for a lost one."""
        for held in (self.commit, *self._unanswered):
            try:
                self._git.push(self._remote, [RefUpdate(self.ref, None, held)], timeout_s=PUSH_TIMEOUT_S)
            except LeaseLost:
                continue
            return

    def _swap(self, status: RunStatus) -> None:
        with self._git.scratch() as scratch:
            commit = self._write(scratch, status)
            try:
                update = RefUpdate(self.ref, commit, self.commit)
                scratch.push(self._remote, [update], timeout_s=PUSH_TIMEOUT_S)
            except (RemoteUnreachable, PushRejected):  # a server may hang up, or say no, after it accepted it
                self._unanswered.add(commit)
                raise
        self.commit, self.status = commit, status
        self._unanswered.clear()

    def _write(self, scratch: Scratch, status: RunStatus) -> str:
        data = status.to_bytes()
        signature = None if self._sign is None else self._sign(data)
        files = {STATUS_NAME: data, STATUS_SIGNATURE_NAME: signature}
        return scratch.commit_files(None, files, f"kakeya-mac claim: {status.nonce} [skip ci]\n")


def has_expired(lease_s: float | None, silent_s: float) -> bool:
    """Whether a claim that held the same commit for so long has lost its lease; None: it names no lease."""
    return silent_s >= (DEFAULT_LEASE_S if lease_s is None else min(lease_s, MAX_LEASE_S))


def _parse(data: bytes | None) -> RunStatus | None:
    try:
        status = parse_status(data or b"")
    except ResultError:
        return None
    shown = status.progress and status.progress.model_copy(update={"step": clean_line(status.progress.step)})
    tail = tuple(clean_line(line) for line in status.log_tail)
    changes = {"runner": clean_line(status.runner), "progress": shown, "log_tail": tail}
    return status.model_copy(update=changes)


def _next_status(status: RunStatus, beat: Heartbeat, lease_s: float | None) -> RunStatus:
    changes = {
        "unique": secrets.token_hex(16),
        "beat": status.beat + 1,
        "updated_at": format_time(datetime.now(UTC)),
        "phase": beat.phase,
        "elapsed_s": max(0.0, beat.elapsed_s),
        "progress": beat.progress,
        "log_tail": tuple(line[:500] for line in beat.log_tail[-40:]),
        "lease_s": status.lease_s if lease_s is None else lease_s,
    }
    return status.model_copy(update=changes)
