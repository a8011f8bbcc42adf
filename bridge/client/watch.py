"""Follow a request to its end: queued, claimed, running n of m, done. The client's second half.

A look lists this request's own refs, nothing else, so it costs the same whatever else is on the remote.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bridge.bus.claims import read_claim, read_status
from bridge.bus.requests import ALL_REFS, OWN_REFS, RefValue, RequestState, state_of
from bridge.bus.results import ExpectedRequest, FetchedResult, fetch, pins_keys
from bridge.errors import BusError, RemoteUnreachable, RequestGone, WaitTimeout
from bridge.git.repo import GitRepo, Scratch
from bridge.protocol import refs
from bridge.protocol.result import Phase, RunStatus
from bridge.signing.trust import Signature

# Seconds between looks; the last one repeats.
_LOCAL_PAUSES_S = (0.04, 0.05, 0.09, 0.27, 0.9, 2.5)
_NETWORK_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 10.0)
# Seconds from a look that saw no claim to its fetch (a short job is answered by then), between two fetches of
# the claim, and between two counts of the older requests.
_FIRST_CLAIM_S = 0.3
_CLAIM_INTERVAL_S = 5.0
_QUEUE_INTERVAL_S = 5.0
_COMMAND_TIMEOUT_S = 60.0
_MAX_CLAIM_BYTES = 16 * 1024**2
# Before the remote has answered once, this many failures in a row are an error.
_FIRST_FAILURES = 3
# A request is gone when this many looks in a row found nothing of it: a look may come between two pushes.
_EMPTY_LOOKS = 4
_QUEUE = (refs.INBOX, refs.CLAIMS, refs.BRANCH_CLAIMS)


@dataclass(frozen=True)
class Update:
    """One change of a request, as seen from here."""

    phase: Phase
    ahead: int | None = None  # older requests that wait too; None: it is not queued, or not known
    status: RunStatus | None = None  # its runner's last heartbeat, texts cleaned; None: not claimed
    # What the signature of that heartbeat is worth; None: not claimed, or no key is trusted here
    claim: Signature | None = None
    cancelling: bool = False  # whether a cancel request exists
    notice: str | None = None  # why nothing is known at the moment; None: all is well
    result: FetchedResult | None = None  # what was published; set on the last update only


def watch(
    git: GitRepo,
    remote: str,
    nonce: str,
    *,
    deadline: float,
    expected: ExpectedRequest | None = None,
    state: RequestState | None = None,
    trusted: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Update]:
    """Follow a request; yields on every change and ends with the update that carries the result.

    Nothing is left in the checkout; a scratch of one is used as it is. `deadline` is in seconds on `clock`;
    `state` are the request's refs, where they were listed just now; heartbeats are checked by the runner keys
    in `trusted`.

    Raises:
        WaitTimeout: The deadline came first; the job goes on.
        RequestGone: Nothing of the request is on the remote any more.
    """
    pauses = _LOCAL_PAUSES_S if refs.is_local(remote) else _NETWORK_PAUSES_S
    last, start = None, Update(Phase.QUEUED)
    step = failures = 0
    with contextlib.nullcontext(git) if isinstance(git, Scratch) else git.scratch() as scratch:
        watcher = _Watcher(scratch, remote, nonce, expected, state, keys_in(trusted), clock, start)
        while True:
            began = clock()
            try:
                update = watcher.look(max(1.0, min(_COMMAND_TIMEOUT_S, deadline - began)))
                failures = 0
            except RemoteUnreachable as error:
                failures += 1
                if watcher.state is None and failures >= _FIRST_FAILURES:
                    raise
                update = replace(last or start, notice=error.message)
            if update != last:
                yield update
                was_queued = last is not None and last.phase is Phase.QUEUED
                if was_queued or update.phase in (Phase.GATING, Phase.PUBLISHING):
                    step = 0  # the result is about to come, at least that of a short job
                last, began = update, clock()
            if update.result is not None:
                return
            left = deadline - clock()
            if left <= 0:
                raise WaitTimeout(
                    f"{nonce} is not done yet ({update.notice or update.phase}); it goes on",
                    f"kakeya_mac wait {nonce}",
                )
            # On a busy machine a look takes long; looking all the time would keep it busy.
            sleep(min(max(pauses[step], clock() - began), left))
            step = min(step + 1, len(pauses) - 1)


def snapshot(git: GitRepo, remote: str, state: RequestState, trusted: Path | None = None) -> Update:
    """An unanswered request as its refs, listed just now, and its claim tell; `trusted` as in `watch`."""
    cancelling = state.cancel is not None
    if state.claim is None:
        return Update(Phase.QUEUED, state.ahead, cancelling=cancelling)
    with git.scratch() as scratch:
        update = _claimed(scratch, remote, state.claim, Update(Phase.CLAIMED), keys_in(trusted))
        return replace(update, cancelling=cancelling)


def keys_in(trusted: Path | None) -> Path | None:
    """The keys by which heartbeats are judged; None: there are none to judge by."""
    return trusted if trusted is not None and pins_keys(trusted) else None


@dataclass
class _Watcher:
    """What is known of one request, so that a look fetches only what changed."""

    git: GitRepo
    remote: str
    nonce: str
    expected: ExpectedRequest | None
    listed: RequestState | None  # serves the first look
    trusted: Path | None
    clock: Callable[[], float]
    known: Update
    state: RequestState | None = None
    counted_s: float = 0.0  # when the older requests were counted
    claim: RefValue | None = None  # as it was fetched last
    claim_due_s: float = 0.0  # when it is fetched next
    empty_looks: int = 0
    had_branch: bool = False  # whether a look saw one

    def look(self, timeout_s: float) -> Update:
        state = self.state = self._list(timeout_s)
        self.had_branch = self.had_branch or state.branch is not None
        result = fetch(self.git, self.remote, state, expected=self.expected, timeout_s=timeout_s)
        self.empty_looks = self.empty_looks + 1 if result is None and self._is_missing(state) else 0
        if self.empty_looks >= _EMPTY_LOOKS:
            where = "its branch is not there: it was deleted, or never pushed"
            if state.branch is not None:
                where = f"its branch {state.branch.ref} holds {state.branch.commit[:12]} now"
            elif self.had_branch:
                where = "its branch was deleted before a result was published"
            raise RequestGone(
                f"the request {self.nonce} is not on the remote: {where}", "ask again with kakeya_mac run"
            )
        if state.gone:
            return self.known
        self._learn(state, result)
        self.known = replace(self.known, cancelling=result is None and state.cancel is not None)
        return self.known

    def _learn(self, state: RequestState, result: FetchedResult | None) -> None:
        """Bring what is known up to date, fetching the claim where it changed."""
        now = self.clock()
        if result is not None:
            self.known = replace(self.known, phase=Phase.DONE, ahead=None, result=result)
        elif state.claim is None:
            self.known = Update(Phase.QUEUED, state.ahead)
            self.claim, self.claim_due_s = None, now + _FIRST_CLAIM_S
        elif state.claim != self.claim and now >= self.claim_due_s:
            self.known = _claimed(self.git, self.remote, state.claim, self.known, self.trusted)
            self.claim, self.claim_due_s = state.claim, now + _CLAIM_INTERVAL_S
        elif self.known.phase is Phase.QUEUED:
            self.known = Update(Phase.CLAIMED)

    def _is_missing(self, state: RequestState) -> bool:
        """Whether no ref holds the request, as far as it is known which commit that is."""
        if state.gone or self.expected is None:
            return state.gone
        waits = state.inbox is not None or state.claim is not None or state.result is not None
        return not waits and all(branch.commit != self.expected.commit for branch in state.branches)

    def _list(self, timeout_s: float) -> RequestState:
        """The request's refs: among all of the bridge's at first, then by their names."""
        before, now = self.state, self.clock()
        counts = before is None or (before.ahead is not None and now - self.counted_s >= _QUEUE_INTERVAL_S)
        self.counted_s = now if counts else self.counted_s
        if self.listed is not None:
            listed, self.listed = self.listed, None
            return listed
        prefixes = list(ALL_REFS)
        if before is not None:
            own = [prefix + self.nonce for prefix in OWN_REFS]
            prefixes = [*own, *(branch.ref for branch in before.branches), *(_QUEUE if counts else ())]
        state = state_of(self.git.list_refs(self.remote, *prefixes, timeout_s=timeout_s), self.nonce)
        return state if before is None or counts else replace(state, ahead=before.ahead)


def read_beat(
    git: GitRepo, claim: RefValue, trusted: Path | None
) -> tuple[RunStatus | None, Signature | None]:
    """The heartbeat in a claim that is here, and what its signature is worth; None: it is not known."""
    if trusted is None:
        return read_status(git, claim.commit), None
    return read_claim(git, claim.commit, claim.name, trusted) or (None, None)


def _claimed(git: GitRepo, remote: str, claim: RefValue, before: Update, trusted: Path | None) -> Update:
    """What a claim says; where it moved or cannot be read, as `before`."""
    with contextlib.suppress(BusError):  # a remote that is away fails the next look, too
        git.fetch(remote, [claim.ref], limit_bytes=_MAX_CLAIM_BYTES)
        status, signature = read_beat(git, claim, trusted)
        if status is not None:
            return Update(status.phase, status=status, claim=signature)
    return before if before.status is not None else replace(before, phase=Phase.CLAIMED, ahead=None)
