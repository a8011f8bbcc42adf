"""The runner's loop: poll, admit, claim, run and publish, one request at a time, until told to stop.

A remote that is away costs nothing but waiting: results are kept in the store and pushed when it is back.
What goes wrong with one request counts against it alone, because anyone with push rights can provoke it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from bridge.bus.archive import DEFAULT_OLDER_THAN, prune
from bridge.bus.claims import Claim
from bridge.bus.registry import remove_old_registrations
from bridge.errors import AccessDenied, BusError, MachineError, RemoteUnreachable, describe
from bridge.git.cache import GitCache
from bridge.protocol.result import Reason, Status
from bridge.protocol.runner_info import State, Work
from bridge.runner.admission import Admission, Admitted, Decision, NotNow, Refused, Request
from bridge.runner.child import MachineBusy, Supervisor
from bridge.runner.config import RunnerConfig
from bridge.runner.job import Job, JobReport
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
# Claims that one look may lose to other runners before the next look.
MAX_LOST_CLAIMS = 2
# Pauses while other runners have claims.
SHARED_S = (0.2, 0.6)
MAX_BACKOFF_S = 60.0
# Pruning, a batch between two jobs.
PRUNE_EVERY_S = 6 * 3600.0
PRUNE_FIRST_S = 600.0
PRUNE_AGAIN_S = 20.0
PRUNE_BATCH = 100
# Cancelled requests that are answered in one look while a job runs: each costs a few pushes.
MAX_CANCELLED = 5


class NameInUse(MachineError):
    """Another process of this machine runs under the runner's name."""


class Daemon:
    """One embedded runner on one remote.

    `idle_s` is the longest pause between two looks at an idle queue; None: by the kind of remote. With
    `prunes` old results are retired between jobs. `clock` gives monotonic seconds, `now` the time of day
    (aware).
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
        self._config = config
        self._idle_s = idle_s or config.timing.poll_s
        self._clock = clock
        self._now = now
        self._cache = cache = GitCache(config.folder / f"remote-{config.tag}.git", config.remote)
        self._store = store = Store(
            config.folder / f"store-{config.tag}.sqlite", clock=lambda: now().timestamp()
        )
        # Claims of earlier processes of this runner are ours, because it holds its name while it serves.
        sessions = store.add_session(config.identity.session)
        store.release_deferred()  # the owner may have changed the policy meanwhile
        self._queue = Queue(config, cache, store, clock=clock, now=now)
        self._admission = Admission(config, cache, store, now=now)
        self._leases = Leases(config, cache, store, sessions=sessions, clock=clock)
        self._cancels = CancelMonitor(config, cache)
        self._publisher = Publisher(config, cache, store, sessions=sessions)
        every_s = config.timing.registration_s
        self._registrar = Registrar(config, cache, store, interval_s=every_s, clock=clock, now=now)
        self._prune_at = clock() + random.uniform(PRUNE_FIRST_S / 2, PRUNE_FIRST_S) if prunes else None  # noqa: S311 - spreads the work
        self._abort = threading.Event()
        self._active_at = clock()
        self._failures = 0  # looks in a row
        self._reached = False  # the remote, once
        self._busy_machine = self._was_busy = False  # another runner's job has it, in this look and the last
        self._lost_claims = 0  # in this look
        self._done = 0

    def abort(self) -> None:
        """Stop the running job, too; it ends as ``cancelled/shutdown``. Set `stop` of `serve` as well."""
        self._abort.set()

    def serve(
        self, *, once: bool = False, stop: threading.Event | None = None, idle_timeout_s: float | None = None
    ) -> int:
        """Serve requests until `stop` is set; the running job is finished first (see `abort`).

        With `once`, only until one was answered, or for `idle_timeout_s` seconds without one.

        Returns:
            How many requests were answered.

        Raises:
            NameInUse: Another runner of this name runs on this machine.
            AccessDenied: The remote refused the credentials at the first look; later that is retried.
        """
        stop = stop or threading.Event()
        self._done = 0
        with hold_name(self._config):
            began = self._clock()
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
                self._registrar.stopped(done=self._done)
                self._cache.close()
        return self._done

    def tick(self) -> bool:
        """Handle at most one request. Return whether one was handled."""
        requests, self._lost_claims = self._queue.poll(), 0
        self._was_busy, self._busy_machine = self._busy_machine, False
        self._reached = True
        self._publisher.flush(self._queue.found)
        if not self._policy_is_valid():
            return False
        waiting = self._publisher.waiting()
        for request in requests:
            if request.nonce not in waiting and self._try(request):
                return True
            if self._lost_claims == MAX_LOST_CLAIMS:
                break  # other runners were faster: what else was seen is old, too
        return False

    def _try(self, request: Request, *, only_cancelled: bool = False) -> bool:
        """`_consider` a request; what goes wrong with it defers it, and longer each time."""
        try:
            handled = self._consider(request, only_cancelled)
        except RemoteUnreachable:
            raise
        except Exception as error:  # whatever this request provokes, the next one must be served
            if type(error) is BusError:  # git failed on this side: the copy here may be broken
                self._cache.repair()
            self._queue.note_turn(request)
            self._store.back_off(request.nonce, describe(error))
            return False
        if handled:
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
            decision = decision.decision
        return self._handle(request, decision, cancelled)

    def _handle(self, request: Request, decision: Decision, cancelled: str | None) -> bool:
        """Claim, run and publish one request. Return whether it was ours."""
        admitted = isinstance(decision, Admitted)
        runs = admitted and cancelled is None and self._leases.next_attempt(request) <= MAX_ATTEMPTS
        with contextlib.ExitStack() as stack:
            supervisor = self._supervise() if runs else None
            if supervisor is not None:
                stack.callback(supervisor.close)
            elif runs:
                return False  # another job has the machine
            held = self._leases.claim(request, admitted=admitted)
            self._queue.note_claim(request, won=held is not None)
            if held is None:
                self._lost_claims += 1
                return False
            claim, deleted, last = held
            log.info("%s: claimed, attempt %d", request.label, claim.attempt)
            # The published refusal does not show the value: lists hold the names of other requesters.
            if isinstance(decision, Refused) and decision.key is not None:
                log.info("%s: by %s", request.nonce, self._config.policy.setting(decision.key))
            try:
                if supervisor is not None:
                    supervisor.await_start()
                job = Job(self._config, self._cache, request, decision, claim.attempt, now=self._now)
            except Exception:  # as on a full disk
                claim.release()
                raise
            stack.callback(job.clean_up)
            report: JobReport | None
            if claim.attempt > MAX_ATTEMPTS:
                report = job.give_up(last)
            elif (reason := cancelled or deleted) is not None:
                report = job.cancel(reason)
            else:
                report = self._run(job, request, claim, supervisor)
            if report is None:
                log.warning("%s: the lease was lost, the job was stopped", request.nonce)
            else:
                self._publish(request, report, claim)
        return True

    def _supervise(self) -> Supervisor | None:
        """The machine's lock, with the process that runs the next job; None: another runner's job has it."""
        try:
            return Supervisor(self._config.lock)
        except MachineBusy as busy:
            if not self._was_busy and not self._busy_machine:
                log.info("waiting: %s", busy.message)
            self._busy_machine = True
            return None

    def _run(
        self, job: Job, request: Request, claim: Claim, supervisor: Supervisor | None
    ) -> JobReport | None:
        """What came of a claimed request; None: the lease was lost, so another runner gives the result."""
        if supervisor is not None:
            try:
                self._store.begin(request.nonce, claim.attempt)  # durable before anything runs
            except MachineError as error:
                said = "cannot persist the attempt count; after a restart the job may run once too often"
                log.error("%s: %s: %s", request.nonce, said, error.message)
        started, timing = self._clock(), self._config.timing
        heartbeat = HeartbeatThread(
            claim,
            interval_s=timing.heartbeat_s,
            secrets=job.secrets,
            poll=lambda: self._poll_cancels(request, started),
            poll_s=timing.cancel_s,
            tells_phases=timing.fast_s is not None,
            repair=self._cache.rebuild,
            clock=self._clock,
        )
        return job.run(heartbeat, supervisor, abort=self._abort.is_set)

    def _publish(self, request: Request, report: JobReport, claim: Claim) -> None:
        verdict = report.verdict
        log.info("%s: %s/%s %s", request.nonce, verdict.status, verdict.reason, verdict.message)
        if report.preset is not None and verdict.status in (Status.PASSED, Status.REJECTED):
            self._store.note_duration(request.nonce, report.preset, report.seconds)
        untouched = request.ref is None and request.cancel is None
        self._publisher.publish(report.result, claim, untouched=untouched)
        if verdict.reason is Reason.REPLAYED:
            self._store.back_off(request.nonce, "it was answered before")

    def _poll_cancels(self, request: Request, started: float) -> str | None:
        """Whether the running job shall stop; cancelled requests that wait are answered as well."""
        reason, others = self._cancels.poll(request)
        if reason is not None:
            return reason
        preset = "" if request.manifest is None else request.manifest.preset
        elapsed_s = self._clock() - started
        self._register(State.BUSY, Work(nonce=request.nonce, preset=preset, elapsed_s=elapsed_s))
        if others:
            due = others.keys() - self._publisher.waiting()
            waiting = [each for each in self._queue.poll(due) if each.nonce in due]
            self._done += sum(self._try(each, only_cancelled=True) for each in waiting[:MAX_CANCELLED])
        return None

    # Around the jobs --------------------------------------------------------------------------------------

    def _safe_tick(self) -> bool:
        """`tick`; a daemon outlives its own bugs and a remote that is away, with growing pauses."""
        try:
            handled = self._cache.recover(self.tick)
        except Exception as error:
            if isinstance(error, AccessDenied) and not self._reached:
                raise  # the person who has just started it can correct that
            self._failures += 1
            log.error("failure %d in a row, retrying: %s", self._failures, describe(error))
            return False
        self._failures = 0
        if handled:
            self._active_at = self._clock()
        return handled

    def _policy_is_valid(self) -> bool:
        """Read the owner's files again if they changed; False: they are wrong, and no request is handled."""
        policy = self._config.rulebook
        if policy.refresh():
            self._store.release_deferred()
            self._registrar.refresh()
            if policy.fault is None:
                log.info("the policy was read again; %s", policy.summary())
            else:
                log.error("no request is handled until the policy is corrected: %s", policy.fault.message)
        return policy.fault is None

    def _between_jobs(self, *, idle: bool) -> None:
        """Register, and prune a batch if it is time. What fails is logged and tried later."""
        if self._failures:
            return
        if idle:
            self._register(State.IDLE)
        if self._prune_at is None or self._busy_machine or self._clock() < self._prune_at:
            return
        pause = PRUNE_EVERY_S * random.uniform(0.75, 1.25)  # noqa: S311 - spreads the work
        try:
            if self._prune():
                pause = PRUNE_AGAIN_S
        except Exception as error:  # a daemon outlives its own bugs
            log.warning("old results are not pruned: %s", describe(error))
        self._prune_at = self._clock() + pause

    def _register(self, state: State, work: Work | None = None) -> None:
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
        if self._busy_machine or fast_s is None:
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
            handle.seek(0)
            process = handle.read().strip() or "unknown"
            message = (
                f"a runner named {config.identity.name} already runs on this machine (process {process})"
            )
            raise NameInUse(message, "stop it, or start this one with another --name") from None
        try:
            handle.truncate(0)
            handle.write(f"{os.getpid()}\n")
            handle.flush()
            for folder in (config.temporary, config.jobs):
                remove_tree(folder)
                folder.mkdir(exist_ok=True, mode=0o700)
            yield
        finally:  # closing would not do: a child that is just being born has the descriptor, too
            fcntl.flock(handle, fcntl.LOCK_UN)
