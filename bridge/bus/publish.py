"""Publish the result of a request as one commit on its branch, pushed so that at most one is ever there.

Where the branch was moved or deleted, or the server declines to move it, the result goes to a ref of its own
as a parentless commit. Idempotent: the same bytes give the same commit.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from bridge import __version__
from bridge.bus.claims import MAX_LEASE_S, Claim
from bridge.bus.requests import SKIP_CI, RefValue, has_result
from bridge.bus.results import MAX_WALK, NO_RUNNER_ID, TRAILER, first_parents
from bridge.errors import BrokenObject, BusError, LeaseLost, PushRejected, RemoteUnreachable, ResultError
from bridge.git.repo import GitRepo, RefUpdate, Scratch
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest, format_time, parse_time
from bridge.protocol.result import (
    RESULT_NAME,
    RESULT_ROOT,
    RESULT_SIGNATURE_NAME,
    Result,
    RunnerFacts,
    Verdict,
    parse_result,
)

TRIES = 6
_FIRST_PAUSE_S = 0.2
# A push of more than this may take longer than a lease.
_LARGE_BYTES = 1 << 20


@dataclass(frozen=True)
class ResultFiles:
    """A result ready to be published: the request it answers, the ref it goes to, and its exact bytes."""

    nonce: str  # of the request
    request_commit: str  # what is answered
    result_ref: str | None  # the branch of the request; None: not known (a manifest that cannot be read)
    result: bytes  # the exact bytes of ``result.json``
    signature: bytes | None  # detached signature of `result`
    files: Mapping[str, bytes]  # contents by path relative to ``result.json``, as that file lists them

    def contents(self) -> dict[str, bytes]:
        """Every file by its path, with ``result.json`` and its signature."""
        signature = {} if self.signature is None else {RESULT_SIGNATURE_NAME: self.signature}
        return {**self.files, RESULT_NAME: self.result, **signature}


def result_without_runner(
    nonce: str,
    request_commit: str,
    manifest: Manifest | None,
    verdict: Verdict,
    *,
    author: str,
    attempt: int = 1,
) -> Result:
    """A result that no runner wrote, and so none signs; `manifest` is None where it cannot be read."""
    now = format_time(datetime.now(UTC))
    return Result(
        nonce=nonce,
        request_commit=request_commit,
        workload_sha=manifest.workload_sha if manifest else None,
        preset=manifest.preset if manifest else None,
        params=dict(manifest.params) if manifest else {},
        preset_digest=None,
        engine_source=None,
        runner=RunnerFacts(name=author, id=NO_RUNNER_ID, version=__version__),
        attempt=attempt,
        started_at=now,
        finished_at=now,
        verdict=verdict,
    )


class Superseded(LeaseLost):
    """Another runner's result or claim is there; trying again is pointless."""


class AlreadyAnswered(Superseded):
    """The request has another result: it must not run here again."""


def publish(
    git: GitRepo,
    remote: str,
    result: ResultFiles,
    *,
    claim: Claim | None,
    untouched: bool = False,
    tries: int = TRIES,
    sleep: Callable[[float], None] = time.sleep,
) -> RefValue:
    """Push one result from a repository that holds its request, with backoff; returns where it is.

    The same push deletes `claim`. A request that is `untouched` was seen in the inbox and on its branch,
    without a cancel request; where that is still so, one push does it without a look first. A `ResultError`:
    `result` is not a result, or its ref not a branch of the request. `LeaseLost`: refs kept moving, or stay
    locked. `PushRejected`: the remote takes the result nowhere.
    """
    named = None if result.result_ref is None else refs.parse_request_ref(result.result_ref)
    if result.result_ref is not None and (named is None or named.nonce != result.nonce):
        raise ResultError(f"{result.result_ref!r} is not a branch of the request {result.nonce}")
    if has_result(git, result.request_commit, result.nonce):
        raise AlreadyAnswered(f"{result.request_commit[:12]} is a result of {result.nonce}, not a request")
    large = len(result.result) + sum(map(len, result.files.values())) > _LARGE_BYTES
    with git.scratch() as scratch:
        publication = _Publication(git, scratch, remote, result, claim)
        if untouched and not large and (published := publication.push_unseen()) is not None:
            return published
        with contextlib.suppress(BusError):  # lost or away: the push itself finds that out
            if claim is not None:  # which nothing else renews any more
                claim.hold_for_publishing(lease_s=MAX_LEASE_S if large else claim.status.lease_s)
        for attempt in range(tries):
            try:
                return publication.attempt(last=attempt == tries - 1)
            except (LeaseLost, RemoteUnreachable) as error:
                if isinstance(error, Superseded) or attempt == tries - 1:
                    raise
                sleep(_FIRST_PAUSE_S * 2**attempt)
    raise ValueError(f"tries must be at least 1, got {tries}")


class _Publication:
    def __init__(
        self, git: GitRepo, scratch: Scratch, remote: str, result: ResultFiles, claim: Claim | None
    ) -> None:
        self._git = git
        self._scratch = scratch
        self._remote = remote
        self._result = result
        self._claim = claim
        parsed = parse_result(result.result)
        digest = hashlib.sha256(result.result).hexdigest()
        subject = f"kakeya-mac result: {parsed.verdict.status} {result.nonce} {SKIP_CI}"
        self._message = f"{subject}\n\n{TRAILER}: {digest}\n"
        self._when: datetime = parse_time(parsed.finished_at)
        self._commits: dict[bool, str | None] = {}
        self._inbox = refs.INBOX + result.nonce
        self._cancels = (refs.CANCELS + result.nonce, refs.BRANCH_CANCELS + result.nonce)
        self._own = (refs.RESULTS + result.nonce, refs.BRANCH_RESULTS + result.nonce)

    def push_unseen(self) -> RefValue | None:
        """One push without a look first, right where nothing has changed; None: something may have."""
        result, claim = self._result, self._claim
        commit = self._commit(on_branch=True)
        is_usual = claim is not None and claim.ref == refs.CLAIMS + result.nonce
        if result.result_ref is None or claim is None or not is_usual or commit is None:
            return None
        updates = [
            RefUpdate(result.result_ref, commit, result.request_commit),
            RefUpdate(self._inbox, None, result.request_commit),
            RefUpdate(claim.ref, None, claim.commit),
        ]
        try:
            self._scratch.push(self._remote, updates)
        except BusError:
            return None  # `attempt` finds out what changed
        return RefValue(result.result_ref, commit)

    def attempt(self, *, last: bool) -> RefValue:
        """Look what is where, and push what fits; in the `last` try around refs that stay locked."""
        result, request = self._result, self._result.request_commit
        branches = (result.result_ref,) if result.result_ref else ()
        others = (self._inbox, *refs.claim_places(result.nonce), *self._cancels)
        found = self._git.list_refs(self._remote, *branches, *others, *self._own)
        held = {ref: found[ref] for ref in (*branches, *self._own) if found.get(ref, request) != request}
        for ref, commit in held.items():
            # Pushed before, by another process before a crash, too.
            if commit in (self._commit(on_branch=False), self._commit(on_branch=True)):
                with contextlib.suppress(Superseded):
                    self._delete(self._cleanup(found))
                return RefValue(ref, commit)
        for ref, commit in held.items():
            if ref in self._own or self._is_answered(commit):
                raise AlreadyAnswered(f"the request {result.nonce} already has a result on {ref}")
        cleanup = self._cleanup(found)
        places = [RefUpdate(ref, self._commit(on_branch=False), "") for ref in self._own]
        if branches and found.get(branches[0]) == request and (on_branch := self._commit(on_branch=True)):
            places.insert(0, RefUpdate(branches[0], on_branch, request))
        refusals: list[BusError] = []
        for place in places:
            try:
                return self._push(place, cleanup, alone=last)
            except (PushRejected, LeaseLost) as error:
                # Elsewhere only together with the inbox entry: else there might be two.
                if isinstance(error, LeaseLost) and (not last or self._inbox not in found):
                    raise
                refusals.append(error)
        raise refusals[0]

    def _is_answered(self, tip: str) -> bool:
        """Whether a result, ours or another runner's, is between the request and the branch's tip."""
        self._scratch.fetch(self._remote, [self._result.result_ref or ""], depth=MAX_WALK)
        for at in first_parents(self._scratch, tip):
            if self._result.request_commit in self._scratch.commit(at).parents:
                return has_result(self._scratch, at, self._result.nonce)
        return False

    def _cleanup(self, found: Mapping[str, str]) -> list[RefUpdate]:
        updates = [RefUpdate(self._inbox, None, found[self._inbox])] if self._inbox in found else []
        claim = self._claim
        if claim is not None and claim.ref in found:
            if not claim.holds(found[claim.ref]):
                raise Superseded(f"the claim {claim.ref} is another runner's now")
            updates.append(RefUpdate(claim.ref, None, found[claim.ref]))
        return [*updates, *(RefUpdate(ref, None, found[ref]) for ref in self._cancels if ref in found)]

    def _push(self, target: RefUpdate, cleanup: list[RefUpdate], *, alone: bool) -> RefValue:
        together = [each for each in cleanup if each.ref == self._inbox or not alone]
        try:
            self._scratch.push(self._remote, [target, *together])
        except PushRejected:
            if not together:
                raise
            # A server may take the result and refuse to delete refs.
            self._scratch.push(self._remote, [target])
            together = []
        self._delete([each for each in cleanup if each not in together])
        return RefValue(target.ref, target.new or "")

    def _delete(self, cleanup: list[RefUpdate]) -> None:
        """Delete what may be deleted: the result is there already."""
        if cleanup:
            with contextlib.suppress(BusError):
                self._git.push(self._remote, cleanup, atomic=False)

    def _commit(self, *, on_branch: bool) -> str | None:
        """The result as a commit, on its branch or parentless; None: it cannot be put on its branch."""
        if on_branch not in self._commits:
            self._commits[on_branch] = self._write(self._result.request_commit if on_branch else None)
        return self._commits[on_branch]

    def _write(self, parent: str | None) -> str | None:
        result = self._result
        folder = f"{RESULT_ROOT}/{result.nonce}"
        files = {f"{folder}/{path}": data for path, data in result.contents().items()}
        try:
            if parent is not None and not self._git.exists(parent):
                self._scratch.fetch(self._remote, [result.result_ref or ""], depth=2)
                if not self._scratch.exists(parent):
                    return None  # the branch holds something else now
            return self._scratch.commit_files(parent, files, self._message, when=self._when)
        except (BrokenObject, RemoteUnreachable):
            if parent is None:
                raise
            return None  # the workload's own tree is too large to read, or the branch is gone
