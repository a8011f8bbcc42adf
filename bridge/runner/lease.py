"""Holding a request: the claim that makes it ours, its renewal while the job runs, and requests to stop it.

Only this module touches a claim ref while a job runs. A claim of another runner is left alone while its
heartbeat continues, unless it is one of this runner's own processes, from before a crash. Where the policy
requires signatures, a claim on a signed request counts only if a known runner signed it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

from bridge.bus import cancels
from bridge.bus.claims import Claim, Heartbeat, claim, has_expired, read_claim
from bridge.bus.requests import has_result
from bridge.bus.state import RefValue, state_of
from bridge.errors import BusError, KeyListError, LeaseLost, MachineError, PushRejected, describe
from bridge.evidence.redact import Secrets
from bridge.git.cache import GitCache
from bridge.git.repo import RefUpdate
from bridge.protocol import refs
from bridge.protocol.result import Phase, Progress, RunStatus
from bridge.runner.config import RunnerConfig
from bridge.runner.queue import CANCELS, Queue, held_by_nonce
from bridge.runner.request import Request
from bridge.runner.store import Store
from bridge.signing.trust import Trust, TrustLevel

log = logging.getLogger(__name__)

TAIL_LINES = 12
# A claim pushed faster than this left no time to claim, run and publish in between.
_SURE_S = 0.05
# A claim on a signed request is verified again after so many seconds.
_VERIFY_AGAIN_S = 30.0
_LINE = 500  # characters of a line that are shown
# Phases of a short job follow each other faster than anyone could see them.
_SETTLE_S = 0.25
_PROGRESS = re.compile(r"progress (\d{1,9})/(\d{1,9})(?: (.*))?")


class LeaseHolder(Protocol):
    """What keeps a request ours while its job runs: a claim on the bus, or a workflow run of GitHub."""

    def renew(self, beat: Heartbeat) -> None:
        """Say how far the job is.

        Raises:
            LeaseLost: The request is another runner's now: the job must stop.
            BusError: It could not be said; the next heartbeat may do.
        """
        ...


@dataclass
class HeartbeatThread:
    """Renews a lease every `interval_s` and after a change of phase, and asks whether the job shall stop.

    Attributes:
        holder: Told of each heartbeat; not touched by another thread until `stop` returned.
        interval_s: Seconds between heartbeats.
        secrets: Values that must not appear in the lines shown.
        poll: Asked every `poll_s` seconds whether the job shall stop: a sentence that says so, or None.
        poll_s: Seconds between two such questions.
        show: Takes each line of the job's output, without the secrets.
        repair: Called when git failed on this side, before the next heartbeat.
        clock: Monotonic seconds.
        lost: The request is another runner's now.
        cancelled: Why the job shall stop.
    """

    holder: LeaseHolder
    _: KW_ONLY
    interval_s: float
    secrets: Secrets
    poll: Callable[[], str | None] = lambda: None
    poll_s: float = 1.5
    show: Callable[[str], None] = lambda _: None
    repair: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    lost: bool = field(default=False, init=False)
    cancelled: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()
        self._phase = Phase.CLAIMED
        self._progress: Progress | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; the caller may use the holder when this returns."""
        self._ending.set()
        self._wake.set()
        self._thread.join()

    def enter(self, phase: Phase) -> None:
        """Say which phase the job is in."""
        self._phase = phase
        self._wake.set()

    def line(self, text: str) -> None:
        """Take a line of the job's output: progress, or a line of the log's tail."""
        text = self.secrets.cut_text(text, broken_off=len(text) > _LINE)
        self.show(text)
        match = _PROGRESS.fullmatch(text.rstrip())
        if match is None:
            self._tail.append(text[:_LINE])
        else:
            done, total, step = int(match[1]), int(match[2]), match[3] or ""
            self._progress = Progress(done=min(done, total), total=total, step=step[:200])
            if self._tail and _PROGRESS.fullmatch(self._tail[-1]):
                self._tail.pop()  # of progress, the log's tail shows the newest
            self._tail.append(text.rstrip()[:_LINE])

    def _run(self) -> None:
        next_beat, next_poll = self._started + self.interval_s, self._started + self.poll_s
        while True:
            woken = self._wake.wait(max(0.0, min(next_beat, next_poll) - self.clock()))
            # Cleared before `_ending` is asked: a stop that comes between the two is not slept through.
            self._wake.clear()
            if self._ending.wait(_SETTLE_S if woken else 0):
                return
            if woken or self.clock() >= next_beat:
                self._renew()
                next_beat = self.clock() + self.interval_s
            if self.lost:
                return
            if self.cancelled is None and self.clock() >= next_poll:
                with _surviving("cannot ask whether the job shall stop"):
                    self.cancelled = self.poll()
                next_poll = self.clock() + self.poll_s

    def _renew(self) -> None:
        beat = Heartbeat(self._phase, self.clock() - self._started, self._progress, tuple(self._tail))
        with _surviving("the lease was not renewed"):  # the next heartbeat may do
            try:
                self._renew_or_repair(beat)
            except LeaseLost:
                self.lost = True

    def _renew_or_repair(self, beat: Heartbeat) -> None:
        try:
            self.holder.renew(beat)
        except BusError as error:
            if type(error) is not BusError:
                raise
            self.repair()  # the repository here may be broken
            self.holder.renew(beat)


@contextlib.contextmanager
def _surviving(failure: str) -> Iterator[None]:
    """Log what fails, a bug of ours included: neither must end the heartbeat."""
    try:
        yield
    except (BusError, MachineError, OSError) as error:
        log.debug("%s: %s", failure, describe(error))
    except Exception:
        log.exception(failure)


@dataclass
class Leases:
    """Who has claimed what is pending, and claiming it.

    `sessions` are processes of this runner, this one among them: claims of theirs are ours.
    """

    config: RunnerConfig
    cache: GitCache
    store: Store
    queue: Queue
    _: KW_ONLY
    sessions: frozenset[str]
    clock: Callable[[], float] = time.monotonic
    _reported: set[str] = field(default_factory=set, init=False)

    def may_claim(self, request: Request) -> bool:
        """Whether the request is free: unclaimed, or its claim may be replaced."""
        if request.is_answered:
            return False
        return request.claim is None or self._is_replaceable(request, request.claim)

    def next_attempt(self, request: Request) -> int:
        """The attempt that a claim by this runner would be."""
        claimed = request.status.attempt if request.status is not None and self._counts(request) else 0
        return max(claimed, self.store.get(request.nonce).attempts) + 1

    def claim(
        self, request: Request, *, admitted: bool = True
    ) -> tuple[Claim, str | None, RunStatus | None] | None:
        """Claim a request as of the last look; None: another runner has it, or it was answered.

        A request that was `admitted` is to run, so under ``allow_refs`` it has to be on its branch still.

        Returns:
            The claim; why the request is cancelled, where its branch was deleted a moment ago; and the last
            heartbeat of the claim that was replaced.

        Raises:
            PushRejected: The remote takes no claim.
            RemoteUnreachable: It did not answer.
        """
        place = request.ref or refs.inbox_ref(request.nonce)
        # What was read long ago may have been dropped here, and git pushes no ref without its object.
        if self.cache.bring({place: request.commit}, [place]):
            return None
        branch = request.ref if request.manifest is None else request.manifest.result_ref
        inbox = {} if request.ref else {refs.inbox_ref(request.nonce): request.commit}
        if request.claim is not None:
            self.queue.read_claim(request)
        held = self._push(request, {**inbox, **({branch: request.commit} if branch else {})})
        reason = None
        if held is None and branch and inbox:
            reason, is_open = self._what_changed(request, branch)
            by_branch = self.config.policy.allow_refs is not None and reason is None
            if is_open and not (by_branch and admitted):
                held = self._push(request, inbox)
        if held is None:
            if request.ref:
                self.queue.scan_soon()
            return None
        return held, reason, request.status

    def _push(self, request: Request, unchanged: dict[str, str]) -> Claim | None:
        began = self.clock()
        held = claim(
            self.cache,
            self.config.remote,
            nonce=request.nonce,
            request_commit=request.commit,
            identity=self.config.identity,
            found_on=request.ref,
            attempt=self.next_attempt(request),
            lease_s=self.config.timing.lease_s,
            replaces=request.claim,
            unchanged=unchanged,
            sign=self.config.sign_claim,
        )
        if held is None or self.clock() - began < _SURE_S:
            return held
        # Refs that were "pushed" unchanged were compared when the push began: was it answered since?
        found = self._list(request, *unchanged)
        if state_of(found, request.nonce).is_open(request.commit):
            return held
        held.release()
        return None

    def _what_changed(self, request: Request, branch: str) -> tuple[str | None, bool]:
        """Why the claim failed where no other runner has it: a cancellation, and whether it is open still."""
        found = self._list(request, branch)
        state = state_of(found, request.nonce)
        before = None if request.claim is None else request.claim.commit
        claimed = state.claim is not None and state.claim.commit != before
        if claimed or state.inbox != request.commit or state.result is not None:
            return None, False
        tip = found.get(branch)
        if tip is None:
            return deleted_branch(self.config), True
        if not self.cache.bring(found, [branch]) and has_result(self.cache, tip, request.nonce):
            request.is_answered = True
            log.info("%s: it has its result on %s, and leaves the inbox", request.nonce, branch)
            left = RefUpdate(refs.inbox_ref(request.nonce), None, request.commit)
            with contextlib.suppress(PushRejected, LeaseLost):  # a server may keep its refs
                self.cache.push(self.config.remote, [left])
            return None, False
        return None, True

    def _list(self, request: Request, *more: str) -> dict[str, str]:
        nonce = request.nonce
        names = (refs.inbox_ref(nonce), *refs.claim_places(nonce), refs.result_ref(nonce))
        return self.cache.list_remote(*names, refs.BRANCH_RESULTS + nonce, *more)

    def _is_replaceable(self, request: Request, held: RefValue) -> bool:
        status = request.status
        if not self._counts(request):
            return True
        if status is not None and status.session in self.sessions:
            return True  # ours, from before a crash: this process holds the runner's name
        if request.silent_since is None or request.silent_since[0] != held.commit:
            request.silent_since = (held.commit, self.clock())
            return False
        return has_expired(status.lease_s if status else None, self.clock() - request.silent_since[1])

    def _counts(self, request: Request) -> bool:
        """Whether the claim on a request must be respected."""
        strict = self.config.policy.require_signature and request.requester is not None
        if not strict or request.claim is None:
            return True
        if request.counted is None or self.clock() - request.counted[0] >= _VERIFY_AGAIN_S:
            request.counted = (self.clock(), self._verify(request, request.claim))
        return request.counted[1]

    def _verify(self, request: Request, held: RefValue) -> bool:
        if self.cache.bring({held.ref: held.commit}, [held.ref], depth=1):
            return True  # it moved; the next look sees what is there
        try:
            record = read_claim(self.cache, held.commit, request.nonce, Trust.by(self.config.known_runners))
        except KeyListError:  # then only claims of this machine count
            record = None
        if record is None:
            return False
        signature = record.signature
        if signature.trust is TrustLevel.TRUSTED or signature.signer in self.config.own_fingerprints():
            return True
        if signature.trust is TrustLevel.UNTRUSTED_KEY and signature.signer not in self._reported:
            self._reported.add(str(signature.signer))
            log.warning(
                "%s: the claim of %s does not count: known_runners does not list its key %s; if that Mac is"
                " yours, both may run the request: have each list the other (kakeya_mac runner key prints the"
                " command)",
                request.nonce,
                record.status.runner,
                signature.signer,
            )
        return False


@dataclass
class CancelMonitor:
    """Requests to stop: which there are, and which of them are authorised.

    Where the policy requires signatures only the requester's own counts. Else everyone's does, and so does
    the deletion of the request's branch.
    """

    config: RunnerConfig
    cache: GitCache
    _refused: set[str] = field(default_factory=set, init=False)

    def reason(self, request: Request) -> str | None:
        """Why a waiting request is cancelled, by the last look at the queue; None: it is not."""
        return None if request.cancel is None else self._authorised(request, request.cancel)

    def poll(self, request: Request) -> tuple[str | None, dict[str, RefValue]]:
        """Ask the remote about a running request.

        Returns:
            Why it shall stop, or None; and the cancel requests of other requests, by nonce.

        Raises:
            RemoteUnreachable: The remote did not answer.
        """
        branch = None if request.manifest is None else request.manifest.result_ref
        found = self.cache.list_remote(*CANCELS, refs.INBOX, *([branch] if branch else []))
        held = held_by_nonce(found, CANCELS)
        own = held.pop(request.nonce, None)
        request.cancel = own or request.cancel  # goes with the result
        if branch is not None and branch not in found and (deleted := deleted_branch(self.config)):
            return deleted, held
        others = {
            nonce: value
            for nonce, value in held.items()
            if value.commit not in self._refused and refs.inbox_ref(nonce) in found
        }
        return (None if own is None else self._authorised(request, own)), others

    def _authorised(self, request: Request, held: RefValue) -> str | None:
        if self.cache.bring({held.ref: held.commit}, [held.ref], depth=1):
            return None
        objection = cancels.objection(
            self.cache,
            held.commit,
            nonce=request.nonce,
            request_commit=request.commit,
            require_signature=self.config.policy.require_signature,
            requester=request.requester,
            allowed_signers=self.config.allowed_signers,
            revoked_keys=self.config.revoked_keys,
        )
        if objection is not None:
            if held.commit not in self._refused:
                self._refused.add(held.commit)
                log.warning("%s: not cancelled: %s", request.nonce, objection)
            return None
        cancel = cancels.read_cancel(self.cache, held.commit)
        return None if cancel is None else cancel.sentence


def deleted_branch(config: RunnerConfig) -> str | None:
    """What a deleted branch means: a cancellation, unless the policy requires signatures."""
    return None if config.policy.require_signature else "its branch was deleted"
