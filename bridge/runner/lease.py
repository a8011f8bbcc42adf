"""Holding a request: its claim, the claim's renewal while the job runs, and requests to stop it."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field

from bridge.bus import cancels
from bridge.bus.claims import Claim, Heartbeat, claim, has_expired, read_claim, read_status
from bridge.bus.requests import CANCELS, RESULTS, RefValue, has_result, state_of
from bridge.errors import LeaseLost, PushRejected, describe
from bridge.evidence.redact import Secrets
from bridge.git.cache import GitCache
from bridge.git.repo import RefUpdate
from bridge.protocol import refs
from bridge.protocol.result import Phase, Progress
from bridge.runner.admission import Request
from bridge.runner.config import RunnerConfig
from bridge.runner.queue import held_by_nonce
from bridge.runner.store import Store
from bridge.signing.trust import TrustLevel

log = logging.getLogger(__name__)

TAIL_LINES = 12
_READ_AGAIN_S = 30.0  # until a claim is read, and its signature verified, again
_LINE = 500  # characters of a line that are shown
_PROGRESS = re.compile(r"progress (\d{1,9})/(\d{1,9})(?: (.*))?")


@dataclass
class HeartbeatThread:
    """Renews a lease every `interval_s`, and asks every `poll_s` whether the job shall stop."""

    renew: Callable[[Heartbeat], None]  # a `LeaseLost`: another runner has the request now
    _: KW_ONLY
    interval_s: float
    secrets: Secrets  # values that must not appear in the lines shown
    poll: Callable[[], str | None] = lambda: None  # a sentence that says why the job shall stop
    poll_s: float = 1.5
    show: Callable[[str], None] = lambda _: None  # takes each line of the job's output, without the secrets
    clock: Callable[[], float] = time.monotonic
    lost: bool = field(default=False, init=False)  # the request is another runner's now
    cancelled: str | None = field(default=None, init=False)  # why the job shall stop

    def __post_init__(self) -> None:
        self._started = self.clock()
        self.phase = Phase.CLAIMED  # that the job is in; the next heartbeat says it
        self._progress: Progress | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin; until `stop` returned nothing else may use what `renew` uses."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._ending.set()
        self._thread.join()

    def line(self, text: str) -> None:
        """Take a line of the job's output: progress, or a line of the log's tail."""
        text = self.secrets.cut_text(text, broken_off=len(text) > _LINE)
        self.show(text)
        if match := _PROGRESS.fullmatch(text.rstrip()):
            done, total, step = int(match[1]), int(match[2]), match[3] or ""
            self._progress = Progress(done=min(done, total), total=total, step=step[:200])
            if self._tail and _PROGRESS.fullmatch(self._tail[-1]):
                self._tail.pop()  # of progress, the log's tail shows the newest
        self._tail.append(text.rstrip()[:_LINE])

    def _run(self) -> None:
        next_beat, next_poll = self._started + self.interval_s, self._started + self.poll_s
        while not self._ending.wait(max(0.0, min(next_beat, next_poll) - self.clock())) and not self.lost:
            try:
                if self.clock() >= next_beat:
                    next_beat = self.clock() + self.interval_s
                    elapsed_s = self.clock() - self._started
                    self.renew(Heartbeat(self.phase, elapsed_s, self._progress, tuple(self._tail)))
                if self.clock() >= next_poll:
                    next_poll = self.clock() + self.poll_s
                    self.cancelled = self.cancelled or self.poll()
            except LeaseLost:
                self.lost = True
            except Exception as error:  # a bug, too, must not end the heartbeat: the next one may succeed
                log.warning("a heartbeat failed: %s", describe(error))


@dataclass
class Leases:
    """Who has claimed what is pending, and claiming it; only this touches a claim ref while a job runs.

    `sessions` are processes of this runner, this one among them: claims of theirs are ours.
    """

    config: RunnerConfig
    cache: GitCache
    store: Store
    _: KW_ONLY
    sessions: frozenset[str]
    clock: Callable[[], float] = time.monotonic
    _reported: set[str] = field(default_factory=set, init=False)

    def may_claim(self, request: Request) -> bool:
        """Whether the request is free: unclaimed, or its claim may be replaced."""
        held, now = request.claim, self.clock()
        if held is None:
            return True
        if now >= request.read_claim_at:
            self._read(request, held)
        status = request.status
        if not request.claim_counts:
            return True
        if status is not None and status.session in self.sessions:
            return True  # ours, from before a crash: this process holds the runner's name
        if request.silent_since is None or request.silent_since[0] != held.commit:
            request.silent_since = (held.commit, now)
            return False
        return has_expired(status.lease_s if status else None, now - request.silent_since[1])

    def next_attempt(self, request: Request) -> int:
        """The attempt that a claim by this runner would be."""
        claimed = request.status.attempt if request.status is not None and request.claim_counts else 0
        return max(claimed, self.store.get(request.nonce).attempts) + 1

    def claim(self, request: Request, *, admitted: bool = True) -> tuple[Claim, str | None] | None:
        """Claim a request as of the last look; None: another runner has it, or it was answered.

        A request that was `admitted` is to run, so under ``allow_refs`` it has to be on its branch still. The
        text says why the request is cancelled, where its branch was deleted a moment ago.
        """
        # What was read long ago may have been dropped here, and git pushes no ref without its object.
        if self.cache.bring({request.place: request.commit}, [request.place]):
            return None
        if request.claim is not None:
            self._read(request, request.claim)
            if not self.may_claim(request):  # it is another one than that which the last look judged
                return None
        held = claim(
            self.cache,
            self.config.remote,
            nonce=request.nonce,
            place=RefValue(request.place, request.commit),
            identity=self.config.identity,
            attempt=self.next_attempt(request),
            lease_s=self.config.timing.lease_s,
            replaces=request.claim,
            sign=self.config.sign_claim,
        )
        if held is None:
            return None
        is_open = False
        try:
            is_open, reason = self._look_again(request, admitted)
        finally:
            if not is_open:
                held.release()
        return (held, reason) if is_open else None

    def _look_again(self, request: Request, admitted: bool) -> tuple[bool, str | None]:
        """Whether a request that was just claimed is open, and why it is cancelled.

        The claim's push compared with what the remote held when it began: an answer may have come since.
        """
        nonce = request.nonce
        branch = request.ref if request.manifest is None else request.manifest.result_ref
        names = (refs.INBOX + nonce, *refs.claim_places(nonce), *(prefix + nonce for prefix in RESULTS))
        found = self.cache.list_remote(*names, *([branch] if branch else []))
        if not state_of(found, nonce).is_open(request.commit):
            return False, None
        tip = found.get(branch or "")
        if branch is None or tip == request.commit:
            return True, None
        by_branch = admitted and self.config.policy.allow_refs is not None
        if tip is None:
            reason = missing_branch(self.config, branch)
            return reason is not None or not by_branch, reason
        if self.cache.bring(found, [branch]) or not has_result(self.cache, tip, nonce):
            return not by_branch, None
        self.store.back_off(nonce, f"it has its result on {branch}, and leaves the inbox")
        with contextlib.suppress(PushRejected, LeaseLost):  # a server may keep its refs
            left = RefUpdate(refs.INBOX + nonce, None, request.commit)
            self.cache.push(self.config.remote, [left])
        return False, None

    def _read(self, request: Request, held: RefValue) -> None:
        """Read what the claim on a request says now, and whether it must be respected."""
        if self.cache.bring({held.ref: held.commit}, [held.ref], depth=1):
            return  # it moved; the next look sees what is there
        request.status = read_status(self.cache, held.commit)
        request.read_claim_at = self.clock() + _READ_AGAIN_S
        is_strict = self.config.policy.require_signature and request.requester is not None
        request.claim_counts = not is_strict or self._is_known(request, held.commit)

    def _is_known(self, request: Request, commit: str) -> bool:
        """Whether a claim is signed by a runner of this machine, or one of ``known_runners``."""
        record = read_claim(self.cache, commit, request.nonce, self.config.config_dir / "known_runners")
        if record is None:
            return False
        signature = record[1]
        if signature.trust is TrustLevel.TRUSTED or signature.signer in self.config.own_fingerprints():
            return True
        if signature.trust is TrustLevel.UNTRUSTED_KEY and signature.signer not in self._reported:
            self._reported.add(str(signature.signer))
            what = "the claim of %s does not count: known_runners does not list its key %s"
            remedy = "if that Mac is yours, let each list the other: kakeya_mac runner key"
            log.warning(f"%s: {what}; {remedy}", request.nonce, record[0].runner, signature.signer)
        return False


@dataclass
class CancelMonitor:
    """Requests to stop: which there are, and which of them are authorised.

    Where the policy requires signatures only the requester's own counts. Else everyone's does, and so does
    the deletion of the request's branch. A request that has a result, as a withdrawn one, is not run further
    in any case: its own result cannot be published any more.
    """

    config: RunnerConfig
    cache: GitCache
    _refused: set[str] = field(default_factory=set, init=False)
    _moved: set[str] = field(default_factory=set, init=False)  # tips of branches that hold no result

    def reason(self, request: Request) -> str | None:
        """Why a request is cancelled, by what was last seen of it; None: it is not."""
        held = request.cancel
        if held is None or self.cache.bring({held.ref: held.commit}, [held.ref], depth=1):
            return None
        objection = cancels.objection(
            self.cache,
            held.commit,
            nonce=request.nonce,
            request_commit=request.commit,
            require_signature=self.config.policy.require_signature,
            requester=request.requester,
            allowed_signers=self.config.allowed_signers,
        )
        if objection is None:
            cancel = cancels.read_cancel(self.cache, held.commit)
            return None if cancel is None else cancel.sentence
        if held.commit not in self._refused:
            self._refused.add(held.commit)
            log.warning("%s: not cancelled: %s", request.nonce, objection)
        return None

    def poll(self, request: Request) -> tuple[str | None, set[str]]:
        """Why a running request shall stop, or None; and the nonces of others with a cancel request."""
        branch = None if request.manifest is None else request.manifest.result_ref
        results = [prefix + request.nonce for prefix in RESULTS]
        found = self.cache.list_remote(*CANCELS, *results, refs.INBOX, *([branch] if branch else []))
        asked = held_by_nonce(found, CANCELS)
        own = asked.pop(request.nonce, None)
        request.cancel = own or request.cancel  # goes with the result
        waiting = {nonce for nonce in asked if refs.INBOX + nonce in found}
        others = {nonce for nonce in waiting if asked[nonce].commit not in self._refused}
        if any(ref in found for ref in results) or self._has_result(request, branch, found):
            return "it has a result already", others
        if branch is not None and branch not in found and (why := missing_branch(self.config, branch)):
            return why, others
        return (None if own is None else self.reason(request)), others

    def _has_result(self, request: Request, branch: str | None, found: Mapping[str, str]) -> bool:
        """Whether the request's branch holds a result of it, and was not only moved elsewhere."""
        tip = found.get(branch or "", request.commit)
        if branch is None or tip == request.commit or tip in self._moved:
            return False
        if not self.cache.bring(found, [branch]) and has_result(self.cache, tip, request.nonce):
            return True
        self._moved.add(tip)
        return False


def missing_branch(config: RunnerConfig, branch: str) -> str | None:
    """What it means that a branch is not there: a cancellation, unless the policy requires signatures."""
    return None if config.policy.require_signature else f"its branch {branch} is not on the remote"
