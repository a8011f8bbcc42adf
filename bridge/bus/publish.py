"""Publish the result of a request as one commit on its branch, pushed so that at most one is ever there.

The commit's only difference to the request commit is the folder ``.mac-bridge/results/<nonce>/``; the same
push deletes the inbox ref and the claim. Where the branch was moved or deleted, or the server declines to
move it, the result goes to a ref of its own as a parentless commit. Idempotent: the same bytes give the same
commit, so publishing twice is harmless. What could not be pushed is the caller's to keep and bring again.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from bridge.bus.claims import Claim
from bridge.bus.requests import SKIP_CI, has_result
from bridge.bus.results import TRAILER, first_parents
from bridge.errors import BrokenObject, BusError, LeaseLost, PushRejected, RemoteUnreachable, ResultError
from bridge.git.repo import GitRepo, RefUpdate, Scratch
from bridge.protocol import refs
from bridge.protocol.manifest import parse_time
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT, RESULT_SIGNATURE_NAME, parse_result

TRIES = 6
_FIRST_PAUSE_S = 0.5
# After a push that met another one.
_SHORT_PAUSE_S = 0.05
# A push of more than this may take longer than a lease.
_LARGE_BYTES = 1 << 20
# How many commits may be on top of a result that is still found.
_MAX_WALK = 100


@dataclass(frozen=True)
class Published:
    """Where a result is on the remote."""

    commit: str
    ref: str


@dataclass(frozen=True)
class ResultFiles:
    """A result ready to be published: the request it answers, the ref it goes to, and its exact bytes."""

    nonce: str  # of the request
    request_commit: str  # what is answered
    result_ref: str | None  # the branch of the request; None: not known (a manifest that cannot be read)
    result: bytes  # the exact bytes of ``result.json``
    signature: bytes | None  # detached signature of `result`
    files: Mapping[str, bytes]  # contents by path relative to ``result.json``, as that file lists them


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
) -> Published:
    """Push one result from a repository that holds its request, with backoff while the network fails.

    The same push deletes `claim`. A request that is `untouched` was seen in the inbox and on its branch,
    without a cancel request; where that is still so, one push does it without a look first.

    Raises:
        ResultError: `result` is not a result, or its ref not a branch of the request.
        AlreadyAnswered: The request has another result.
        Superseded: Its claim is another runner's now.
        LeaseLost: Refs kept moving, or stay locked; no other result is there.
        PushRejected: The remote takes the result nowhere.
    """
    named = None if result.result_ref is None else refs.parse_request_ref(result.result_ref)
    if result.result_ref is not None and (named is None or named.nonce != result.nonce):
        raise ResultError(f"{result.result_ref!r} is not a branch of the request {result.nonce}")
    if has_result(git, result.request_commit, result.nonce):
        raise AlreadyAnswered(f"{result.request_commit[:12]} is a result of {result.nonce}, not a request")
    large = len(result.result) + sum(map(len, result.files.values())) > _LARGE_BYTES
    with git.scratch() as scratch:
        publication = _Publication(git, scratch, remote, result, claim)
        if large:
            _hold(claim)
        if untouched and (published := publication.push_unseen()) is not None:
            return published
        if not large:
            _hold(claim)
        for attempt in range(tries):
            try:
                return publication.attempt(last=attempt == tries - 1)
            except (LeaseLost, RemoteUnreachable) as error:
                if isinstance(error, Superseded) or attempt == tries - 1:
                    raise
                first = _FIRST_PAUSE_S if isinstance(error, RemoteUnreachable) else _SHORT_PAUSE_S
                sleep(first * 2**attempt)
    raise ValueError(f"tries must be at least 1, got {tries}")


def _hold(claim: Claim | None) -> None:
    """Keep a claim for as long as the push may take: nothing else renews it any more."""
    if claim is not None:
        with contextlib.suppress(BusError):  # lost or away: the push itself finds that out
            claim.hold_for_publishing()


class _Publication:
    """One result on its way to the remote."""

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
        self._message = (
            f"kakeya-mac result: {parsed.verdict.status} {result.nonce} {SKIP_CI}\n\n{TRAILER}: {digest}\n"
        )
        self._when: datetime = parse_time(parsed.finished_at)
        self._commits: dict[bool, str | None] = {}
        self._inbox = refs.inbox_ref(result.nonce)
        self._cancels = (refs.cancel_ref(result.nonce), refs.BRANCH_CANCELS + result.nonce)

    def push_unseen(self) -> Published | None:
        """One push without a look first, right where nothing has changed; None: something may have."""
        result, claim = self._result, self._claim
        if result.result_ref is None or claim is None or claim.ref != refs.claim_ref(result.nonce):
            return None
        if (commit := self._commit(on_branch=True)) is None:
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
        return Published(commit, result.result_ref)

    def attempt(self, *, last: bool) -> Published:
        """Look what is where, and push what fits.

        In the `last` of several tries refs that stay locked, as a server leaves them that died, are worked
        around: the result is pushed with the inbox entry alone, and to a ref of its own if need be.
        """
        result, nonce = self._result, self._result.nonce
        own_refs = (refs.result_ref(nonce), refs.BRANCH_RESULTS + nonce)
        branches = (result.result_ref,) if result.result_ref else ()
        others = (self._inbox, *refs.claim_places(nonce), *self._cancels)
        found = self._git.list_refs(self._remote, *branches, *others, *own_refs)
        if (before := self._pushed_before(found, (*branches, *own_refs))) is not None:
            with contextlib.suppress(BusError):
                self._delete_each(self._cleanup(found))
            return before
        tip = found.get(result.result_ref) if result.result_ref else None
        answers = [ref for ref in own_refs if ref in found]
        if not answers and tip not in (None, result.request_commit) and self._is_answered(str(tip)):
            answers.append(str(result.result_ref))
        if answers:
            raise AlreadyAnswered(f"the request {nonce} already has a result on {answers[0]}")
        cleanup = self._cleanup(found)
        places = [RefUpdate(ref, self._commit(on_branch=False), "") for ref in own_refs]
        commit = self._commit(on_branch=True) if tip == result.request_commit else None
        if result.result_ref is not None and commit is not None:
            places.insert(0, RefUpdate(result.result_ref, commit, result.request_commit))
        refusals: list[BusError] = []
        for place in places:
            try:
                return self._push(place, cleanup, alone=last)
            except (PushRejected, LeaseLost) as error:
                # Elsewhere only together with what every result deletes: else there might be two.
                if isinstance(error, LeaseLost) and (not last or self._inbox not in found):
                    raise
                refusals.append(error)
        raise refusals[0]

    def _pushed_before(self, found: Mapping[str, str], places: tuple[str, ...]) -> Published | None:
        """Where an earlier push of the same bytes put the result, by another process before a crash, too."""
        request = self._result.request_commit
        others = {ref: found[ref] for ref in places if found.get(ref, request) != request}
        if not others:
            return None
        ours = {self._commit(on_branch=False), self._commit(on_branch=True)}
        return next((Published(held, ref) for ref, held in others.items() if held in ours), None)

    def _is_answered(self, tip: str) -> bool:
        """Whether a result, ours or another runner's, is between the request and the branch's tip."""
        self._scratch.fetch(self._remote, [self._result.result_ref or ""], depth=_MAX_WALK)
        for at in first_parents(self._scratch, tip, _MAX_WALK):
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

    def _push(self, target: RefUpdate, cleanup: list[RefUpdate], *, alone: bool) -> Published:
        """Push the result and delete what its request leaves; with `alone` only the inbox entry with it."""
        together = [update for update in cleanup if update.ref == self._inbox or not alone]
        try:
            self._scratch.push(self._remote, [target, *together])
        except PushRejected:
            if not together:
                raise
            # A server may take the result and refuse to delete refs.
            self._scratch.push(self._remote, [target])
            together = []
        self._delete_each([update for update in cleanup if update not in together])
        return Published(target.new or "", target.ref)

    def _delete_each(self, cleanup: list[RefUpdate]) -> None:
        """Delete what may be deleted, each by itself: the result is there already."""
        for update in cleanup:
            with contextlib.suppress(BusError):
                self._git.push(self._remote, [update])

    def _commit(self, *, on_branch: bool) -> str | None:
        """The result as a commit, on its branch or parentless; None: it cannot be put on its branch."""
        if on_branch not in self._commits:
            result = self._result
            files: dict[str, bytes | None] = {**result.files, RESULT_NAME: result.result}
            if result.signature is not None:
                files[RESULT_SIGNATURE_NAME] = result.signature
            placed = {f"{RESULT_ROOT}/{result.nonce}/{path}": data for path, data in files.items()}
            parent = result.request_commit if on_branch else None
            try:
                if parent is not None and not self._git.exists(parent):
                    self._scratch.fetch(self._remote, [result.result_ref or ""], depth=2)
                    if not self._scratch.exists(parent):
                        return None  # the branch holds something else now
                commit = self._scratch.commit_files(parent, placed, self._message, when=self._when)
            except (BrokenObject, RemoteUnreachable):
                if not on_branch:
                    raise
                return None  # the workload's own tree is too large to read, or the branch is gone
            self._commits[on_branch] = commit
        return self._commits[on_branch]
