"""One request from claim to result: prepared, run, judged, signed. Every way out is a verdict."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from bridge import __version__, presets
from bridge.bus import results
from bridge.bus.archive import find_archived
from bridge.bus.publish import ResultFiles
from bridge.bus.requests import ALL_REFS, find, state_of
from bridge.errors import BridgeError, BusError, EvidenceError, ParameterError, UnknownHandle, describe
from bridge.evidence import attestation
from bridge.evidence.gate import Binding, Judgement, broken_promises
from bridge.evidence.gate import judge as gate
from bridge.evidence.paired import summarise
from bridge.git.cache import GitCache
from bridge.presets import Preset
from bridge.presets.argv import switches
from bridge.protocol import result as protocol
from bridge.protocol.manifest import Manifest, ParamValue, format_time
from bridge.protocol.result import REASONS, Phase, Reason, Verdict, Violation
from bridge.runner import models, sandbox, workspace
from bridge.runner.admission import Admitted, Decision, Refusal, Request, check_machine
from bridge.runner.child import JobCommand, JobExit, Supervisor
from bridge.runner.config import RunnerConfig
from bridge.runner.lease import HeartbeatThread
from bridge.runner.machine import Fact, job_facts, keep_awake
from bridge.runner.models import FoundModel
from bridge.runner.paired import RunFailed, run_blocks
from bridge.runner.supervisor import Breach
from bridge.signing import dsse
from evidence_format.model import ReportRequest
from evidence_format.paired import NAME as PAIRED
from evidence_format.paired import SCHEMA_ID, Paired, PairedRun, PairedSide, SideName
from evidence_format.parse import Unreadable, parse

log = logging.getLogger(__name__)

LOG_NAME = "log.txt"
ENGINE = "${engine}"  # how the argv of a preset begins that runs the engine
MLX_CACHE = "mlx"  # the folder below TMPDIR in which mlx's CPU backend keeps the kernels it compiles
_SPACE_S, _POLL_S = 30.0, 2.0  # how long a result waits for space on the disk
_GIB = 1 << 30
_REASONS: Mapping[type[BridgeError], Reason] = {
    ParameterError: Reason.BAD_PARAMETER,
    models.ModelMissing: Reason.MODEL_MISSING,
    workspace.WorkloadRefused: Reason.BAD_WORKLOAD,
    workspace.ReportUnusable: Reason.NO_EVIDENCE,
}


def make_verdict(reason: Reason, message: str, *violations: Violation) -> Verdict:
    """A verdict whose status follows from its reason, and whose message is as long as a result may hold."""
    return Verdict(
        status=REASONS[reason].status, reason=reason, message=message[:4000], violations=violations
    )


def verdict_of(why: BridgeError) -> Verdict:
    """The verdict of a request that is refused, or whose job an error ended."""
    reason = why.reason if isinstance(why, Refusal) else _REASONS.get(type(why), Reason.RUNNER_ERROR)
    message = why.message if why.remedy is None else f"{why.message}; {why.remedy}"
    return make_verdict(reason, message)


@dataclass(frozen=True)
class JobReport:
    """What came of a request: the result to publish, how it ended, and how long it took."""

    result: ResultFiles
    verdict: Verdict
    seconds: float


@dataclass(frozen=True)
class Side:
    """What a command runs on: a commit, parameters, and folders of its own. A paired run has two sides."""

    name: SideName
    commit: str
    params: Mapping[str, ParamValue]
    dirs: sandbox.JobDirs


@dataclass
class Job:
    """One request that is ours, whatever admission decided about it; `cache` holds it and its workload."""

    config: RunnerConfig
    cache: GitCache
    request: Request
    decision: Decision
    attempt: int  # from 1
    now: Callable[[], datetime] = lambda: datetime.now(UTC)  # the time of day (aware)

    def __post_init__(self) -> None:
        self._began_at, self._started = time.monotonic(), self.now()
        self.secrets = self.config.secrets()
        # Has no name, so nothing the job does to files can put another file in its place.
        self._log = tempfile.TemporaryFile(dir=self.config.folder)  # noqa: SIM115 - closed by `clean_up`
        self._tell: Callable[[str], None] = lambda _: None  # takes a line for the requester
        self._is_stopped: Callable[[], bool] = lambda: False
        self._ran = self._shares_kernels = False
        self._models: Mapping[str, FoundModel] = {}
        self._replayed_models: list[Path] = []
        # What the result says of the job.
        self._seconds: dict[str, float] = {}
        self._commands: dict[SideName, protocol.Command] = {}  # the last of each side
        self._files: dict[str, tuple[bytes, str]] = {}
        self._machine: dict[str, Fact] = {}

    def run(
        self,
        heartbeat: HeartbeatThread,
        supervisor: Supervisor | None,
        *,
        abort: Callable[[], Verdict | None] = lambda: None,
    ) -> JobReport | None:
        """Do the job; its result, or None when the lease was lost: another runner gives it.

        `supervisor` is None for a refused request. A verdict of `abort` ends the job at once, with it.
        """
        if isinstance(self.decision, Refusal):
            return self._report(verdict_of(self.decision))
        self._tell, self._ran = heartbeat.line, True
        self._is_stopped = lambda: heartbeat.lost or heartbeat.cancelled is not None or abort() is not None
        heartbeat.start()
        try:
            verdict = self._work(heartbeat, supervisor) or abort()
        except BridgeError as error:
            verdict = verdict_of(error)
        except Exception:  # our own bug: the requester gets a result, the log gets the traceback
            self._note(traceback.format_exc())
            verdict = make_verdict(Reason.RUNNER_ERROR, "the runner itself failed; the log has the details")
        finally:
            heartbeat.stop()
            if supervisor is not None:
                supervisor.close()
        if heartbeat.lost:
            return None
        assert verdict is not None  # noqa: S101 - the job was stopped for one of three reasons
        return self._report(verdict)

    def give_up(self, last: protocol.RunStatus | None) -> JobReport:
        """Answer a request whose earlier attempts were all lost; its log shows the last heartbeat."""
        if last is not None:
            seen = f"attempt {last.attempt} on {last.runner} was last seen {last.phase} at {last.updated_at}"
            self._note("\n".join([f"runner: {seen}, after {last.elapsed_s:.0f} s", *last.log_tail, ""]))
        message = f"{self.attempt - 1} attempts lost their runner; not tried again"
        return self._report(make_verdict(Reason.ATTEMPTS, message))

    def cancel(self, reason: str) -> JobReport:
        """Answer a request that was cancelled before it was started."""
        return self.end(make_verdict(Reason.REQUESTED, f"{reason}; it had not been started"))

    def end(self, verdict: Verdict) -> JobReport:
        """Answer a request that was not started."""
        return self._report(verdict)

    def clean_up(self) -> None:
        """Remove the job's folders and whatever it put next to them. One that did not run has none."""
        self._log.close()
        left = list(self.config.jobs.iterdir()) if self._ran else []
        if [path for path in left if not workspace.remove_tree(path)]:
            log.warning("%s: what the job left cannot be removed", self.request.nonce)

    def _work(self, heartbeat: HeartbeatThread, supervisor: Supervisor | None) -> Verdict | None:
        """From the workspace to the gate; None: the runner was told to stop, or the lease is lost."""
        assert supervisor is not None  # noqa: S101 - an admitted request has one
        manifest = self._asked()[1]
        with keep_awake() as kept_awake:
            if kept_awake is not None:
                self._machine["kept_awake"] = kept_awake
            with self._phase(heartbeat, Phase.WORKSPACE):
                # The workload last, so that what the result says of models is of its.
                prepared = {side.name: (side, *self._prepare(side)) for side in reversed(self.sides())}
            with self._phase(heartbeat, Phase.RUNNING):
                if manifest.against is not None:
                    return self._run_pairs(heartbeat, supervisor, prepared)
                side, argv, command = prepared["workload"]
                began = self.now()
                ended = supervisor.run(command, self._log, on_line=self._tell, stop=self._is_stopped)
                finished = self.now()
        self._note_exit(side, argv, ended)
        if ended.stopped:
            return self._stopped(heartbeat, ended)
        with self._phase(heartbeat, Phase.GATING):
            return self._judge(side, ended, self._binding(side, began, finished))[0]

    def _run_pairs(
        self,
        heartbeat: HeartbeatThread,
        supervisor: Supervisor,
        prepared: Mapping[SideName, tuple[Side, list[str], JobCommand]],
    ) -> Verdict | None:
        """Run both sides by turns, each run judged like a job of its own; then the record of them."""
        preset, manifest = self._asked()
        workload, other = prepared["workload"][0], prepared["against"][0]
        uses_report, began, number = preset.evidence_kind == "throughput", self.now(), 0
        most_output = prepared["workload"][2].max_output

        def run(name: SideName, warm_up: bool, left_s: float) -> PairedRun:
            nonlocal number
            number += 1
            side, argv, command = prepared[name]
            workspace.remove_tree(side.dirs.out)  # no run is judged by the report of the one before it
            side.dirs.out.mkdir(mode=0o700)
            printed = self._log.tell()
            command = replace(command, timeout_s=left_s, max_output=max(0, most_output - printed))
            started = self.now()
            ended = supervisor.run(command, self._log, on_line=self._tell_output, stop=self._is_stopped)
            self._note_exit(side, argv, ended)
            if ended.stopped:
                raise RunFailed(self._stopped(heartbeat, ended))
            verdict, judgement = self._judge(side, ended, self._binding(side, started, self.now()))
            if verdict.reason is not Reason.OK:
                message = f"run {number} ({name}, {side.commit[:12]}): {verdict.message}"[:4000]
                raise RunFailed(verdict.model_copy(update={"message": message}))
            seconds = round(ended.seconds, 6)
            self._note(f"runner: run {number} ({name}) took {seconds:.3f} s\n")
            report = presets.evidence_name(preset) if preset.evidence else None
            data = self._files[self._file_name(side, report)][0] if report else None
            return PairedRun(
                side=name,
                warm_up=warm_up,
                started_at=started.isoformat(timespec="microseconds").replace("+00:00", "Z"),
                seconds=seconds,
                value=_decode_seconds(judgement) if uses_report else seconds,
                exit_code=0,
                report_sha256=None if data is None else hashlib.sha256(data).hexdigest(),
            )

        try:
            limit_s, nonce = prepared["workload"][2].timeout_s, manifest.nonce
            runs = run_blocks(run, limit_s=limit_s, seed=nonce, on_progress=self._tell)
        except RunFailed as failure:
            return failure.verdict
        record = Paired.model_validate(
            {
                "schema": SCHEMA_ID,
                "request": ReportRequest(
                    nonce=nonce,
                    workload_sha=workload.commit,
                    preset_digest=preset.digest,
                    engine_source=preset.engine,
                ),
                "preset": preset.name,
                "metric": "decode_s_per_token" if uses_report else "command_s",
                "workload": PairedSide(workload_sha=workload.commit, params=dict(workload.params)),
                "against": PairedSide(workload_sha=other.commit, params=dict(other.params)),
                "runs": tuple(runs),
                "summary": summarise(runs, nonce),
            }
        )
        data = (record.model_dump_json(by_alias=True, indent=1) + "\n").encode()
        self._files[PAIRED] = (data, "evidence")
        return _of_gate(PAIRED, gate(data, binding=self._binding(workload, began, self.now())).violations)

    def sides(self) -> tuple[Side, ...]:
        """What the job runs: the workload, and in a paired run what it is compared with."""
        manifest, decision = self._asked()[1], self.decision
        folder = self.config.jobs / manifest.nonce
        sides = [Side("workload", manifest.workload_sha, decision.params, sandbox.JobDirs(folder))]
        if manifest.against is not None and isinstance(decision, Admitted) and decision.against is not None:
            dirs = sandbox.JobDirs(self.config.jobs / f"{manifest.nonce}-against")
            sides.append(Side("against", manifest.against.workload_sha, decision.against, dirs))
        return tuple(sides)

    def _binding(self, side: Side, began: datetime, finished: datetime) -> Binding:
        preset, manifest = self._asked()
        return Binding(manifest.nonce, side.commit, preset.digest, preset.engine, began, finished)

    def _stopped(self, heartbeat: HeartbeatThread, ended: JobExit) -> Verdict | None:
        """The verdict of a job that was stopped; None: the runner was told to stop, or the lease is lost."""
        if heartbeat.cancelled is None:
            return None
        reason = f"{heartbeat.cancelled}; stopped after {ended.seconds:.1f} s"
        return make_verdict(Reason.REQUESTED, reason)

    def _tell_output(self, line: str) -> None:
        """Pass on a line of a paired run, but not its own progress, which begins again with each run."""
        if not line.startswith("progress "):
            self._tell(line)

    @staticmethod
    def _file_name(side: Side, report: str) -> str:
        return f"against-{report}" if side.name == "against" else report

    def _asked(self) -> tuple[Preset, Manifest]:
        preset, manifest = self.decision.preset, self.request.manifest
        assert preset is not None and manifest is not None  # noqa: S101, PT018 - an admitted request has both
        return preset, manifest

    @contextlib.contextmanager
    def _phase(self, heartbeat: HeartbeatThread, phase: Phase) -> Iterator[None]:
        heartbeat.phase = phase
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase.value] = round(time.monotonic() - began, 4)

    def _note(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._log.write(text.encode("utf-8", "replace"))

    def _say(self, line: str) -> None:
        self._note(f"runner: {line}\n")
        self._tell(line)

    def _prepare(self, side: Side) -> tuple[list[str], JobCommand]:
        """Make what a side needs; its command line, and the command that runs it in the sandbox."""
        policy, (preset, manifest) = self.config.policy, self._asked()
        # Admission found a sandbox, and now there may be none.
        check_machine(preset, self.config, side.params)
        isolation = sandbox.find_sandbox()
        self._machine |= {**isolation.enforced(network=policy.opens_network(preset)), "survivors": 0}
        if isinstance(isolation, sandbox.NoSandbox) and preset.runs_repo_code:
            self._machine["sandbox"] = "none (allow_unsandboxed)"
        try:
            self.lay_out(side)
        except BusError:  # objects that were fetched cannot be read: the copy here is at fault
            self.cache.rebuild()
            place = self.request.ref or manifest.result_ref
            self.cache.bring({place: self.request.commit}, [place])
            self.lay_out(side)
        dirs = side.dirs
        places = self.config.model_places(workload=dirs.workspace if preset.runs_repo_code else None)
        self._models = models.resolve(presets.model_needs(preset, side.params), places)
        for name, model in self._models.items():
            self._say(f"model {name}: {model}")
        self._machine |= job_facts(preset, self._models)
        argv = self.argv(side)
        return argv, JobCommand(
            argv=isolation.command(argv, self._access(preset, dirs)),
            env=sandbox.environment(dirs, self.config.environment, policy.environment),
            folder=str(dirs.root),
            cwd=str(dirs.workspace),
            wrappers=isolation.wrappers,
            limits=sandbox.resource_limits(policy.limits),
            allowed=sandbox.allowed(policy.limits),
            timeout_s=policy.timeout_s(preset, manifest.timeout_s),
            max_output=policy.limits.output_bytes,
        )

    def lay_out(self, side: Side) -> None:
        """Make a side's folders, and put in them what the preset wants of its commit and of Git LFS."""
        side.dirs.make()
        preset, params, workload = self._asked()[0], side.params, side.commit
        if preset.workspace == "none":
            return
        paths = {
            name: str(params[name]) for name, item in preset.params.items() if item.format == "repo-path"
        }
        wanted = None if preset.workspace == "full" else list(paths.values())
        folder = side.dirs.workspace
        pointers = workspace.lay_out(self.cache, workload, folder, wanted)
        for name, path in paths.items():
            if not (folder / path).exists():
                raise ParameterError(f"parameter {name}: the commit {workload[:12]} has no {path!r}")
        if pointers:
            what, rule = f"fetching {len(pointers)} files of Git LFS", self.config.policy.lfs
            self._tell(f"progress 0/1 {what}")
            scratch, stop = self.config.jobs, self._is_stopped
            size = workspace.replace_pointers(folder, pointers, rule, scratch_dir=scratch, stop=stop)
            self._note(f"runner: {len(pointers)} files of Git LFS, {size} bytes\n")
            self._tell(f"progress 1/1 {what}")

    def argv(self, side: Side) -> list[str]:
        """A side's command line; a `RequestRefused`: a parameter does not fit, or a variable is not set."""
        return presets.argv(self._asked()[0], side.params, functools.partial(self._words, side))

    def _words(self, side: Side, kind: str, name: str) -> list[str]:
        """The words for ``${kind:name}`` of a preset on this machine, for a side of this job."""
        if (program := program_words(kind)) is not None:
            return program
        if kind == "out":
            return [str(side.dirs.out / f"{name}.json")]
        if kind == "model":
            return [str(self._models[presets.model_names(self._asked()[0], side.params)[name]].folder)]
        if kind == "replay":
            return self._replay(side, str(side.params[name]))
        if kind == "env":
            if name not in self.config.environment:
                raise Refusal(Reason.MACHINE_UNFIT, f"the runner's environment has no {name}")
            return [self.config.environment[name]]
        preset, manifest = self._asked()
        return [
            *("--request-nonce", manifest.nonce, "--workload-sha", side.commit),
            *("--preset-digest", preset.digest, "--engine-source", preset.engine),
        ]

    def _access(self, preset: Preset, dirs: sandbox.JobDirs) -> sandbox.Access:
        """Everything that a side may reach: the preset, the policy and this machine's models decide it."""
        folders = [*(model.folder for model in self._models.values()), *self._replayed_models]
        # A model may be a folder of links, as in the cache of Hugging Face.
        linked = [path.resolve() for folder in folders for path in folder.rglob("*") if path.is_symlink()]
        own = []  # programs and data of the owner, which the preset's own argv names
        for element in preset.argv:
            value = element.rpartition("=")[2] if element.startswith("--") else element
            value = self.config.environment.get(value[6:-1], "") if value.startswith("${env:") else value
            own += [Path(value)] if os.path.isabs(value) else []
        # mlx keeps kernels for the installed engine alone: other code could leave some that a later job runs.
        self._shares_kernels = not preset.runs_repo_code and preset.argv[0] == ENGINE
        if self._shares_kernels:
            self.config.kernel_cache.mkdir(mode=0o700, exist_ok=True)
            (dirs.temporary / MLX_CACHE).symlink_to(self.config.kernel_cache)
        return sandbox.Access(
            dirs,
            readable=(*sandbox.installation(), *own, *folders, *linked),
            writable=(self.config.kernel_cache,) if self._shares_kernels else (),
            hidden=(self.config.lock.parent, self.config.config_dir),  # state and keys of all runners
            network=self.config.policy.opens_network(preset),
        )

    def _replay(self, side: Side, handle: str) -> list[str]:
        """Lay out the report of a finished request; the words that name it, and where its models may lie.

        The requester names a handle; what is replayed is decided by that request's refs, digests, signature.
        """
        try:
            believed, report = self._find_report(handle)
        except (UnknownHandle, EvidenceError) as error:
            message, remedy = f"parameter request: {error.message}", "see: kakeya_mac history"
            raise Refusal(Reason.BAD_PARAMETER, message, remedy) from None
        path, result = side.dirs.workspace / "report.json", believed.result
        path.write_bytes(report)
        which = "the same" if result.runner.id == self.config.identity.id else "another"
        self._say(
            f"the report of {result.nonce} ({result.preset}), sha256 {hashlib.sha256(report).hexdigest()}"
        )
        self._say(f"its result: {believed.sentence}")
        self._say(f"made by {result.runner.name}, verified by {self.config.identity.name}: {which} runner")
        preset = self.config.presets.get(result.preset or "")
        if preset is not None:
            # Where they are not here, the engine, which compares digests, says what is missing.
            with contextlib.suppress(models.ModelMissing):
                names = presets.model_names(preset, result.params)
                needs = presets.model_needs(preset, result.params)
                found = models.resolve(needs, self.config.model_places())
                wanted = {names[switch.model] for switch in switches(preset.argv) if switch.model}
                self._replayed_models = [model.folder for name, model in found.items() if name in wanted]
        return [str(path), *(f"--among={folder}" for folder in self._replayed_models)]

    def _find_report(self, handle: str) -> tuple[results.Believed, bytes]:
        """The result of a finished request that can be believed, and the report of that request in it."""
        cache = self.cache
        found = cache.list_remote(*ALL_REFS)
        fetched: results.FetchedResult | None
        try:
            state = state_of(found, find(found, handle), handle)
        except UnknownHandle:
            fetched = find_archived(cache, handle, found=found)
        else:
            fetched = results.fetch(cache, cache.remote, state, depth=3)
        if fetched is None:
            raise EvidenceError(f"the request {handle} is not finished, so it has no report to verify")
        trusted = self.config.allowed_signers.with_name("trusted_runners")
        believed = results.believe(fetched, trusted=trusted)
        data = results.evidence_report(believed)
        try:
            report = parse(data)
        except Unreadable as error:
            raise EvidenceError(f"the report of {fetched.nonce} cannot be read: {error}") from None
        if report.request is None or report.request.nonce != fetched.nonce:
            raise EvidenceError(f"the report in the result of {fetched.nonce} is not of that request")
        return believed, data

    def _note_exit(self, side: Side, argv: list[str], ended: JobExit) -> None:
        self._machine["survivors"] = ended.survivors
        if ended.exit_code != 0 and self._shares_kernels:  # a compiler that was killed leaves half a kernel
            workspace.remove_tree(self.config.kernel_cache)
        if ended.escaped:
            self._note(f"runner: {ended.escaped} processes had left the job's tree and were killed\n")
        self._commands[side.name] = protocol.Command(
            argv=tuple(map(self.secrets.cut_text, argv)),
            exit_code=ended.exit_code,
            seconds=ended.seconds,
            log=LOG_NAME,
            timed_out=ended.timed_out,
            truncated=ended.flooded,
        )

    def _judge(self, side: Side, ended: JobExit, binding: Binding) -> tuple[Verdict, Judgement | None]:
        """How the child ended, then what the gate says of its report; and the judgement of that."""
        preset = self._asked()[0]
        name = presets.evidence_name(preset)
        report = workspace.read_report(side.dirs.out, name) if name else None
        if report is not None and name is not None:
            if leaked := self.secrets.found_in(report):
                message = f"the report contains the runner's {', '.join(leaked)}"
                secret = Violation(code="SECRET_IN_EVIDENCE", message=message, file=name)
                return make_verdict(Reason.EVIDENCE, message, secret), None
            # Of a preset that promises no report for the gate it is one about something else. A client holds
            # evidence against what was asked for, which the other side of a paired run is not.
            role = "evidence" if preset.evidence else "report"
            self._files[self._file_name(side, name)] = (report, role if side.name == "workload" else "other")
        if (verdict := of_exit(preset, ended)) is not None:
            return verdict, None
        if preset.evidence is None or name is None:
            return make_verdict(Reason.OK, "the job ended with exit code 0"), None
        if report is None:
            return make_verdict(Reason.NO_EVIDENCE, "the job ended with exit code 0 but left no report"), None
        judgement = gate(report, binding=binding)
        broken = (*judgement.violations, *broken_promises(preset.evidence, judgement))
        return _of_gate(self._file_name(side, name), broken), judgement

    def _report(self, verdict: Verdict) -> JobReport:
        """The result, when there is space: a disk that is full for a moment must not cost the job's work."""
        deadline = time.monotonic() + _SPACE_S
        while True:
            try:
                result = self._result(verdict)
                return JobReport(result, verdict, time.monotonic() - self._began_at)
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise
                log.warning("%s: its result waits for disk space: %s", self.request.nonce, describe(error))
                time.sleep(_POLL_S)

    def _result(self, verdict: Verdict) -> ResultFiles:
        """The signed result."""
        request, preset, manifest = self.request, self.decision.preset, self.request.manifest
        identity = self.config.identity
        self._log.seek(0)
        commands = tuple(self._commands[name] for name in sorted(self._commands, reverse=True))
        is_cut = any(command.truncated for command in commands)
        files = {**self._files, LOG_NAME: (self.secrets.cut(self._log.read(), broken_off=is_cut), "log")}
        machine = {**self.config.machine, **self._machine}
        if self.config.policy.allow_unsandboxed:
            machine["allow_unsandboxed"] = True
        if (key := self.config.attestation_key()) is not None:
            machine[protocol.ATTESTATION_KEY_FACT] = dsse.public_hex(key.public_key)
        data = protocol.Result(
            nonce=request.nonce,
            request_commit=request.commit,
            workload_sha=manifest.workload_sha if manifest else None,
            preset=manifest.preset if manifest else None,
            preset_digest=preset.digest if preset else None,
            params=dict(self.decision.params or (manifest.params if manifest else {})),
            engine_source=preset.engine if preset else None,
            runner=protocol.RunnerFacts(
                name=identity.name, id=identity.id, version=__version__, machine=machine
            ),
            attempt=self.attempt,
            started_at=format_time(self._started),
            finished_at=format_time(self.now()),
            phase_seconds=self._seconds,
            commands=commands,
            files=tuple(
                protocol.File(path=path, sha256=hashlib.sha256(body).hexdigest(), bytes=len(body), role=role)
                for path, (body, role) in sorted(files.items())
            ),
            verdict=verdict,
            tools=dict(self.config.tools),
        ).to_bytes()
        contents = {path: content for path, (content, _) in files.items()}
        if key is not None:
            made = attestation.statements(data, contents)
            contents |= {path: dsse.sign(key, statement) for path, statement in made.items()}
        return ResultFiles(
            nonce=request.nonce,
            request_commit=request.commit,
            result_ref=manifest.result_ref if manifest else request.ref,
            result=data,
            signature=self.config.sign(data),
            files=contents,
        )


def _of_gate(name: str, broken: Sequence[Violation]) -> Verdict:
    """The verdict on a report by what is wrong with it."""
    if not broken:
        return make_verdict(Reason.OK, "the gate accepted the report")
    codes = ", ".join(dict.fromkeys(violation.code for violation in broken))
    named = (violation.model_copy(update={"file": name}) for violation in broken[:1000])
    return make_verdict(Reason.EVIDENCE, f"the gate rejected the report: {codes}", *named)


def _decode_seconds(judgement: Judgement | None) -> float:
    """Seconds a decoded token of the first arm under test, from a report that the gate accepted."""
    assert judgement is not None and judgement.report and judgement.figures  # noqa: S101, PT018 - it was accepted
    [arm, *_] = judgement.report.with_role("sut")
    rate = judgement.figures.arms[arm.name].decode_tokens_per_s
    if rate is None:
        raise Refusal(Reason.BAD_PARAMETER, "no tokens were decoded, so there is no speed to compare")
    return 1 / rate


def program_words(kind: str) -> list[str] | None:
    """The words for a placeholder that is a program of this installation; None: it is something else."""
    if kind == "python":
        return [sys.executable]
    return [sys.executable, "-I", "-m", kind] if kind in ("engine", "bridge") else None


def of_exit(preset: Preset, ended: JobExit) -> Verdict | None:
    """The verdict of a child that did not end well; None: it did, and its report decides."""
    code = ended.exit_code
    reason = Reason.RESOURCE_LIMIT
    if ended.timed_out:
        reason, said = Reason.TIMEOUT, "did not end within its time and was killed"
    elif ended.flooded:
        reason, said = Reason.OUTPUT_LIMIT, "printed too much and was killed"
    elif ended.breach is not None:
        said = f"{_exceeded(ended.breach)} and was killed"
    elif code == -signal.SIGXFSZ:
        said = "wrote a bigger file than it may"
    elif code is None:
        reason, said = Reason.RUNNER_ERROR, "ended, and its exit code could not be collected"
    elif code == preset.rejected_exit_code:
        reason, said = Reason.EVIDENCE, f"rejected the evidence it was given (exit code {code}); see the log"
    elif code != 0:
        how = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
        reason, said = Reason.EXIT_CODE, f"{how}; see the log"
    else:
        return None
    return make_verdict(reason, f"the job {said} (after {ended.seconds:.1f} s)")


def _exceeded(breach: Breach) -> str:
    used, limit = (f"{each / _GIB:.3g} GiB" for each in (breach.used, breach.allowed))
    if breach.what == "left":
        return f"left too little of the disk ({used})"
    if breach.what not in ("memory", "disk"):
        used, limit = str(breach.used), str(breach.allowed)
    return f"took more {breach.what} than it may ({used}, at most {limit})"
