"""One request from claim to result: prepared, run, judged, signed. Every way out is a verdict.

What may run was settled by admission before the claim. A lease that is lost stops the job, and then there is
no result: another runner gives it. What the workload or this machine lacks is a `Refusal`. A failure of our
own becomes ``failed/runner_error``, with its traceback in the log only. How a job ended is put into words in
`verdict`.

A job that replays a report gets that of a finished request: the requester names a handle, and what is
replayed is decided by the refs, the digests and the signature of that request's result.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from bridge import __version__, presets
from bridge.bus import results
from bridge.bus.archive import find_archived
from bridge.bus.publish import ResultFiles
from bridge.bus.requests import ALL_REFS, find, state_of
from bridge.errors import (
    BridgeError,
    BusError,
    EvidenceError,
    LeaseLost,
    ParameterError,
    ResultError,
    UnknownHandle,
    describe,
)
from bridge.evidence.gate import Binding
from bridge.evidence.parse import parse
from bridge.git.cache import GitCache
from bridge.presets import Preset
from bridge.presets.argv import switches
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
from bridge.runner import models, workspace
from bridge.runner.admission import Admitted, Decision, Refusal, Refused, Request, check_machine
from bridge.runner.child import JobCommand, JobExit, Supervisor
from bridge.runner.config import RunnerConfig
from bridge.runner.lease import HeartbeatThread
from bridge.runner.machine import Fact, find_sandbox, input_facts, keep_awake, memory_bytes, model_facts
from bridge.runner.models import FoundModel
from bridge.runner.sandbox.base import (
    Access,
    Enforcement,
    JobDirs,
    NoSandbox,
    Sandbox,
    allowed,
    environment,
    installation,
    resource_limits,
)
from bridge.runner.verdict import cancelled, failed, judge, of_exit

log = logging.getLogger(__name__)

LOG_NAME = "log.txt"
SHUTDOWN = cancelled(Reason.SHUTDOWN, "the runner was told to stop")
ENGINE = "${engine}"  # how the argv of a preset begins that runs the engine
MLX_CACHE = "mlx"  # the folder below TMPDIR in which mlx's CPU backend keeps the kernels it compiles
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

    def __post_init__(self) -> None:
        self._began_at, self._started = self.clock(), self.now()
        self._dirs = JobDirs(self.config.jobs / self.request.nonce)
        self.secrets = self.config.secrets()
        # Has no name, so nothing the job does to files can put another file in its place.
        self._log = tempfile.TemporaryFile(dir=self.config.folder)  # noqa: SIM115 - closed by `clean_up`
        self._ran = False
        self._survivors: int | None = None  # None: no child ended
        # What the result says of the job, gathered while it goes on.
        self._enforced: Enforcement | None = None
        self._seconds: dict[str, float] = {}
        self._commands: list[Command] = []
        self._files: dict[str, tuple[bytes, str]] = {}
        self._machine: dict[str, Fact] = {}

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
        self._heartbeat, self._ran = heartbeat, supervisor is not None
        self._is_stopped = lambda: heartbeat.lost or heartbeat.cancelled is not None or abort()
        heartbeat.start()
        try:
            verdict = self._verdict(supervisor) or aborted
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
        left = list(self.config.jobs.iterdir()) if self._ran else []
        if [path for path in left if not workspace.remove_tree(path)]:
            log.warning("%s: what the job left cannot be removed", self.request.nonce)

    # The job ----------------------------------------------------------------------------------------------

    def _verdict(self, supervisor: Supervisor | None) -> Verdict | None:
        """How it ends; None: the runner was told to stop."""
        decision, manifest = self.decision, self.request.manifest
        if isinstance(decision, Refused):
            raise Refusal(decision.reason, decision.message, decision.remedy)
        if manifest is None or supervisor is None:
            raise ValueError("an admitted request has a manifest and a supervisor")
        with keep_awake() as kept_awake:
            if kept_awake is not None:
                self._machine["kept_awake"] = kept_awake
            sandbox = self._sandbox(decision.preset)
            with self._phase(Phase.WORKSPACE):
                command = self._command(decision, manifest, sandbox)
            with self._phase(Phase.RUNNING):
                began = self.now()
                ended = self._run_child(command, supervisor)
                finished = self.now()
        if not ended.stopped:
            with self._phase(Phase.GATING):
                preset = decision.preset
                binding = Binding(
                    manifest.nonce, manifest.workload_sha, preset.digest, preset.engine, began, finished
                )
                return self._judge(preset, ended, binding)
        if self._heartbeat.lost:
            raise LeaseLost("the request is another runner's now")
        if self._heartbeat.cancelled is None:
            return None
        reason = f"{self._heartbeat.cancelled}; stopped after {ended.seconds:.1f} s"
        return cancelled(Reason.REQUESTED, reason)

    def _sandbox(self, preset: Preset) -> Sandbox:
        """The sandbox; what it enforces is recorded, and that the owner allows a job to run without one."""
        check_machine(preset, self.config)  # admission found a sandbox, and now there may be none
        sandbox = find_sandbox()
        enforced = sandbox.enforcement(network=self.config.policy.opens_network(preset))
        if isinstance(sandbox, NoSandbox) and preset.runs_repo_code:
            enforced = replace(enforced, sandbox="none (allow_unsandboxed)")
        self._enforced = enforced
        return sandbox

    def _command(self, admitted: Admitted, manifest: Manifest, sandbox: Sandbox) -> JobCommand:
        """Make what the job needs; the command that runs it."""
        policy, preset = self.config.policy, admitted.preset
        preparation = Preparation(
            self.config,
            self.cache,
            manifest,
            admitted,
            self._dirs,
            note=self._note,
            tell=self._heartbeat.line,
        )
        self._dirs.make()
        try:
            preparation.lay_out(self._is_stopped)
        except BusError:  # objects that were fetched cannot be read: the copy here is at fault
            self.cache.rebuild()
            place = self.request.ref or manifest.result_ref
            self.cache.bring({place: self.request.commit}, [place])
            self._dirs.make()
            preparation.lay_out(self._is_stopped)
        preparation.find_models()
        self._machine |= model_facts(preparation.models) | input_facts(preset, preparation.models)
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

    def _run_child(self, command: JobCommand, supervisor: Supervisor) -> JobExit:
        ended = supervisor.run(command, self._log, on_line=self._heartbeat.line, stop=self._is_stopped)
        self._survivors = ended.survivors
        if ended.exit_code != 0:
            for cache in command.access.writable:  # a compiler that was killed leaves half a kernel
                workspace.remove_tree(cache)
        if ended.escaped:
            self._note(f"runner: {ended.escaped} processes had left the job's tree and were killed\n")
        self._commands.append(
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

    def _judge(self, preset: Preset, ended: JobExit, binding: Binding) -> Verdict:
        """How the child ended, then what the gate says of its report."""
        name = presets.evidence_name(preset)
        try:
            report = workspace.read_report(self._dirs.out, name) if name else None
        except workspace.ReportUnusable as error:
            return failed(Reason.NO_EVIDENCE, str(error))
        if report is not None and (leaked := self.secrets.found_in(report)):
            message = f"the report contains the runner's {', '.join(leaked)}"
            violation = Violation(code="SECRET_IN_EVIDENCE", message=message, file=name)
            return Verdict(
                status=Status.REJECTED, reason=Reason.EVIDENCE, message=message, violations=(violation,)
            )
        if report is not None and name is not None:
            # Of a preset that promises no report for the gate it is one about something else.
            self._files[name] = (report, "evidence" if preset.evidence else "report")
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
                    why = describe(error)
                    log.warning("%s: its result waits for disk space: %s", self.request.nonce, why)
                said = True
                time.sleep(_POLL_S)

    def _result(self, verdict: Verdict, *, bare: bool) -> ResultFiles:
        """The signed result; with `bare`, without what came from the request or the job."""
        request, preset, manifest = self.request, self.decision.preset, self.request.manifest
        files: dict[str, tuple[bytes, str]] = {}
        params: Mapping[str, ParamValue] = {}
        if not bare:
            files = {**self._files, LOG_NAME: (self._log_so_far(), "log")}
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
            started_at=format_time(self._started),
            finished_at=format_time(self.now()),
            phase_seconds=self._seconds,
            commands=() if bare else tuple(self._commands),
            files=tuple(
                File(path=path, sha256=hashlib.sha256(content).hexdigest(), bytes=len(content), role=role)
                for path, (content, role) in sorted(files.items())
            ),
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
        identity, enforced = self.config.identity, self._enforced
        facts = {} if enforced is None else {**enforced.facts(), "survivors": self._survivors or 0}
        if self.config.policy.allow_unsandboxed:
            facts["allow_unsandboxed"] = True
        machine = {**self.config.machine, **facts, **self._machine}
        return RunnerFacts(name=identity.name, id=identity.id, version=__version__, machine=machine)

    def _log_so_far(self) -> bytes:
        flooded = any(command.truncated for command in self._commands)
        self._log.seek(0)
        return self.secrets.cut(self._log.read(), broken_off=flooded)

    @contextlib.contextmanager
    def _phase(self, phase: Phase) -> Iterator[None]:
        self._heartbeat.enter(phase)
        began = self.clock()
        try:
            yield
        finally:
            self._seconds[phase.value] = round(self.clock() - began, 4)

    def _note(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._log.write(text.encode("utf-8", "replace"))


def _sentence(error: BridgeError) -> str:
    return (error.message if error.remedy is None else f"{error.message}; {error.remedy}")[:4000]


# What a job gets before it starts -------------------------------------------------------------------------


@dataclass
class Preparation:
    """Workspace, models, argv and access of one job. Its methods are called in their order."""

    config: RunnerConfig
    cache: GitCache
    manifest: Manifest
    admitted: Admitted
    dirs: JobDirs  # made, and empty
    _: KW_ONLY
    note: Callable[[str], object]  # takes text for the job's log
    tell: Callable[[str], object]  # takes a line for the requester
    models: Mapping[str, FoundModel] = field(default_factory=dict, init=False)
    _replayed_models: list[Path] = field(default_factory=list, init=False)

    def lay_out(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Put what the preset wants of the workload into the workspace, objects of Git LFS as well.

        `stop` is asked while objects are fetched.

        Raises:
            Refusal: The workload cannot be laid out, or it lacks a file that a parameter names, or an object.
            BusError: Objects of the workload cannot be read here.
        """
        preset, workload = self.admitted.preset, self.manifest.workload_sha
        if preset.workspace == "none":
            return
        paths = {
            name: str(self.admitted.params[name])
            for name, item in preset.params.items()
            if item.format == "repo-path"
        }
        wanted = None if preset.workspace == "full" else list(paths.values())
        try:
            pointers = workspace.lay_out(self.cache, workload, self.dirs.workspace, wanted)
            for name, path in paths.items():
                if not (self.dirs.workspace / path).exists():
                    message = f"parameter {name}: the commit {workload[:12]} has no {path!r}"
                    raise Refusal(Reason.BAD_PARAMETER, message)
            if pointers:
                self._replace_pointers(pointers, stop)
        except workspace.WorkloadRefused as error:
            raise Refusal.of(Reason.BAD_WORKLOAD, error) from None

    def _replace_pointers(self, pointers: frozenset[str], stop: Callable[[], bool]) -> None:
        what, rule = f"fetching {len(pointers)} files of Git LFS", self.config.policy.lfs
        if rule.endpoint is not None:
            self.tell(f"progress 0/1 {what}")
        scratch = self.config.jobs
        size = workspace.replace_pointers(self.dirs.workspace, pointers, rule, scratch_dir=scratch, stop=stop)
        self.note(f"runner: {len(pointers)} files of Git LFS, {size} bytes\n")
        self.tell(f"progress 1/1 {what}")

    def find_models(self) -> None:
        """Find the preset's models on this machine, or refuse the request."""
        preset = self.admitted.preset
        places = self.config.model_places(workload=self.dirs.workspace if preset.runs_repo_code else None)
        try:
            self.models = models.resolve(preset.models, places)
        except models.ModelMissing as error:
            raise Refusal.of(Reason.MODEL_MISSING, error) from None
        for name, model in self.models.items():
            self._say(f"model {name}: {model}")

    def argv(self) -> list[str]:
        """The job's command line, or a `Refusal`: a parameter does not fit, a variable is not set here."""
        try:
            return presets.argv(self.admitted.preset, self.admitted.params, self._words)
        except ParameterError as error:
            raise Refusal.of(Reason.BAD_PARAMETER, error) from None

    def access(self) -> Access:
        """Everything that the job may reach. The kernel cache is put in place.

        The preset, the policy and this machine's models decide it, never a value of the request.
        """
        folders = [*(model.folder for model in self.models.values()), *self._replayed_models]
        # A model may be a folder of links, as in the cache of Hugging Face.
        linked = [path.resolve() for folder in folders for path in folder.rglob("*") if path.is_symlink()]
        own = [Path(word) for word in self._own_words() if os.path.isabs(word)]
        return Access(
            self.dirs,
            readable=(*installation(), *own, *folders, *linked),
            writable=self._kernel_cache(),
            hidden=self.config.private,
            network=self.config.policy.opens_network(self.admitted.preset),
        )

    def _own_words(self) -> Iterator[str]:
        """What the preset's own argv names: programs and data of the owner."""
        for element in self.admitted.preset.argv:
            value = element.rpartition("=")[2] if element.startswith("--") else element
            yield self.config.environment.get(value[6:-1], "") if value.startswith("${env:") else value

    def _kernel_cache(self) -> tuple[Path, ...]:
        """Let mlx keep compiled kernels between jobs of the installed engine, and of no other program.

        Code of a requester could leave kernels there that a later job would run.
        """
        if self.admitted.preset.runs_repo_code or self.admitted.preset.argv[0] != ENGINE:
            return ()
        self.config.kernel_cache.mkdir(mode=0o700, exist_ok=True)
        (self.dirs.temporary / MLX_CACHE).symlink_to(self.config.kernel_cache)
        return (self.config.kernel_cache,)

    def _words(self, kind: str, name: str) -> list[str]:
        """The words for ``${kind:name}`` of a preset on this machine, for this job."""
        if (program := program_words(kind)) is not None:
            return program
        if kind == "out":
            return [str(self.dirs.out / f"{name}.json")]
        if kind == "model":
            return [str(self.models[name].folder)]
        if kind == "replay":
            return self._replay(str(self.admitted.params[name]))
        if kind == "env":
            if name not in self.config.environment:
                raise Refusal(Reason.MACHINE_UNFIT, f"the runner's environment has no {name}")
            return [self.config.environment[name]]
        return [
            *("--request-nonce", self.manifest.nonce),
            *("--workload-sha", self.manifest.workload_sha),
            *("--preset-digest", self.admitted.preset.digest),
            *("--engine-source", self.admitted.preset.engine),
        ]

    def _replay(self, handle: str) -> list[str]:
        """Lay out the report of a finished request; the words that name it, and where its models may lie."""
        believed, report = self._find_report(handle)
        path, result = self.dirs.workspace / "report.json", believed.result
        path.write_bytes(report)
        digest = hashlib.sha256(report).hexdigest()
        which = "the same" if result.runner.id == self.config.identity.id else "another"
        self._say(f"the report of {result.nonce} ({result.preset}), sha256 {digest}")
        self._say(f"its result: {believed.sentence}")
        self._say(f"made by {result.runner.name}, verified by {self.config.identity.name}: {which} runner")
        self._replayed_models = _model_folders(self.config, result.preset)
        return [str(path), *(f"--among={folder}" for folder in self._replayed_models)]

    def _find_report(self, handle: str) -> tuple[results.Believed, bytes]:
        """The result of a finished request that can be believed, and the report of that request in it."""
        try:
            fetched = self._fetch(handle)
            trusted = self.config.allowed_signers.with_name("trusted_runners")
            believed = results.believe(fetched, trusted=trusted)
            data = results.evidence_report(believed)
        except (UnknownHandle, ResultError, EvidenceError) as error:
            raise _no_report(error.message) from None
        report, faults = parse(data)
        if report is None:
            raise _no_report(f"the report of {fetched.nonce} cannot be read: {faults[0].message}")
        if report.request is None or report.request.nonce != fetched.nonce:
            raise _no_report(f"the report in the result of {fetched.nonce} is not of that request")
        return believed, data

    def _fetch(self, handle: str) -> results.FetchedResult:
        cache = self.cache
        found = cache.list_remote(*ALL_REFS)
        try:
            state = state_of(found, find(found, handle), handle)
        except UnknownHandle:
            return find_archived(cache, handle, found=found)
        held = {value.ref: value.commit for value in (*state.branches, state.result) if value is not None}
        cache.bring(held, list(held), depth=3)
        fetched = results.fetch(cache, cache.remote, state, depth=3)
        if fetched is None:
            raise _no_report(f"the request {state.nonce} is not finished, so it has no report to verify")
        return fetched

    def _say(self, line: str) -> None:
        self.note(f"runner: {line}\n")
        self.tell(line)


def program_words(kind: str) -> list[str] | None:
    """The words for a placeholder that is a program of this installation; None: it is something else."""
    if kind == "python":
        return [sys.executable]
    return [sys.executable, "-I", "-m", kind] if kind in ("engine", "bridge") else None


def _no_report(message: str) -> Refusal:
    return Refusal(Reason.BAD_PARAMETER, f"parameter request: {message}", "see: kakeya_mac history")


def _model_folders(config: RunnerConfig, name: str | None) -> list[Path]:
    """Where the models of an installed preset lie on this machine.

    None where it is not installed, or they are not here: then the shipped ones do, or the engine, which
    compares their digests, says what is missing.
    """
    preset = config.installed.get(name or "")
    if preset is None:
        return []
    try:
        found = models.resolve(preset.models, config.model_places(workload=None))
    except models.ModelMissing:
        return []
    wanted = {switch.model for switch in switches(preset.argv)}
    return [model.folder for model_name, model in found.items() if model_name in wanted]
