"""The job on the Mac: admit one request by this machine's policy, run it, write the signed result."""

from __future__ import annotations

import contextlib
import logging
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
from bridge.protocol.result import Phase, Reason, Status
from bridge.runner.admission import Admission, Decision, NotNow, Refusal, Request, find_signer
from bridge.runner.child import MachineBusy, Supervisor
from bridge.runner.config import RunnerConfig, host_name
from bridge.runner.daemon import NameInUse, hold_name
from bridge.runner.job import Job, JobReport, make_verdict
from bridge.runner.lease import CancelMonitor, HeartbeatThread
from bridge.runner.store import Store

log = logging.getLogger(__name__)

_now = partial(datetime.now, UTC)
_CANCELLED = "the workflow run was cancelled"
_KEPT_RESULTS = 32
_POLL_S = 1.0


def runner_name() -> str:
    """The default name of a machine's workflow runner; a daemon may run there under the host's name."""
    return f"{host_name()[:56]}-actions"


class WorkflowExecutor:
    """Executes requests of workflow runs on one machine.

    `echo` takes the lines of a job's output; `stop` is set when the run is cancelled.
    """

    def __init__(self, config: RunnerConfig, echo: Callable[[str], None], stop: Event) -> None:
        self._config, self._echo, self._stop = config, echo, stop
        self._cache = GitCache(config.folder / f"remote-{config.tag}.git", config.remote)
        # Not the daemon's, which publishes what is kept there.
        self._store = Store(config.folder / f"workflow-{config.tag}.sqlite")
        self._admission = Admission(config, self._cache, self._store, now=_now)
        self._cancels = CancelMonitor(config, self._cache)

    def execute(self, ref: RequestRef, out: Path, *, attempt: int) -> workflow.Artifact | None:
        """Execute one request into the folder `out`; None: a runner's daemon takes it."""
        workflow.require_empty(out)
        with contextlib.ExitStack() as held:
            while True:  # until no other process has this runner's name
                try:
                    held.enter_context(hold_name(self._config))
                    break
                except NameInUse as error:
                    log.info("waiting: %s", error.message)
                    if self._stop.wait(_POLL_S):
                        raise
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

    def _answer(self, request: Request, attempt: int) -> ResultFiles:
        """Ask the daemon's questions and, if none of them refuses, run the job."""
        find_signer(request, self._config, _now())
        found = workflow.list_request(self._cache, request)
        state = state_of(found, request.nonce)
        tips = {branch.ref: branch.commit for branch in state.branches}
        here = tips.keys() - self._cache.bring(tips, list(tips)).keys()
        if state.result or any(has_result(self._cache, tips[ref], request.nonce) for ref in here):
            self._store.answer(request.nonce)
        decision, supervisor, reason = self._wait_until_admitted(request, found)
        with contextlib.ExitStack() as stack:
            if supervisor is not None:
                stack.enter_context(supervisor)
            job = Job(self._config, self._cache, request, decision, attempt)
            stack.callback(job.clean_up)
            report = job.cancel(reason) if reason else self._run(job, request, supervisor)
        if isinstance(decision, Refusal) and decision.key is not None:
            log.info("by %s", self._config.policy.setting(decision.key))
        # For a repeated run; what was cancelled may still be run.
        if report.verdict.status is not Status.CANCELLED and report.verdict.reason is not Reason.REPLAYED:
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
    ) -> tuple[Decision, Supervisor | None, str | None]:
        """Wait for the owner's hours and the machine: the decision, a supervisor, why it is cancelled."""
        logged, reason = "", None
        while True:
            decision = self._admission.check(request, found)
            # GitHub gave the run to this machine, so what only another one would do is refused.
            settled = decision.decision if isinstance(decision, NotNow) else decision
            if isinstance(settled, Refusal):
                return settled, None, None
            with contextlib.suppress(BusError):  # the remote may be away for a while
                reason = self._cancels.poll(request)[0]
            if reason is not None:
                return settled, None, reason
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
            if self._stop.wait(self._config.timing.cancel_s):
                return settled, None, _CANCELLED

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
            poll=lambda: self._cancels.poll(request)[0],
            poll_s=self._config.timing.cancel_s,
            show=lambda line: self._echo(f"| {workflow.without_commands(line)}"),
        )
        aborted = make_verdict(Reason.REQUESTED, _CANCELLED)
        report = job.run(heartbeat, supervisor, abort=self._stop.is_set, aborted=aborted)
        assert report is not None  # noqa: S101 - only a lost lease gives none
        return report
