"""One request from claim to result: prepared, run, judged, signed. Every way out is a verdict.

What may run was settled by admission before the claim. A lease that is lost stops the job, and then there is
no result: another runner gives it. A failure of our own becomes ``failed/runner_error``, with its traceback
in the log only. What a job gets is made in `prepare`, how it ended is put into words in `verdict`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime

from bridge import __version__, presets
from bridge.bus.publish import ResultFiles
from bridge.errors import BridgeError, BusError, LeaseLost, describe
from bridge.evidence.gate import Binding
from bridge.git.cache import GitCache
from bridge.presets import Preset
from bridge.protocol.manifest import Manifest, ParamValue, format_time
from bridge.protocol.result import (
    Command,
    File,
    Phase,
    Reason,
    Result,
    RunnerFacts,
    RunStatus,
    Status,
    Verdict,
    Violation,
)
from bridge.runner.child import JobCommand, JobExit, Supervisor
from bridge.runner.config import RunnerConfig
from bridge.runner.lease import HeartbeatThread
from bridge.runner.machine import (
    Fact,
    find_sandbox,
    input_facts,
    keep_awake,
    memory_bytes,
    model_facts,
)
from bridge.runner.prepare import Preparation
from bridge.runner.request import Admitted, Decision, Refusal, Refused, Request
from bridge.runner.sandbox.base import (
    Enforcement,
    JobDirs,
    NoSandbox,
    Sandbox,
    allowed,
    environment,
    resource_limits,
)
from bridge.runner.verdict import cancelled, failed, judge, of_exit
from bridge.runner.workspace import ReportUnusable, read_report, remove_tree

log = logging.getLogger(__name__)

LOG_NAME = "log.txt"
SHUTDOWN = cancelled(Reason.SHUTDOWN, "the runner was told to stop")
# How long a result waits for space on the disk before it is built without what the job brought.
_SPACE_S, _POLL_S = 30.0, 0.5


@dataclass(frozen=True)
class JobReport:
    """What came of a request: the result to publish, how it ended, and how long it took.

    `preset` is the name of what it asked for; None: unknown.
    """

    result: ResultFiles
    verdict: Verdict
    preset: str | None
    seconds: float


@dataclass
class _Record:
    """What the result says of a job, gathered while it goes on."""

    started: datetime
    enforced: Enforcement | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    files: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    machine: dict[str, Fact] = field(default_factory=dict)


@dataclass
class Job:
    """One request that is ours, whatever admission decided about it; `cache` holds it and its workload.

    `attempt` counts from 1; `clock` gives monotonic seconds, `now` the time of day (aware).
    """

    config: RunnerConfig
    cache: GitCache
    request: Request
    decision: Decision
    attempt: int
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    _ran: bool = field(default=False, init=False)
    _survivors: int | None = field(default=None, init=False)  # None: no child ended

    def __post_init__(self) -> None:
        self._began_at = self.clock()
        self._record = _Record(self.now())
        self._dirs = JobDirs(self.config.jobs / self.request.nonce)
        self.secrets = self.config.secrets()
        # Has no name, so nothing the job does to files can put another file in its place.
        self._log = tempfile.TemporaryFile(dir=self.config.folder)  # noqa: SIM115 - closed by `clean_up`

    def run(
        self,
        heartbeat: HeartbeatThread,
        supervisor: Supervisor | None,
        *,
        abort: Callable[[], bool] = lambda: False,
        aborted: Verdict = SHUTDOWN,
    ) -> JobReport | None:
        """Do the job; its result, or None when the lease was lost.

        Args:
            heartbeat: Started and stopped here.
            supervisor: The machine's lock and the process that runs the child; None for a refused request.
            abort: True when the runner is to stop at once.
            aborted: How a job ends that `abort` stopped.
        """

        def is_stopped() -> bool:
            return heartbeat.lost or heartbeat.cancelled is not None or abort()

        self._ran = supervisor is not None
        heartbeat.start()
        try:
            verdict = self._verdict(heartbeat, supervisor, is_stopped) or aborted
        except LeaseLost:
            return None
        except Refusal as refusal:
            verdict = Verdict(status=Status.REFUSED, reason=refusal.reason, message=_sentence(refusal))
        except BridgeError as error:
            verdict = failed(Reason.RUNNER_ERROR, _sentence(error))
        except Exception:  # our own bug: the requester gets a result, the log gets the traceback
            self._note(traceback.format_exc())
            verdict = failed(Reason.RUNNER_ERROR, "the runner itself failed; the log has the details")
        finally:
            heartbeat.stop()
            if supervisor is not None:
                supervisor.release() if self._survivors == 0 else supervisor.close()
        return None if heartbeat.lost else self._report(verdict)

    def give_up(self, last: RunStatus | None) -> JobReport:
        """Answer a request whose earlier attempts were all lost; its log shows the last heartbeat."""
        if last is not None:
            seen = f"attempt {last.attempt} on {last.runner} was last seen {last.phase} at {last.updated_at}"
            self._note("\n".join([f"runner: {seen}, after {last.elapsed_s:.0f} s", *last.log_tail, ""]))
        message = f"{self.attempt - 1} attempts lost their runner; not tried again"
        return self._report(Verdict(status=Status.LOST, reason=Reason.ATTEMPTS, message=message))

    def cancel(self, reason: str) -> JobReport:
        """Answer a request that was cancelled before it was started."""
        return self._report(cancelled(Reason.REQUESTED, f"{reason}; it had not been started"))

    def clean_up(self) -> None:
        """Remove the job's folders and whatever it put next to them. One that did not run has none."""
        self._log.close()
        removed = [remove_tree(left) for left in list(self.config.jobs.iterdir())] if self._ran else []
        if not all(removed):
            log.warning("%s: what the job left cannot be removed", self.request.nonce)

    # The job ----------------------------------------------------------------------------------------------

    def _verdict(
        self, heartbeat: HeartbeatThread, supervisor: Supervisor | None, is_stopped: Callable[[], bool]
    ) -> Verdict | None:
        """How it ends; None: the runner was told to stop."""
        decision, manifest = self.decision, self.request.manifest
        if isinstance(decision, Refused):
            raise Refusal(decision.reason, decision.message, decision.remedy)
        if manifest is None or supervisor is None:
            raise ValueError("an admitted request has a manifest and a supervisor")
        with keep_awake() as kept_awake:
            if kept_awake is not None:
                self._record.machine["kept_awake"] = kept_awake
            sandbox = self._sandbox(decision.preset)
            with self._phase(Phase.WORKSPACE, heartbeat):
                command = self._command(decision, manifest, sandbox, heartbeat, is_stopped)
            with self._phase(Phase.RUNNING, heartbeat):
                began = self.now()
                ended = self._run_child(command, supervisor, heartbeat, is_stopped)
                finished = self.now()
        if not ended.stopped:
            with self._phase(Phase.GATING, heartbeat):
                return self._judge(decision.preset, manifest, ended, began, finished)
        if heartbeat.lost:
            raise LeaseLost("the request is another runner's now")
        if heartbeat.cancelled is None:
            return None
        return cancelled(Reason.REQUESTED, f"{heartbeat.cancelled}; stopped after {ended.seconds:.1f} s")

    def _sandbox(self, preset: Preset) -> Sandbox:
        """The sandbox; what it enforces is recorded, and that the owner allows a job to run without one."""
        sandbox, policy = find_sandbox(), self.config.policy
        enforced = sandbox.enforcement(network=policy.opens_network(preset))
        if isinstance(sandbox, NoSandbox) and preset.runs_repo_code:
            if not policy.allow_unsandboxed:  # admission found a sandbox, and now there is none
                lacking = f"it runs code of the requested commit, and there is no sandbox: {sandbox.why}"
                raise Refusal(Reason.MACHINE_UNFIT, f"the preset {preset.name} cannot run here: {lacking}")
            enforced = replace(enforced, sandbox="none (allow_unsandboxed)")
        self._record.enforced = enforced
        return sandbox

    def _command(
        self,
        admitted: Admitted,
        manifest: Manifest,
        sandbox: Sandbox,
        heartbeat: HeartbeatThread,
        is_stopped: Callable[[], bool],
    ) -> JobCommand:
        """Make what the job needs; the command that runs it."""
        policy, preset = self.config.policy, admitted.preset
        preparation = Preparation(
            self.config,
            self.cache,
            manifest,
            admitted,
            self._dirs,
            note=self._note,
            tell=heartbeat.line,
        )
        self._dirs.make()
        try:
            preparation.lay_out(is_stopped)
        except BusError:  # objects that were fetched cannot be read: the copy here is at fault
            self.cache.rebuild()
            place = self.request.ref or manifest.result_ref
            self.cache.bring({place: self.request.commit}, [place])
            self._dirs.make()
            preparation.lay_out(is_stopped)
        preparation.find_models()
        self._record.machine |= model_facts(preparation.models) | input_facts(preset, preparation.models)
        return JobCommand(
            argv=tuple(preparation.argv()),
            env=environment(self._dirs, self.config.environment, policy.environment),
            access=preparation.access(),
            sandbox=sandbox,
            limits=resource_limits(policy.limits),
            timeout_s=policy.timeout_s(preset, manifest.timeout_s),
            max_output=policy.limits.output_bytes,
            allowed=allowed(policy.limits, memory_bytes()),
        )

    def _run_child(
        self,
        command: JobCommand,
        supervisor: Supervisor,
        heartbeat: HeartbeatThread,
        is_stopped: Callable[[], bool],
    ) -> JobExit:
        ended = supervisor.run(command, self._log, on_line=heartbeat.line, stop=is_stopped)
        self._survivors = ended.survivors
        if ended.exit_code != 0:
            for cache in command.access.writable:  # a compiler that was killed leaves half a kernel
                remove_tree(cache)
        if ended.escaped:
            self._note(f"runner: {ended.escaped} processes had left the job's tree and were killed\n")
        self._record.commands.append(
            Command(
                argv=tuple(map(self.secrets.cut_text, command.argv)),
                exit_code=ended.exit_code,
                seconds=ended.seconds,
                log=LOG_NAME,
                timed_out=ended.timed_out,
                truncated=ended.flooded,
            )
        )
        return ended

    def _judge(
        self, preset: Preset, manifest: Manifest, ended: JobExit, began: datetime, finished: datetime
    ) -> Verdict:
        """How the child ended, then what the gate says of its report."""
        name = presets.evidence_name(preset)
        try:
            report = read_report(self._dirs.out, name) if name else None
        except ReportUnusable as error:
            return failed(Reason.NO_EVIDENCE, str(error))
        if report is not None and (leaked := self.secrets.found_in(report)):
            message = f"the report contains the runner's {', '.join(leaked)}"
            violation = Violation(code="SECRET_IN_EVIDENCE", message=message, file=name)
            return Verdict(
                status=Status.REJECTED, reason=Reason.EVIDENCE, message=message, violations=(violation,)
            )
        if report is not None and name is not None:
            # Of a preset that promises no report for the gate it is one about something else.
            self._record.files[name] = (report, "evidence" if preset.evidence else "report")
        binding = Binding(
            manifest.nonce, manifest.workload_sha, preset.digest, preset.engine, began, finished
        )
        return of_exit(preset, ended) or judge(preset, report, name, binding)

    # The result -------------------------------------------------------------------------------------------

    def _report(self, verdict: Verdict) -> JobReport:
        """The result with what the job brought; if that fails, one without it."""
        try:
            result = self._when_there_is_space(verdict)
        except Exception as error:
            verdict = failed(Reason.RUNNER_ERROR, f"the runner could not build the result: {describe(error)}")
            result = self._when_there_is_space(verdict, bare=True)
        preset = self.decision.preset
        seconds = self.clock() - self._began_at
        return JobReport(result, verdict, None if preset is None else preset.name, seconds)

    def _when_there_is_space(self, verdict: Verdict, *, bare: bool = False) -> ResultFiles:
        """A disk that is full for a moment must not cost what the job brought."""
        deadline, said = time.monotonic() + _SPACE_S, False
        while True:
            try:
                return self._result(verdict, bare=bare)
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise
                if not said:
                    log.warning(
                        "%s: its result waits for disk space: %s", self.request.nonce, describe(error)
                    )
                said = True
                time.sleep(_POLL_S)

    def _result(self, verdict: Verdict, *, bare: bool) -> ResultFiles:
        """The signed result; with `bare`, without what came from the request or the job."""
        request, preset, record = self.request, self.decision.preset, self._record
        manifest = request.manifest
        files: dict[str, tuple[bytes, str]] = {}
        params: Mapping[str, ParamValue] = {}
        if not bare:
            files = {**record.files, LOG_NAME: (self._log_so_far(), "log")}
            params = self.decision.params or (manifest.params if manifest else {})
        data = Result(
            nonce=request.nonce,
            request_commit=request.commit,
            workload_sha=manifest.workload_sha if manifest else None,
            preset=manifest.preset if manifest else None,
            preset_digest=preset.digest if preset else None,
            params=dict(params),
            engine_source=preset.engine if preset else None,
            runner=self._runner_facts(),
            attempt=self.attempt,
            started_at=format_time(record.started),
            finished_at=format_time(self.now()),
            phase_seconds=record.seconds,
            commands=() if bare else tuple(record.commands),
            files=tuple(_described(path, *content) for path, content in sorted(files.items())),
            verdict=verdict,
            tools=dict(self.config.tools),
        ).to_bytes()
        return ResultFiles(
            nonce=request.nonce,
            request_commit=request.commit,
            result_ref=manifest.result_ref if manifest else request.ref,
            result=data,
            signature=self.config.sign(data),
            files={path: content for path, (content, _) in files.items()},
        )

    def _runner_facts(self) -> RunnerFacts:
        identity, enforced = self.config.identity, self._record.enforced
        facts = {} if enforced is None else {**enforced.facts(), "survivors": self._survivors or 0}
        machine = {**self.config.machine, **facts, **self._record.machine}
        return RunnerFacts(name=identity.name, id=identity.id, version=__version__, machine=machine)

    def _log_so_far(self) -> bytes:
        flooded = any(command.truncated for command in self._record.commands)
        self._log.seek(0)
        return self.secrets.cut(self._log.read(), broken_off=flooded)

    @contextlib.contextmanager
    def _phase(self, phase: Phase, heartbeat: HeartbeatThread) -> Iterator[None]:
        heartbeat.enter(phase)
        began = self.clock()
        try:
            yield
        finally:
            self._record.seconds[phase.value] = round(self.clock() - began, 4)

    def _note(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._log.write(text.encode("utf-8", "replace"))


def _sentence(error: BridgeError) -> str:
    return (error.message if error.remedy is None else f"{error.message}; {error.remedy}")[:4000]


def _described(path: str, data: bytes, role: str) -> File:
    return File(path=path, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data), role=role)
