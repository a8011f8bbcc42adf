"""The job on the Mac: admit one request by this machine's policy, run it, write the signed result.

GitHub gave the run to this machine, so there is no claim on the bus; everything else is the daemon's: the
same admission, the same job. A refusal and a cancelled run are results, too. A result that was signed here
before is written again when its run is repeated, and its job does not run twice.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from threading import Event

from bridge.bus.claims import Heartbeat
from bridge.bus.state import state_of
from bridge.errors import BusError, MachineError
from bridge.git.cache import GitCache
from bridge.github.artifact import Artifact, require_empty, write_artifact
from bridge.github.dispatch import RequestRef
from bridge.github.workflow import (
    LEFT_ALONE,
    TRANSPORT,
    WorkflowLog,
    is_answered,
    list_request,
    load_request,
)
from bridge.protocol.result import Phase, Reason, Status
from bridge.runner.admission import Admission, find_signer
from bridge.runner.child import MachineBusy, Supervisor
from bridge.runner.config import RunnerConfig, host_name
from bridge.runner.daemon import NameInUse, hold_name
from bridge.runner.job import Job, JobReport
from bridge.runner.lease import CancelMonitor, HeartbeatThread
from bridge.runner.request import Decision, NotNow, Refused, Request
from bridge.runner.store import Store
from bridge.runner.verdict import cancelled

log = logging.getLogger(__name__)

CANCELLED = "the workflow run was cancelled"
_KEPT_RESULTS = 32
_POLL_S = 1.0
_NAME_SUFFIX = "-actions"  # a daemon may run on the same machine under the host's name
_MAX_NAME = 64


def runner_name() -> str:
    """The default name of a machine's workflow runner: the host's with ``-actions``."""
    return host_name()[: _MAX_NAME - len(_NAME_SUFFIX)] + _NAME_SUFFIX


class WorkflowExecutor:
    """Executes requests of workflow runs on one machine; `stop` is set when the run is cancelled."""

    def __init__(
        self,
        config: RunnerConfig,
        output: WorkflowLog,
        stop: Event,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._config = config
        self._output = output
        self._stop = stop
        self._clock = clock
        self._now = now
        self._cache = GitCache(config.folder / f"remote-{config.tag}.git", config.remote)
        # Not the daemon's, which publishes what is kept there.
        self._store = Store(config.folder / f"workflow-{config.tag}.sqlite")
        self._admission = Admission(config, self._cache, self._store, now=now)
        self._cancels = CancelMonitor(config, self._cache)

    def execute(self, ref: RequestRef, out: Path, *, attempt: int) -> Artifact | None:
        """Execute one request; None: it is for a daemon.

        Args:
            ref: The request.
            out: Folder for the result; must be empty or missing.
            attempt: Which attempt of the workflow run this is, from 1.

        Raises:
            MachineError: `out` holds something, or this machine lacks something; there is no result.
            BusError: The request cannot be fetched; there is no result.
        """
        require_empty(out)
        with self._only_one():
            request = load_request(self._cache, ref)
            if request.manifest is not None and request.manifest.transport != TRANSPORT:
                log.info(LEFT_ALONE)
                return None
            result = self._store.result(ref.nonce)
            if result is not None and result.request_commit == ref.commit:
                log.info("this request was executed here before; writing its signed result again")
            else:
                report = self._answer(request, attempt)
                self._keep(report)
                result = report.result
            artifact = write_artifact(result, out)
            verdict = artifact.verdict
            log.info("%s/%s %s", verdict.status, verdict.reason, verdict.message)
            return artifact

    def _answer(self, request: Request, attempt: int) -> JobReport:
        """Ask the daemon's questions and, if none of them refuses, run the job."""
        find_signer(request, self._config, self._now())
        found = list_request(self._cache, request)
        if is_answered(self._cache, state_of(found, request.nonce)):
            self._store.answer(request.nonce)
        decision, supervisor, reason = self._wait_until_admitted(request, found)
        with contextlib.ExitStack() as stack:
            if supervisor is not None:
                stack.enter_context(supervisor)
            job = Job(self._config, self._cache, request, decision, attempt, clock=self._clock, now=self._now)
            stack.callback(job.clean_up)
            report = job.cancel(reason) if reason else self._run(job, request, supervisor, attempt)
        if isinstance(decision, Refused) and decision.key is not None:
            log.info("by %s", self._config.policy.setting(decision.key))
        return report

    def _wait_until_admitted(
        self, request: Request, found: Mapping[str, str]
    ) -> tuple[Decision, Supervisor | None, str | None]:
        """Wait for the owner's hours and for the machine.

        Returns:
            The decision, the supervisor of a job that may run, and why the request is cancelled.
        """
        logged, decision = "", self._admission.check(request, found)
        reason = None if isinstance(_settled(decision), Refused) else self._cancels.poll(request)[0]
        look_at = self._clock() + self._config.timing.cancel_s
        while True:
            # GitHub gave the run to this machine, so what only another one would do is refused.
            if reason is not None or isinstance(_settled(decision), Refused):
                return _settled(decision), None, reason
            if isinstance(decision, NotNow):
                why = f"not now: {decision.reason}"
            else:
                try:
                    return decision, Supervisor(self._config.lock), None
                except MachineBusy as busy:
                    why = f"waiting: {busy.message}"
            if why != logged:
                log.info(why)
                logged = why
            if self._stop.wait(_POLL_S):
                reason = CANCELLED
            elif self._clock() >= look_at:
                look_at = self._clock() + self._config.timing.cancel_s
                # The remote may be away for a while.
                with contextlib.suppress(BusError, MachineError, OSError):
                    reason = self._cancels.poll(request)[0]
                    decision = self._admission.check(request, found)

    def _run(self, job: Job, request: Request, supervisor: Supervisor | None, attempt: int) -> JobReport:
        heartbeat = HeartbeatThread(
            _WorkflowLease(attempt),
            interval_s=self._config.timing.heartbeat_s,
            secrets=job.secrets,
            poll=lambda: self._cancels.poll(request)[0],
            poll_s=self._config.timing.cancel_s,
            show=self._output.show,
            clock=self._clock,
        )
        report = job.run(
            heartbeat,
            supervisor,
            abort=self._stop.is_set,
            aborted=cancelled(Reason.REQUESTED, CANCELLED),
        )
        if report is None:
            raise ValueError("a workflow run's lease cannot be lost")
        return report

    def _keep(self, report: JobReport) -> None:
        """Keep a result for a repeated run, except a cancelled one, whose request may still be run."""
        verdict, nonce = report.verdict, report.result.nonce
        if verdict.status is Status.CANCELLED or verdict.reason is Reason.REPLAYED:
            return
        try:
            self._store.answer(nonce)
            self._store.keep(report.result)
            for old in self._store.unpublished()[:-_KEPT_RESULTS]:
                self._store.drop_result(old)
            self._store.forget_old(self._now())
        except MachineError as error:
            log.warning("cannot keep the result for a repeated run: %s", error.message)

    @contextlib.contextmanager
    def _only_one(self) -> Iterator[None]:
        """Wait until no other process has this runner's name, and hold it."""
        with contextlib.ExitStack() as stack:
            logged = False
            while True:
                try:
                    stack.enter_context(hold_name(self._config))
                    break
                except NameInUse as error:
                    if self._stop.is_set():
                        raise
                    if not logged:
                        log.info("waiting: %s", error.message)
                    logged = True
                self._stop.wait(_POLL_S)
            yield


class _WorkflowLease:
    """A workflow run's lease of its request, which cannot be lost; each new phase is a line of the log."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self._phase: Phase | None = None

    def renew(self, beat: Heartbeat) -> None:
        if beat.phase is not self._phase:
            self._phase = beat.phase
            log.info("%s (%.1f s)", beat.phase, beat.elapsed_s)


def _settled(decision: Decision | NotNow) -> Decision:
    """A decision as it is when there is no more waiting."""
    return decision.decision if isinstance(decision, NotNow) else decision
