"""The job on the Mac: admit one request by this machine's policy, run it, write the signed result."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Event

from bridge.bus.claims import Heartbeat
from bridge.bus.publish import ResultFiles
from bridge.bus.requests import has_result, state_of
from bridge.errors import BusError, MachineError
from bridge.git.cache import GitCache
from bridge.github import workflow
from bridge.github.dispatch import RequestRef
from bridge.protocol.result import Phase, Reason, Status, Verdict
from bridge.runner.admission import Admission, Decision, NotNow, Refusal, Request, find_signer
from bridge.runner.child import MachineBusy, Supervisor
from bridge.runner.config import RunnerConfig, host_name
from bridge.runner.daemon import NameInUse, hold_name
from bridge.runner.job import Job, JobReport, make_verdict
from bridge.runner.lease import CancelMonitor, HeartbeatThread
from bridge.runner.store import Store

log = logging.getLogger(__name__)

_now = partial(datetime.now, UTC)
_KEPT_RESULTS = 32
_POLL_S = 1.0
# Before the workflow job's time limit, so that its result can still be signed and uploaded.
_MARGIN_S = 120.0


def runner_name() -> str:
    """The default name of a machine's workflow runner; a daemon may run there under the host's name."""
    return f"{host_name()[:56]}-actions"


class WorkflowExecutor:
    """Executes requests of workflow runs on one machine.

    `echo` takes the lines of a job's output; `stop` is set when the run is cancelled. `limit_s` is the time
    limit of the workflow job, which begins about now; None: it has none.
    """

    def __init__(
        self,
        config: RunnerConfig,
        echo: Callable[[str], None],
        stop: Event,
        *,
        limit_s: float | None = None,
    ) -> None:
        self._config, self._echo, self._stop = config, echo, stop
        self._limit_s = math.inf if limit_s is None else limit_s
        self._deadline = time.monotonic() + self._limit_s - min(_MARGIN_S, self._limit_s / 10)
        self._cache = GitCache(config.folder / f"remote-{config.tag}.git", config.remote)
        # Not the daemon's, which publishes what is kept there.
        self._store = Store(config.folder / f"workflow-{config.tag}.sqlite")
        self._admission = Admission(config, self._cache, self._store, now=_now)
        self._cancels = CancelMonitor(config, self._cache)
        self._logged = ""

    def execute(self, ref: RequestRef, out: Path, *, attempt: int) -> workflow.Artifact | None:
        """Execute one request into the folder `out`; None: a runner's daemon takes it."""
        workflow.require_empty(out)
        with contextlib.ExitStack() as held:
            self._wait_for_name(held)
            request = workflow.load_request(self._cache, ref)
            if request is None:
                return None
            result = self._store.result(ref.nonce)
            if result is not None and result.request_commit == ref.commit:  # its run is repeated
                log.info("this request was executed here before; writing its signed result again")
            else:
                result = self._answer(request, attempt)
            artifact = workflow.write_artifact(result, out)
            verdict = artifact.verdict
            log.info("%s/%s %s", verdict.status, verdict.reason, verdict.message)
            return artifact

    def _wait_for_name(self, held: contextlib.ExitStack) -> None:
        """Hold this runner's name once no other process has it, or until the request has to end."""
        while self._end_verdict(started=False) is None:
            try:
                held.enter_context(hold_name(self._config))
            except NameInUse as error:
                self._log_wait(error.message)
                self._wait(_POLL_S)
            else:
                return

    def _end_verdict(self, *, started: bool) -> Verdict | None:
        """Why the request has to end now, `started` or not; None: it may go on."""
        if self._stop.is_set():
            what = "" if started else "; it had not been started"
            return make_verdict(Reason.REQUESTED, f"the workflow run was cancelled{what}")
        if time.monotonic() < self._deadline:
            return None
        limit = f"the workflow job's time limit of {self._limit_s / 60:g} min (KAKEYA_RUN_MINUTES)"
        if started:
            return make_verdict(Reason.TIMEOUT, f"the job was stopped shortly before {limit}")
        return make_verdict(
            Reason.NO_RUNNER, f"the machine was busy until shortly before {limit}; nothing ran"
        )

    def _log_wait(self, why: str) -> None:
        """Log what is waited for, once."""
        if why != self._logged:
            log.info("waiting: %s", why)
            self._logged = why

    def _wait(self, seconds: float) -> None:
        """Wait for some seconds, or until the request has to end."""
        self._stop.wait(max(0.0, min(seconds, self._deadline - time.monotonic())))

    def _answer(self, request: Request, attempt: int) -> ResultFiles:
        """Ask the daemon's questions and, if none of them refuses, run the job."""
        find_signer(request, self._config, _now())
        found = workflow.list_request(self._cache, request)
        state = state_of(found, request.nonce)
        tips = {branch.ref: branch.commit for branch in state.branches}
        here = tips.keys() - self._cache.bring(tips, list(tips)).keys()
        if state.result or any(has_result(self._cache, tips[ref], request.nonce) for ref in here):
            self._store.answer(request.nonce)
        decision, supervisor, ended = self._wait_until_admitted(request, found)
        with contextlib.ExitStack() as stack:
            if supervisor is not None:
                stack.enter_context(supervisor)
            job = Job(self._config, self._cache, request, decision, attempt)
            stack.callback(job.clean_up)
            report = job.end(ended) if ended else self._run(job, request, supervisor)
        if isinstance(decision, Refusal) and decision.key is not None:
            log.info("by %s", self._config.policy.setting(decision.key))
        # For a repeated run; what was cancelled or found no machine may still be run.
        not_run = report.verdict.status in (Status.CANCELLED, Status.LOST)
        if not not_run and report.verdict.reason is not Reason.REPLAYED:
            self._keep(report.result)
        return report.result

    def _keep(self, result: ResultFiles) -> None:
        try:
            self._store.answer(result.nonce)
            self._store.keep(result)
            for old in self._store.unpublished()[:-_KEPT_RESULTS]:
                self._store.drop_result(old)
            self._store.forget_old(_now())
        except MachineError as error:
            log.warning("cannot keep the result for a repeated run: %s", error.message)

    def _wait_until_admitted(
        self, request: Request, found: Mapping[str, str]
    ) -> tuple[Decision, Supervisor | None, Verdict | None]:
        """Wait for the machine: the decision, a supervisor, why the request ends without being started."""
        while True:
            decision = self._admission.check(request, found)
            # GitHub gave the run to this machine, now: what another machine or hour would take is refused.
            decision = decision.refusal if isinstance(decision, NotNow) else decision
            if isinstance(decision, Refusal):
                return decision, None, None
            ended = self._end_verdict(started=False)
            with contextlib.suppress(BusError):  # the remote may be away for a while
                if (reason := self._poll_cancel(request)) is not None:
                    ended = make_verdict(Reason.REQUESTED, f"{reason}; it had not been started")
            if ended is not None:
                return decision, None, ended
            try:
                return decision, Supervisor(self._config.lock), None
            except MachineBusy as busy:
                self._log_wait(busy.message)
            self._wait(self._config.timing.cancel_s)

    def _poll_cancel(self, request: Request) -> str | None:
        with self._cache.deadline():  # a remote that hangs must not outlast the margin
            return self._cancels.poll(request)[0]

    def _run(self, job: Job, request: Request, supervisor: Supervisor | None) -> JobReport:
        phase: Phase | None = None

        def renew(beat: Heartbeat) -> None:  # GitHub's lease cannot be lost; a new phase is a line of the log
            nonlocal phase
            if beat.phase is not phase:
                phase = beat.phase
                log.info("%s (%.1f s)", phase, beat.elapsed_s)

        heartbeat = HeartbeatThread(
            renew,
            interval_s=1.0,
            secrets=job.secrets,
            poll=lambda: self._poll_cancel(request),
            poll_s=self._config.timing.cancel_s,
            show=lambda line: self._echo(f"| {workflow.without_commands(line)}"),
        )
        report = job.run(heartbeat, supervisor, abort=lambda: self._end_verdict(started=True))
        assert report is not None  # noqa: S101 - only a lost lease gives none
        return report
