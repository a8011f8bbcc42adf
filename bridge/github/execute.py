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
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Event

from bridge.bus.claims import Heartbeat
from bridge.bus.requests import has_result, state_of
from bridge.errors import BusError, MachineError
from bridge.git.cache import GitCache
from bridge.github.dispatch import RequestRef
from bridge.github.workflow import (
    Artifact,
    list_request,
    load_request,
    require_empty,
    without_commands,
    write_artifact,
)
from bridge.protocol.result import Phase, Reason, Status
from bridge.runner.admission import Admission, Decision, NotNow, Refused, Request, find_signer
from bridge.runner.child import MachineBusy, Supervisor
from bridge.runner.config import RunnerConfig, host_name
from bridge.runner.daemon import NameInUse, hold_name
from bridge.runner.job import Job, JobReport
from bridge.runner.lease import CancelMonitor, HeartbeatThread
from bridge.runner.store import Store
from bridge.runner.verdict import cancelled

log = logging.getLogger(__name__)

_CANCELLED = "the workflow run was cancelled"
_KEPT_RESULTS = 32
_POLL_S = 1.0
_NAME_POLL_S = 5.0
_NAME_SUFFIX = "-actions"  # a daemon may run on the same machine under the host's name
_MAX_NAME = 64


def runner_name() -> str:
    """The default name of a machine's workflow runner: the host's with ``-actions``."""
    return host_name()[: _MAX_NAME - len(_NAME_SUFFIX)] + _NAME_SUFFIX


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

    def execute(self, ref: RequestRef, out: Path, *, attempt: int) -> Artifact | None:
        """Execute one request into the folder `out`; None: a runner's daemon takes it.

        Raises:
            MachineError: `out` holds something, or this machine lacks something; there is no result.
            BusError: The request cannot be fetched; there is no result.
        """
        require_empty(out)
        with self._hold_name():
            request = load_request(self._cache, ref)
            if request is None:
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

    @contextlib.contextmanager
    def _hold_name(self) -> Iterator[None]:
        """Wait until no other process has this runner's name, and hold it."""
        with contextlib.ExitStack() as held:
            while True:
                try:
                    held.enter_context(hold_name(self._config))
                    break
                except NameInUse as error:
                    log.info("waiting: %s", error.message)
                    if self._stop.wait(_NAME_POLL_S):
                        raise
            yield

    def _answer(self, request: Request, attempt: int) -> JobReport:
        """Ask the daemon's questions and, if none of them refuses, run the job."""
        find_signer(request, self._config, _now())
        found = list_request(self._cache, request)
        if self._is_answered(request, found):
            self._store.answer(request.nonce)
        decision, supervisor, reason = self._wait_until_admitted(request, found)
        with contextlib.ExitStack() as stack:
            if supervisor is not None:
                stack.enter_context(supervisor)
            job = Job(self._config, self._cache, request, decision, attempt)
            stack.callback(job.clean_up)
            report = job.cancel(reason) if reason else self._run(job, request, supervisor)
        if isinstance(decision, Refused) and decision.key is not None:
            log.info("by %s", self._config.policy.setting(decision.key))
        return report

    def _is_answered(self, request: Request, found: Mapping[str, str]) -> bool:
        state = state_of(found, request.nonce)
        tips = {branch.ref: branch.commit for branch in state.branches}
        failures = self._cache.bring(tips, list(tips))
        here = [tip for ref, tip in tips.items() if ref not in failures]
        return state.result is not None or any(has_result(self._cache, tip, request.nonce) for tip in here)

    def _wait_until_admitted(
        self, request: Request, found: Mapping[str, str]
    ) -> tuple[Decision, Supervisor | None, str | None]:
        """Wait for the owner's hours and for the machine.

        Returns:
            The decision, the supervisor of a job that may run, and why the request is cancelled.
        """
        logged, decision = "", self._admission.check(request, found)
        reason = None if isinstance(_settled(decision), Refused) else self._cancels.poll(request)[0]
        look_at = time.monotonic() + self._config.timing.cancel_s
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
                reason = _CANCELLED
            elif time.monotonic() >= look_at:
                look_at = time.monotonic() + self._config.timing.cancel_s
                # The remote may be away for a while.
                with contextlib.suppress(BusError, MachineError, OSError):
                    reason = self._cancels.poll(request)[0]
                    decision = self._admission.check(request, found)

    def _run(self, job: Job, request: Request, supervisor: Supervisor | None) -> JobReport:
        heartbeat = HeartbeatThread(
            _WorkflowLease(),
            interval_s=self._config.timing.heartbeat_s,
            secrets=job.secrets,
            poll=lambda: self._cancels.poll(request)[0],
            poll_s=self._config.timing.cancel_s,
            show=lambda line: self._echo(f"| {without_commands(line)}"),
        )
        aborted = cancelled(Reason.REQUESTED, _CANCELLED)
        report = job.run(heartbeat, supervisor, abort=self._stop.is_set, aborted=aborted)
        if report is None:
            raise ValueError("a workflow run's lease cannot be lost")
        return report

    def _keep(self, report: JobReport) -> None:
        """Keep a result for a repeated run, except a cancelled one, whose request may still be run."""
        verdict = report.verdict
        if verdict.status is Status.CANCELLED or verdict.reason is Reason.REPLAYED:
            return
        try:
            self._store.answer(report.result.nonce)
            self._store.keep(report.result)
            for old in self._store.unpublished()[:-_KEPT_RESULTS]:
                self._store.drop_result(old)
            self._store.forget_old(_now())
        except MachineError as error:
            log.warning("cannot keep the result for a repeated run: %s", error.message)


@dataclass
class _WorkflowLease:
    """A workflow run's lease of its request, which cannot be lost; each new phase is a line of the log."""

    phase: Phase | None = None

    def renew(self, beat: Heartbeat) -> None:
        if beat.phase is not self.phase:
            self.phase = beat.phase
            log.info("%s (%.1f s)", beat.phase, beat.elapsed_s)


def _settled(decision: Decision | NotNow) -> Decision:
    """A decision as it is when there is no more waiting."""
    return decision.decision if isinstance(decision, NotNow) else decision


def _now() -> datetime:
    return datetime.now(UTC)
