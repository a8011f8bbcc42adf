"""The runner's loop: poll, admit, claim, run and publish, one request at a time, until told to stop."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from bridge.bus.archive import DEFAULT_OLDER_THAN, prune
from bridge.bus.claims import Claim
from bridge.bus.registry import remove_old_registrations
from bridge.errors import AccessDenied, BusError, MachineError, RemoteUnreachable, describe
from bridge.git.cache import GitCache
from bridge.protocol.manifest import format_time
from bridge.protocol.result import Reason, Status
from bridge.protocol.runner_info import State, Work
from bridge.runner.admission import Admission, Admitted, Decision, NotNow, Refusal, Request
from bridge.runner.child import MachineBusy, Supervisor
from bridge.runner.config import RunnerConfig
from bridge.runner.control import (
    STATUS,
    LocalJob,
    LocalStatus,
    is_draining,
    keep_status,
    own_status,
    set_draining,
)
from bridge.runner.job import Job, JobReport, make_verdict
from bridge.runner.lease import CancelMonitor, HeartbeatThread, Leases
from bridge.runner.publisher import Publisher
from bridge.runner.queue import Queue
from bridge.runner.registration import Registrar
from bridge.runner.store import Store
from bridge.runner.workspace import remove_tree

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
# After activity the pauses between looks are short for so long, and then grow.
FAST_WINDOW_S = 20.0
SLOWER_S = 2.0
MAX_LOST_CLAIMS = 2  # that one look may lose to other runners before the next look
SHARED_S = (0.2, 0.6)  # pauses while other runners have claims
MAX_BACKOFF_S = 60.0
# Pruning, a batch between two jobs.
PRUNE_EVERY_S = 6 * 3600.0
PRUNE_FIRST_S = 600.0
PRUNE_AGAIN_S = 20.0
PRUNE_BATCH = 100
SHUTDOWN = make_verdict(Reason.SHUTDOWN, "the runner was told to stop")
MAX_CANCELLED = 5  # requests, answered in one look while a job runs: each costs a few pushes


class NameInUse(MachineError):
    """Another process of this machine runs under the runner's name."""


class Daemon:
    """One embedded runner on one remote.

    What goes wrong with one request counts against it alone, because anyone with push rights can provoke it.
    `idle_s` is the longest pause between two looks at an idle queue; None: by the kind of remote. With
    `prunes` old results are retired between jobs.
    """

    def __init__(
        self,
        config: RunnerConfig,
        *,
        idle_s: float | None = None,
        prunes: bool = True,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._config, self._clock, self._now = config, clock, now
        self._idle_s = idle_s or config.timing.poll_s
        self._cache = cache = GitCache(config.folder / f"remote-{config.tag}.git", config.remote)
        database = config.folder / f"store-{config.tag}.sqlite"
        # Claims of earlier processes of this runner are ours, because it holds its name while it serves.
        with hold_name(config):
            self._store = store = Store(database, clock=lambda: now().timestamp())
            sessions = store.add_session(config.identity.session)
        store.release_deferred()  # the owner may have changed the policy meanwhile
        self._queue = Queue(config, cache, store, clock=clock, now=now)
        self._admission = Admission(config, cache, store, now=now)
        self._leases = Leases(config, cache, store, sessions=sessions, clock=clock)
        self._cancels = CancelMonitor(config, cache)
        self._publisher = Publisher(config, cache, store, sessions=sessions)
        self._registrar = Registrar(config, cache, store, clock=clock, now=now)
        self._prune_at = clock() + random.uniform(PRUNE_FIRST_S / 2, PRUNE_FIRST_S) if prunes else None  # noqa: S311 - spreads the work
        self._abort = threading.Event()
        self._active_at = clock()
        self._failures = 0  # looks in a row
        self._failure: str | None = None  # what the last one said
        self._draining = False
        self._status: LocalStatus | None = None  # while it serves
        self._noted: LocalStatus | None = None  # as it was last written
        self._reached = False  # the remote, once
        self._busy = ""  # who has the machine, as far as the last look found
        self._lost_claims = 0  # in this look
        self._done = 0

    def abort(self) -> None:
        """Stop the running job, too; it ends as ``cancelled/shutdown``. Set `stop` of `serve` as well."""
        self._abort.set()

    def serve(
        self, *, once: bool = False, stop: threading.Event | None = None, idle_timeout_s: float | None = None
    ) -> int:
        """Serve until `stop` is set; the running job is finished first. Return how many were answered.

        With `once`, only until one was answered, or for `idle_timeout_s` seconds without one. An
        `AccessDenied`: the remote refused the credentials at the first look; later that is retried.
        """
        stop, began, self._done = stop or threading.Event(), self._clock(), 0
        config = self._config
        with hold_name(config):
            self._status = own_status(config.identity.name, config.audience, format_time(self._now()))
            if self._status.service is None:  # a person who starts it wants it to serve
                set_draining(config.folder, False)
            self._note()
            try:
                while not stop.is_set():
                    handled = self._safe_tick()
                    self._done += handled
                    late = idle_timeout_s is not None and self._clock() - began >= idle_timeout_s
                    if once and (handled or late):
                        break
                    self._between_jobs(idle=not handled)
                    if not handled:
                        stop.wait(self._pause())
            finally:
                self._note(state=State.STOPPED)
                self._registrar.stopped(done=self._done)
                self._cache.close()
        return self._done

    def tick(self) -> bool:
        """Handle at most one request. Return whether one was handled."""
        is_valid = self._policy_is_valid() and not self._drains()
        requests = self._queue.poll(None if is_valid else ())
        self._reached = True
        self._lost_claims, waited, self._busy = 0, self._busy, ""
        self._publisher.flush(self._queue.found)
        if not is_valid:
            return False
        waiting = self._publisher.waiting()
        for request in requests:
            if request.nonce not in waiting and self._try(request):
                return True
            if self._lost_claims == MAX_LOST_CLAIMS:
                break  # other runners were faster: what else was seen is old, too
        if self._busy and not waited:
            log.info("waiting: %s", self._busy)
        return False

    def _try(self, request: Request, *, only_cancelled: bool = False) -> bool:
        """`_consider` a request; what goes wrong with it defers it, and longer each time."""
        try:
            handled = self._consider(request, only_cancelled)
            if not handled:
                return False
        except RemoteUnreachable:
            raise
        except Exception as error:  # whatever this request provokes, the next one must be served
            if type(error) is BusError:  # git failed on this side: the copy here may be broken
                self._cache.repair()
            self._store.back_off(request.nonce, describe(error))
            handled = False
        self._queue.note_turn(request)
        return handled

    def _consider(self, request: Request, only_cancelled: bool) -> bool:
        """Handle a request that is free, unless it has to wait. Return whether it was handled."""
        if not self._leases.may_claim(request):
            return False
        cancelled = self._cancels.reason(request)
        if cancelled is None and only_cancelled:
            return False
        decision = self._admission.check(request, self._queue.found)
        if isinstance(decision, NotNow):
            if cancelled is None:
                if self._store.defer(request.nonce, decision.until.timestamp(), decision.reason):
                    log.info("%s: not now: %s", request.label, decision.reason)
                return False
            decision = decision.refusal
        runs = isinstance(decision, Admitted) and cancelled is None
        if not runs or self._leases.next_attempt(request) > MAX_ATTEMPTS:
            return self._handle(request, decision, cancelled, None)
        try:
            supervisor = Supervisor(self._config.lock)
        except MachineBusy as busy:
            self._busy = busy.message
            return False
        with supervisor:
            return self._handle(request, decision, None, supervisor)

    def _handle(
        self, request: Request, decision: Decision, cancelled: str | None, supervisor: Supervisor | None
    ) -> bool:
        """Claim, run and publish one request. Return whether it was ours."""
        held = self._leases.claim(request, admitted=isinstance(decision, Admitted))
        self._queue.note_claim(request, won=held is not None)
        if held is None:
            self._lost_claims += 1
            return False
        claim, deleted = held
        asked = request.requester or (request.manifest and request.manifest.requested_by) or "unknown"
        log.info("%s: claimed, attempt %d, asked by %s", request.label, claim.attempt, asked)
        # The published refusal does not show the value: lists hold the names of other requesters.
        if isinstance(decision, Refusal) and decision.key is not None:
            log.info("%s: by %s", request.nonce, self._config.policy.setting(decision.key))
        try:
            if supervisor is not None:
                supervisor.await_start()
            job = Job(self._config, self._cache, request, decision, claim.attempt, now=self._now)
            if supervisor is not None:
                self._store.begin(request.nonce, claim.attempt)  # durable before anything runs
        except Exception:  # as on a full disk
            claim.release()
            raise
        try:
            report = self._run(job, request, claim, supervisor, cancelled or deleted)
            if report is None:
                log.warning("%s: the lease was lost, the job was stopped", request.nonce)
            else:
                self._publish(request, report, claim)
        finally:
            job.clean_up()
        return True

    def _run(
        self, job: Job, request: Request, claim: Claim, supervisor: Supervisor | None, cancelled: str | None
    ) -> JobReport | None:
        """What came of a claimed request; None: the lease was lost, so another runner gives the result."""
        if claim.attempt > MAX_ATTEMPTS:
            return job.give_up(request.status)
        if cancelled is not None:
            return job.cancel(cancelled)
        started, timing = self._clock(), self._config.timing
        if request.manifest is not None:
            started_at = format_time(self._now())
            local = LocalJob(nonce=request.nonce, preset=request.manifest.preset, started_at=started_at)
            self._note(state=State.BUSY, job=local)
        heartbeat = HeartbeatThread(
            lambda beat: self._cache.recover(lambda: claim.renew(beat)),
            interval_s=timing.heartbeat_s,
            secrets=job.secrets,
            poll=lambda: self._poll_with_deadline(request, started),
            poll_s=timing.cancel_s,
            clock=self._clock,
        )
        return job.run(heartbeat, supervisor, abort=lambda: SHUTDOWN if self._abort.is_set() else None)

    def _publish(self, request: Request, report: JobReport, claim: Claim) -> None:
        verdict = report.verdict
        log.info("%s: %s/%s %s", request.nonce, verdict.status, verdict.reason, verdict.message)
        untouched = request.ref is None and request.cancel is None
        self._publisher.publish(report.result, claim, untouched=untouched)
        if request.manifest is not None and verdict.status in (Status.PASSED, Status.REJECTED):
            self._store.note_duration(request.nonce, request.manifest.preset, report.seconds)
        if verdict.reason is Reason.REPLAYED:
            self._store.back_off(request.nonce, "it was answered before")

    def _poll_with_deadline(self, request: Request, started: float) -> str | None:
        with self._cache.deadline():
            return self._poll_cancels(request, started)

    def _poll_cancels(self, request: Request, started: float) -> str | None:
        """Whether the running job shall stop; cancelled requests that wait are answered as well."""
        reason, others = self._cancels.poll(request)
        if reason is not None:
            return reason
        preset = "" if request.manifest is None else request.manifest.preset
        self._register(
            State.BUSY, Work(nonce=request.nonce, preset=preset, elapsed_s=self._clock() - started)
        )
        if due := others - self._publisher.waiting():
            waiting = [each for each in self._queue.poll(due) if each.nonce in due]
            self._done += sum(self._try(each, only_cancelled=True) for each in waiting[:MAX_CANCELLED])
        return None

    def _safe_tick(self) -> bool:
        """`tick`; a daemon outlives its own bugs and a remote that is away, with growing pauses."""
        try:
            handled = self._cache.recover(self.tick)
        except Exception as error:
            if isinstance(error, AccessDenied) and not self._reached:
                raise  # the person who has just started it can correct that
            self._failures += 1
            self._failure = describe(error)
            log.error("failure %d in a row, retrying: %s", self._failures, self._failure)
            return False
        self._failures, self._failure = 0, None
        if handled:
            self._active_at = self._clock()
        return handled

    def _policy_is_valid(self) -> bool:
        """Read the owner's files again if they changed; False: they are wrong, and no request is handled."""
        policy = self._config.rulebook
        if policy.refresh():
            self._store.release_deferred()
            if policy.fault is None:
                log.info("the policy was read again; %s", policy.summary())
            else:
                log.error("no request is handled until the policy is corrected: %s", policy.fault.message)
        return policy.fault is None

    def _between_jobs(self, *, idle: bool) -> None:
        """Register, and prune a batch if it is time. What fails is logged and tried later."""
        fault = self._config.rulebook.fault
        self._note(state=State.IDLE, job=None, failure=self._failure or (fault and fault.message))
        if self._failures:
            return
        if idle:
            self._register(State.IDLE)
        if self._prune_at is None or self._busy or self._clock() < self._prune_at:
            return
        pause = PRUNE_EVERY_S * random.uniform(0.75, 1.25)  # noqa: S311 - spreads the work
        try:
            if self._prune():
                pause = PRUNE_AGAIN_S
        except Exception as error:  # a daemon outlives its own bugs
            log.warning("old results are not pruned: %s", describe(error))
        self._prune_at = self._clock() + pause

    def _drains(self) -> bool:
        """Whether the owner had this runner take nothing new; a change is told at once."""
        before, self._draining = self._draining, is_draining(self._config.folder)
        if self._draining != before:
            log.info("draining: nothing new is taken" if self._draining else "requests are taken again")
            self._registrar.renew()
        return self._draining

    def _note(self, **changes: Any) -> None:
        """Tell other programs of this machine what this runner does."""
        if self._status is None or (status := self._status.model_copy(update=changes)) == self._noted:
            return
        self._status = status
        try:
            keep_status(self._config.folder, status)
            self._noted = status
        except OSError as error:  # a hint: the jobs go on
            log.warning("cannot write %s: %s", self._config.folder / STATUS, error.strerror)

    def _register(self, state: State, work: Work | None = None) -> None:
        self._drains()
        self._registrar.tell(state, work, pending=len(self._queue), done=self._done)

    def _prune(self) -> bool:
        """Prune one batch. Return whether there is more."""
        self._store.forget_old(self._now())
        done = prune(self._cache, now=self._now(), limit=PRUNE_BATCH)
        if done.archived:
            log.info("%d finished request(s) archived", len(done.archived))
        if done.refused is not None:
            log.warning("the server does not delete what was archived: %s", done.refused)
            return False
        if not done.remaining:
            remove_old_registrations(self._cache, older_than=DEFAULT_OLDER_THAN, now=self._now())
        return done.remaining > 0

    def _pause(self) -> float:
        """Seconds until the next look."""
        if self._failures:
            return min(self._idle_s * 2.0 ** min(self._failures - 1, 8), MAX_BACKOFF_S)
        quiet, fast_s = self._clock() - self._active_at, self._config.timing.fast_s
        if self._busy or fast_s is None:
            return self._idle_s
        if self._lost_claims:
            return random.uniform(0.0, 0.05)  # noqa: S311 - spreads the looks of runners that wait for each other
        if self._queue.claimed:  # other runners work: their looks cost the remote as much as ours
            return min(self._idle_s, max(fast_s, random.uniform(*SHARED_S)))  # noqa: S311 - spreads the looks
        if quiet < SLOWER_S:
            return fast_s
        return min(self._idle_s, max(0.1, (quiet - FAST_WINDOW_S) / 4))


@contextlib.contextmanager
def hold_name(config: RunnerConfig) -> Iterator[None]:
    """Hold a runner's name on this machine, or raise `NameInUse`; what a killed process left is removed."""
    with (config.folder / "lock").open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"a runner named {config.identity.name} already runs on this machine"
            raise NameInUse(message, "stop it, or start this one with another --name") from None
        try:
            for folder in (config.temporary, config.jobs):
                remove_tree(folder)
                folder.mkdir(exist_ok=True, mode=0o700)
            yield
        finally:  # closing would not do: a child that is just being born has the descriptor, too
            fcntl.flock(handle, fcntl.LOCK_UN)
