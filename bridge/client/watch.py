"""Follow a request to its end: queued, claimed, running n of m, done. The client's second half.

A look lists this request's own refs, nothing else, so it costs the same whatever else is on the remote. It
comes soon at first and then ever later; the claim is fetched less often than it is seen. One scratch store
serves the whole watch. A network that fails for a while is reported and waited out. Judging the result is
`bridge.client.fetch`.
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
from bridge.errors import BusError, RemoteUnreachable, ResultError, UnknownHandle, WaitTimeout
from bridge.git.repo import GitRepo, Scratch
from bridge.protocol import refs
from bridge.protocol.result import RESULT_NAME, Phase, RunStatus, parse_result
from bridge.signing.trust import Signature, Trust

# Seconds between looks; the last one repeats.
_LOCAL_PAUSES_S = (0.04, 0.05, 0.09, 0.27, 0.9, 2.5)
_NETWORK_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 10.0)
# Seconds between two fetches of the claim, and between two counts of the older requests.
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

    nonce: str
    phase: Phase
    ahead: int | None = None  # older requests that wait too; None: it is not queued, or not known
    status: RunStatus | None = None  # its runner's last heartbeat, texts cleaned; None: not claimed
    # What the signature of that heartbeat is worth; None: not claimed, or no key is trusted here
    claim: Signature | None = None
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

    A claim or a gating too short to be seen is yielded all the same, from what came after it. Nothing is left
    in the checkout; a scratch of one is used as it is. `deadline` is in seconds on `clock`; `state` are the
    request's refs, where they were listed just now; heartbeats are checked by the runner keys in `trusted`.

    Raises:
        WaitTimeout: The deadline came first; the job goes on.
        UnknownHandle: Nothing of the request is on the remote any more.
        RemoteUnreachable: The remote never answered.
        ResultError: What is where the result belongs cannot be one.
    """
    pauses = _LOCAL_PAUSES_S if refs.is_local(remote) else _NETWORK_PAUSES_S
    last = Update(nonce, Phase.QUEUED) if expected else None
    is_first, step = True, 0
    with contextlib.nullcontext(git) if isinstance(git, Scratch) else git.scratch() as scratch:
        watcher = _Watcher(scratch, remote, nonce, expected, state, trust_in(trusted), clock)
        while True:
            began = clock()
            update = watcher.look(max(1.0, min(_COMMAND_TIMEOUT_S, deadline - clock())))
            if is_first or update != last:
                yield from _skipped(last, update)
                yield update
                was_queued = last is not None and last.phase is Phase.QUEUED
                if was_queued or update.phase in (Phase.GATING, Phase.PUBLISHING):
                    step = 0  # the result is about to come, at least that of a short job
                last, is_first, began = update, False, clock()
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
    if state.claim is None:
        return Update(state.nonce, Phase.QUEUED, state.ahead)
    with git.scratch() as scratch:
        status, signature = _fetch_claim(scratch, remote, state.claim, state.nonce, trust_in(trusted))
    phase = Phase.CLAIMED if status is None else status.phase
    return Update(state.nonce, phase, status=status, claim=signature)


def trust_in(trusted: Path | None) -> Trust | None:
    """The keys by which heartbeats are judged; None: there are none to judge by."""
    return Trust.by(trusted) if trusted is not None and pins_keys(trusted) else None


@dataclass
class _Watcher:
    """What is known of one request, so that a look fetches only what changed."""

    git: GitRepo
    remote: str
    nonce: str
    expected: ExpectedRequest | None
    listed: RequestState | None  # serves the first look
    trust: Trust | None
    clock: Callable[[], float]
    known: Update | None = None
    state: RequestState | None = None
    counted_s: float = 0.0  # when the older requests were counted
    claim: RefValue | None = None  # as it was fetched
    claim_s: float = 0.0  # when
    without_result: tuple[RefValue | None, ...] | None = None  # places as they held no result
    failures: int = 0
    empty_looks: int = 0

    def look(self, timeout_s: float) -> Update:
        before = self.known or Update(self.nonce, Phase.QUEUED)
        try:
            self.state = self._list(timeout_s)
            self.known = self._update(before, self.state, timeout_s)
        except RemoteUnreachable as error:
            self.failures += 1
            if self.state is None and self.failures >= _FIRST_FAILURES:
                raise
            return replace(before, notice=error.message)
        self.failures = 0
        return self.known

    def _list(self, timeout_s: float) -> RequestState:
        """The request's refs: among all of the bridge's at first, then by their names."""
        before, now = self.state, self.clock()
        if self.listed is not None:
            listed, self.listed, self.counted_s = self.listed, None, now
            return listed
        prefixes = list(ALL_REFS)
        if before is not None:
            prefixes = [prefix + self.nonce for prefix in OWN_REFS]
            prefixes += [branch.ref for branch in before.branches]
        counts = before is None or (before.ahead is not None and now - self.counted_s >= _QUEUE_INTERVAL_S)
        prefixes += _QUEUE if counts else ()
        state = state_of(self.git.list_refs(self.remote, *prefixes, timeout_s=timeout_s), self.nonce)
        if before is None or counts:
            self.counted_s = now
            return state
        return replace(state, ahead=before.ahead)

    def _update(self, before: Update, state: RequestState, timeout_s: float) -> Update:
        if state.gone:
            self.empty_looks += 1
            if self.empty_looks >= _EMPTY_LOOKS:
                raise UnknownHandle(
                    f"nothing of the request {self.nonce} is left on the remote",
                    "its branch was deleted before a result was published",
                )
            return before
        self.empty_looks = 0
        status, signature = before.status, before.claim
        if (result := self._result(state, timeout_s)) is not None:
            return Update(self.nonce, Phase.DONE, status=status, claim=signature, result=result)
        if state.claim is None:
            self.claim = None
            return Update(self.nonce, Phase.QUEUED, state.ahead)
        is_due = self.clock() - self.claim_s >= _CLAIM_INTERVAL_S
        if self.claim is None or (state.claim != self.claim and is_due):
            found = _fetch_claim(self.git, self.remote, state.claim, self.nonce, self.trust)
            self.claim, self.claim_s = state.claim, self.clock()
            status, signature = found if found[0] is not None else (status, signature)
        phase = Phase.CLAIMED if status is None else status.phase
        return Update(self.nonce, phase, status=status, claim=signature)

    def _result(self, state: RequestState, timeout_s: float) -> FetchedResult | None:
        places = (*state.branches, state.result)
        if places == self.without_result:
            return None
        request = self.expected.commit if self.expected else state.inbox
        moved = [place for place in places if place is not None and place.commit != request]
        wanted = [place.ref for place in moved if not self.git.exists(place.commit)]
        if wanted:
            self.git.fetch(self.remote, wanted, timeout_s=timeout_s)
        result = fetch(self.git, self.remote, state, expected=self.expected, timeout_s=timeout_s)
        if result is None:
            self.without_result = places
        return result


def _fetch_claim(
    git: GitRepo, remote: str, claim: RefValue, nonce: str, trust: Trust | None
) -> tuple[RunStatus | None, Signature | None]:
    """The heartbeat in a claim and what its signature is worth; None: it moved, or cannot be read."""
    try:
        git.fetch(remote, [claim.ref], limit_bytes=_MAX_CLAIM_BYTES)
    except BusError:  # it is gone, or more than a claim; a remote that is away fails the next look, too
        return None, None
    if trust is None:
        return read_status(git, claim.commit), None
    found = read_claim(git, claim.commit, nonce, trust)
    return (None, None) if found is None else (found.status, found.signature)


def _skipped(before: Update | None, update: Update) -> Iterator[Update]:
    """The claim and the gating between two looks; nothing where the first look came late (`before` None)."""
    if before is None or update.notice:
        return
    status = update.status
    if before.phase is Phase.QUEUED and status is not None and update.phase is not Phase.CLAIMED:
        claimed = status.model_copy(update={"phase": Phase.CLAIMED, "progress": None, "elapsed_s": 0.0})
        yield Update(update.nonce, Phase.CLAIMED, status=claimed, claim=update.claim)
    if update.result is not None and before.phase is not Phase.GATING and _was_gated(update.result):
        gating = status and status.model_copy(update={"phase": Phase.GATING, "progress": None})
        yield Update(update.nonce, Phase.GATING, status=gating, claim=update.claim)


def _was_gated(found: FetchedResult) -> bool:
    try:
        return Phase.GATING in parse_result(found.files.get(RESULT_NAME, b"")).phase_seconds
    except ResultError:
        return False
