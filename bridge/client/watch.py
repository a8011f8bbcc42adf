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
from bridge.bus.results import ExpectedRequest, FetchedResult, fetch, pins_keys
from bridge.bus.state import ALL_REFS, OWN_REFS, RefValue, RequestState, state_of
from bridge.errors import BusError, RemoteUnreachable, ResultError, UnknownHandle, WaitTimeout
from bridge.git.repo import GitRepo, Scratch
from bridge.protocol import refs
from bridge.protocol.result import RESULT_NAME, Phase, RunStatus, parse_result
from bridge.signing.trust import Signature, Trust

# Seconds between looks: at first, how many times longer each is than the last, and at most.
_LOCAL_PAUSES_S = (0.05, 3.0, 2.0)
_NETWORK_PAUSES_S = (1.0, 2.0, 10.0)
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
    """One change of a request, as seen from here.

    Attributes:
        nonce: The request.
        phase: Where it is.
        ahead: Older requests that wait too; None: it is not queued, or not known.
        status: Its runner's last heartbeat, texts cleaned; None: not claimed.
        claim: What the signature of that heartbeat is worth; None: not claimed, or no key is trusted here.
        notice: Why nothing is known at the moment; None: all is well.
        result: What was published; set on the last update only.
    """

    nonce: str
    phase: Phase
    ahead: int | None = None
    status: RunStatus | None = None
    claim: Signature | None = None
    notice: str | None = None
    result: FetchedResult | None = None


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

    A claim or a gating too short to be seen is yielded all the same, from what came after it.

    Args:
        git: Any checkout, in which nothing is left; or a scratch of one, which is used as it is.
        remote: Address of the bus.
        nonce: The request.
        deadline: When to give up, on `clock`.
        expected: The request as this client submitted it; None: as it is on the remote.
        state: Its refs, where they were listed just now; None: they are listed.
        trusted: The runner keys that count here, for heartbeats; None: those are not checked.
        clock: Monotonic seconds.
        sleep: Waits that many seconds.

    Raises:
        WaitTimeout: The deadline came first; the job goes on.
        UnknownHandle: Nothing of the request is on the remote any more.
        RemoteUnreachable: The remote never answered.
        ResultError: What is where the result belongs cannot be one.
    """
    pause, growth, slowest = _LOCAL_PAUSES_S if refs.is_local(remote) else _NETWORK_PAUSES_S
    first_pause, last = pause, Update(nonce, Phase.QUEUED) if expected else None
    is_first = True
    with contextlib.nullcontext(git) if isinstance(git, Scratch) else git.scratch() as scratch:
        watcher = _Watcher(scratch, remote, nonce, expected, listed=state, trust=_trust(trusted), clock=clock)
        while True:
            began = clock()
            update = watcher.look(max(1.0, min(_COMMAND_TIMEOUT_S, deadline - clock())))
            if is_first or update != last:
                yield from _skipped(last, update)
                yield update
                was_queued = last is not None and last.phase is Phase.QUEUED
                if was_queued or update.phase in (Phase.GATING, Phase.PUBLISHING):
                    pause = first_pause  # the result is about to come, at least that of a short job
                last, is_first = update, False
            if update.result is not None:
                return
            left = deadline - clock()
            if left <= 0:
                raise WaitTimeout(
                    f"{nonce} is not done yet ({update.notice or update.phase}); it goes on",
                    f"kakeya_mac wait {nonce}",
                )
            # On a busy machine a look takes long; looking all the time would keep it busy.
            sleep(min(max(pause, clock() - began), left))
            pause = min(pause * growth, slowest)


def snapshot(git: GitRepo, remote: str, state: RequestState, trusted: Path | None = None) -> Update:
    """An unanswered request as its refs and its claim tell.

    Args:
        git: Any checkout; nothing is left in it.
        remote: Address of the bus.
        state: Its refs, as they were listed just now.
        trusted: As in `watch`.
    """
    if state.claim is None:
        return Update(state.nonce, Phase.QUEUED, state.ahead)
    with git.scratch() as scratch:
        found = _read_claim(scratch, remote, state.claim, state.nonce, _trust(trusted))
    status, signature = found or (None, None)
    phase = Phase.CLAIMED if status is None else status.phase
    return Update(state.nonce, phase, status=status, claim=signature)


class _Watcher:
    """What is known of one request, so that a look fetches only what changed."""

    def __init__(
        self,
        git: GitRepo,
        remote: str,
        nonce: str,
        expected: ExpectedRequest | None,
        *,
        listed: RequestState | None,
        trust: Trust | None,
        clock: Callable[[], float],
    ) -> None:
        self._git = git
        self._remote = remote
        self._nonce = nonce
        self._expected = expected
        self._listed = listed
        self._trust = trust
        self._clock = clock
        self._known = Update(nonce, Phase.QUEUED)
        self._state: RequestState | None = None
        self._counted_s = 0.0
        self._claim: RefValue | None = None
        self._claim_s: float | None = None
        self._without_result: tuple[RefValue | None, ...] | None = None
        self._failures = 0
        self._empty_looks = 0

    def look(self, timeout_s: float) -> Update:
        try:
            self._state = self._list(timeout_s)
            self._known = self._update(self._state, timeout_s)
        except RemoteUnreachable as error:
            self._failures += 1
            if self._state is None and self._failures >= _FIRST_FAILURES:
                raise
            return replace(self._known, notice=error.message, result=None)
        self._failures = 0
        return self._known

    def _list(self, timeout_s: float) -> RequestState:
        """The request's refs: among all of the bridge's at first, then by their names."""
        before, now = self._state, self._clock()
        if self._listed is not None:
            listed, self._listed, self._counted_s = self._listed, None, now
            return listed
        own = [prefix + self._nonce for prefix in OWN_REFS]
        if before is None:
            prefixes = list(ALL_REFS)
        else:
            prefixes = [*own, *(branch.ref for branch in before.branches)]
            if before.ahead is not None and now - self._counted_s >= _QUEUE_INTERVAL_S:
                prefixes += _QUEUE
        state = state_of(self._git.list_refs(self._remote, *prefixes, timeout_s=timeout_s), self._nonce)
        if before is None or refs.INBOX in prefixes:
            self._counted_s = now
            return state
        return replace(state, ahead=before.ahead)

    def _update(self, state: RequestState, timeout_s: float) -> Update:
        if state.gone:
            self._empty_looks += 1
            if self._empty_looks >= _EMPTY_LOOKS:
                raise UnknownHandle(
                    f"nothing of the request {self._nonce} is left on the remote",
                    "its branch was deleted before a result was published",
                )
            return self._known
        self._empty_looks = 0
        status, signature = self._known.status, self._known.claim
        if (result := self._result(state, timeout_s)) is not None:
            return Update(self._nonce, Phase.DONE, status=status, claim=signature, result=result)
        if state.claim is None:
            self._claim = None
            return Update(self._nonce, Phase.QUEUED, state.ahead)
        if self._claim is None or (state.claim != self._claim and self._is_claim_due()):
            found = _read_claim(self._git, self._remote, state.claim, self._nonce, self._trust)
            self._claim, self._claim_s = state.claim, self._clock()
            status, signature = found or (status, signature)
        phase = Phase.CLAIMED if status is None else status.phase
        return Update(self._nonce, phase, status=status, claim=signature)

    def _is_claim_due(self) -> bool:
        return self._claim_s is None or self._clock() - self._claim_s >= _CLAIM_INTERVAL_S

    def _result(self, state: RequestState, timeout_s: float) -> FetchedResult | None:
        places = (*state.branches, state.result)
        if places == self._without_result:
            return None
        request = self._expected.commit if self._expected else state.inbox
        moved = [place for place in places if place is not None and place.commit != request]
        wanted = [place.ref for place in moved if not self._git.exists(place.commit)]
        if wanted:
            self._git.fetch(self._remote, wanted, timeout_s=timeout_s)
        result = fetch(self._git, self._remote, state, expected=self._expected, timeout_s=timeout_s)
        if result is None:
            self._without_result = places
        return result


def _read_claim(
    git: GitRepo, remote: str, claim: RefValue, nonce: str, trust: Trust | None
) -> tuple[RunStatus, Signature | None] | None:
    """The heartbeat in a claim and what its signature is worth; None: it moved, or cannot be read."""
    try:
        git.fetch(remote, [claim.ref], limit_bytes=_MAX_CLAIM_BYTES)
    except BusError:  # it is gone, or more than a claim; a remote that is away fails the next look, too
        return None
    if trust is None:
        status = read_status(git, claim.commit)
        return None if status is None else (status, None)
    found = read_claim(git, claim.commit, nonce, trust)
    return None if found is None else (found.status, found.signature)


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


def _trust(trusted: Path | None) -> Trust | None:
    """The keys by which heartbeats are judged; None: there are none to judge by."""
    return Trust.by(trusted) if trusted is not None and pins_keys(trusted) else None
