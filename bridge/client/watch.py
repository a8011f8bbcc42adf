"""A request followed to its end: queued, claimed, running n of m, done. The client's second half.

Polling is quick at first and after every change, then slower. A look is one fetch of this request's own refs
into a repository that lives as long as the watch, so it costs the same whatever else is on the remote. A
network that fails for a while is reported and waited out; every command has a deadline and so has the whole.
Judging the result is `bridge.bus.results.believe`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bridge.bus.aside import aside
from bridge.bus.claimed import read_claim, read_status
from bridge.bus.git import Git
from bridge.bus.handles import OWN_REFS, Held, RequestState, state_of
from bridge.bus.intake import Intake
from bridge.bus.results import Asked, FetchedResult, fetch, pins_keys
from bridge.bus.standing import Signature, Trust
from bridge.errors import RemoteUnreachable, ResultError, UnknownHandle, WaitTimeout
from bridge.protocol import refs
from bridge.protocol.result import RESULT_NAME, Phase, RunStatus, parse_result

_LOCAL_PAUSES_S = (0.03, 1.5)
_NETWORK_PAUSES_S = (1.0, 10.0)
_SLOWER = 1.3
_COMMAND_TIMEOUT_S = 60.0
# Before the remote has answered once, this many failures in a row are not a passing fault.
_FIRST_FAILURES = 3
# A request is vanished, not just between two of its refs, when this many looks found nothing of it.
_EMPTY_LOOKS = 4
# How many wait before a queued request is asked of the whole remote, so not at every look.
_QUEUE_INTERVAL_S = 5.0


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
    git: Git,
    remote: str,
    nonce: str,
    *,
    deadline: float,
    asked: Asked | None = None,
    trusted: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Update]:
    """Follow a request; yields on every change and ends with the update that carries the result.

    A claim or a gating too short to be seen is yielded all the same, from what came after it.

    Args:
        git: Any checkout; nothing is left in it.
        remote: Address of the bus.
        nonce: The request.
        deadline: When to give up, on `clock`.
        asked: The request as this client submitted it; None: as it stands on the remote.
        trusted: The runner keys that count here, for heartbeats; None: those are not checked.
        clock: Monotonic seconds.
        sleep: Waits that many seconds.

    Raises:
        WaitTimeout: The deadline came first; the job goes on.
        UnknownHandle: Nothing of the request is on the remote any more.
        RemoteUnreachable: The remote never answered.
        ResultError: Something stands where the result belongs and cannot be one.
    """
    quick, slow = _LOCAL_PAUSES_S if refs.is_local(remote) else _NETWORK_PAUSES_S
    last: Update | None = None
    pause = quick
    with aside(git, borrowing=True) as own:
        watcher = _Watcher(own, remote, nonce, asked, trust=_trust(trusted), clock=clock)
        while True:
            began = clock()
            update = watcher.look(max(1.0, min(_COMMAND_TIMEOUT_S, deadline - clock())))
            if update != last:
                yield from _missed(last or (Update(nonce, Phase.QUEUED) if asked else None), update)
                yield update
                last, pause = update, quick
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
            pause = min(pause * _SLOWER, slow)


def _missed(before: Update | None, update: Update) -> Iterator[Update]:
    """The claim and the gating that went by between two looks; nothing for a latecomer (`before` None)."""
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


class _Watcher:
    """What is known of one request, so that a look fetches only what changed."""

    def __init__(
        self,
        git: Git,
        remote: str,
        nonce: str,
        asked: Asked | None,
        *,
        trust: Trust | None,
        clock: Callable[[], float],
    ) -> None:
        self._git = git
        self._remote = remote
        self._nonce = nonce
        self._asked = asked
        self._trust = trust
        self._clock = clock
        self._known = Update(nonce, Phase.QUEUED)
        self._state: RequestState | None = None
        self._counted_at = 0.0
        self._claim: Held | None = None
        self._status: RunStatus | None = None
        self._signature: Signature | None = None
        self._without_result: tuple[Held | None, ...] | None = None
        self._failures = 0
        self._empty = 0

    def look(self, timeout_s: float) -> Update:
        try:
            self._state = state = self._look(timeout_s)
            self._known = self._update(state, timeout_s)
        except RemoteUnreachable as error:
            self._failures += 1
            if self._state is None and self._failures >= _FIRST_FAILURES:
                raise
            notice = error.message
            return replace(self._known, notice=notice, result=None)
        self._failures = 0
        return self._known

    def _look(self, timeout_s: float) -> RequestState:
        """Where the request is: by the whole remote at first and at times while queued, else by its own refs.

        Objects of what runs are here afterwards.
        """
        before = self._state
        waiting = before is not None and before.claim is None and before.branch is not None
        late = self._clock() - self._counted_at >= _QUEUE_INTERVAL_S
        if before is None or (waiting and late):
            found = self._git.ls_remote(self._remote, timeout_s=timeout_s)
            self._counted_at = self._clock()
            before = state_of(found, self._nonce)
            if before.claim is None:
                return before
        names = [prefix + self._nonce for prefix in OWN_REFS]
        names += [held.ref for held in before.branches]
        # The star makes an absent ref an empty answer instead of an error.
        specs = [f"+{name}*:{name}*" for name in names]
        guard = Intake(self._git.directory, self._remote).guard
        self._git.fetch(self._remote, specs, prune=True, timeout_s=timeout_s, guard=guard)
        held = {name: commit for name in names if (commit := self._git.oid(name)) is not None}
        return replace(state_of(held, self._nonce), ahead=before.ahead, preset=before.preset)

    def _update(self, state: RequestState, timeout_s: float) -> Update:
        if state.gone:
            self._empty += 1
            if self._empty >= _EMPTY_LOOKS:
                raise UnknownHandle(
                    f"nothing of the request {self._nonce} is left on the remote",
                    "somebody deleted its branch before a result was published",
                )
            return self._known
        self._empty = 0
        result = self._result(state, timeout_s)
        if result is not None:
            return Update(self._nonce, Phase.DONE, status=self._status, claim=self._signature, result=result)
        if state.claim is None:
            self._claim = self._status = self._signature = None
            return Update(self._nonce, Phase.QUEUED, state.ahead)
        self._read_claim(state.claim)
        phase = self._status.phase if self._status else Phase.CLAIMED
        return Update(self._nonce, phase, status=self._status, claim=self._signature)

    def _result(self, state: RequestState, timeout_s: float) -> FetchedResult | None:
        places = (*state.branches, state.result)
        if places == self._without_result:
            return None
        result = fetch(self._git, self._remote, state, asked=self._asked, timeout_s=timeout_s)
        if result is None:
            self._without_result = places
        return result

    def _read_claim(self, held: Held) -> None:
        """The heartbeat that a claim holds."""
        if held == self._claim:
            return
        if self._trust is None:
            status, signature = read_status(self._git, held.commit), None
        else:
            claimed = read_claim(self._git, held.commit, self._nonce, self._trust)
            status, signature = (None, None) if claimed is None else (claimed.status, claimed.signature)
        if status is not None:
            self._claim, self._status, self._signature = held, status, signature


def _trust(trusted: Path | None) -> Trust | None:
    """The keys by which heartbeats are judged; None: there are none to judge by."""
    return Trust.by(trusted) if trusted is not None and pins_keys(trusted) else None
