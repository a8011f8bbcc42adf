"""One request from claim to result: workspace, run, gate, publish. Every way out is a verdict.

What may run was settled in `check` before the claim; what is read here of the request is typed values and
git objects. Each phase is timed. A claim that is lost stops the job, and then no result is given: it is the
next holder's. A failure of our own becomes ``failed/runner_error``, its traceback goes to the log only.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from bridge import __version__, presets
from bridge.bus.claims import Claim
from bridge.bus.git import Git
from bridge.errors import BridgeError, BusError, LeaseLost, MachineError, ParameterError, described
from bridge.evidence.redact import find_secrets, secrets_of
from bridge.manifest import format_time
from bridge.presets import Preset
from bridge.result import (
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
from bridge.runner import collect, facts, isolation, models, spool, workspace
from bridge.runner.check import Checked, Refusal, places
from bridge.runner.child import Ended, Enforced, Order, Supervised
from bridge.runner.folders import remove_tree
from bridge.runner.heartbeat import Heartbeat
from bridge.runner.station import Station
from bridge.runner.verdict import cancelled, judge, of_ending

LOG_NAME = "log.txt"
ENGINE = "${engine}"  # how the argv of a preset begins that runs the engine
# How long a result waits for room on the disk before it is put together without what the job brought.
_ROOM_S = 30.0
COMPILING = "compiling kernels, once on this machine"


def decodes(preset: Preset) -> bool:
    """Whether the engine runs a model in a preset's jobs, with mlx's compiled kernels."""
    return preset.argv[0] == ENGINE and bool(preset.models)


class Job:
    """One claimed request.

    Args:
        station: The runner.
        git: A repository that holds the request and its workload.
        checked: What `check.examine` found.
        claim: Ours.
        supervised: The lock and the child's keeper; None for a request that is refused.
        abort: True when the runner is to stop at once.
        look: Asks the remote whether this job shall stop; see `Heartbeat`.
        repair: Makes `git` anew, holding this request, when it turned out to be broken.
        say: Takes one line for the owner.
        clock: Monotonic seconds.
        now: The time of day (aware).
    """

    def __init__(
        self,
        station: Station,
        git: Git,
        checked: Checked,
        claim: Claim,
        supervised: Supervised | None,
        *,
        abort: Callable[[], bool],
        look: Callable[[], str | None] = lambda: None,
        repair: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._station = station
        self._git = git
        self._checked = checked
        self._claim = claim
        self._supervised = supervised
        self._abort = abort
        self._repair = repair
        self._say = say
        self._clock = clock
        self._now = now
        self._secrets = secrets_of(station.environment)
        self._room = isolation.Room(station.jobs / checked.pending.nonce)
        # Has no name, so nothing the job does to files can put another file in its place.
        self._log = tempfile.TemporaryFile(dir=station.folder)  # noqa: SIM115 - closed by `clean_up`
        self._heart = Heartbeat(
            claim,
            interval_s=station.beat_s,
            secrets=self._secrets,
            look=look,
            look_s=station.look_s,
            clock=clock,
        )
        self._seconds: dict[str, float] = {}
        self._commands: list[Command] = []
        self._files: dict[str, tuple[bytes, str]] = {}
        self._models: dict[str, models.Found] = {}
        self._tree_gone = False
        self._started = now()

    def run(self) -> tuple[spool.Entry, Verdict] | None:
        """Do the job; the signed result, ready to be published, or None when the claim was lost."""
        self._heart.start()
        try:
            self._room.make()
            verdict = self._work()
        except LeaseLost:
            return None
        except Refusal as refusal:
            verdict = Verdict(status=Status.REFUSED, reason=refusal.reason, message=_sentence(refusal))
        except BridgeError as error:
            verdict = Verdict(status=Status.FAILED, reason=Reason.RUNNER_ERROR, message=_sentence(error))
        except Exception:  # our own bug: the requester gets a result, the log gets the traceback
            self._note(traceback.format_exc())
            message = "the runner itself failed; the log has the details"
            verdict = Verdict(status=Status.FAILED, reason=Reason.RUNNER_ERROR, message=message)
        finally:
            self._heart.stop()
            self._end_tree()
        if self._heart.lost:
            return None
        try:
            return self._sealed_with_room(verdict), verdict
        except Exception as error:  # every accepted request ends in a result, if only in the barest one
            message = f"the runner could not put the result together: {described(error)}"[:4000]
            verdict = Verdict(status=Status.FAILED, reason=Reason.RUNNER_ERROR, message=message)
            return self._sealed(verdict, bare=True), verdict

    def _sealed_with_room(self, verdict: Verdict) -> spool.Entry:
        """`_sealed`; a disk that is full for a moment must not cost what the job brought."""
        deadline, said = time.monotonic() + _ROOM_S, False
        while True:
            try:
                return self._sealed(verdict)
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise
                if not said:
                    self._say(f"{self._checked.pending.nonce}: its result waits for room: {described(error)}")
                said = True
                time.sleep(0.5)

    def _end_tree(self) -> None:
        """See to it that nothing of the job runs any more."""
        if self._supervised is None:
            return
        if self._tree_gone:
            self._supervised.let_go()
        else:
            self._supervised.close()

    def give_up(self, last: RunStatus | None) -> tuple[spool.Entry, Verdict]:
        """Answer a request whose earlier attempts were all lost, without another one.

        Args:
            last: The last sign of the last of them; what it says goes into the log.
        """
        if last is not None:
            seen = f"attempt {last.attempt} on {last.runner} was last seen {last.phase} at {last.updated_at}"
            self._note("\n".join([f"runner: {seen}, after {last.elapsed_s:.0f} s", *last.log_tail, ""]))
        message = f"{self._claim.attempt - 1} attempts lost their runner; not tried again"
        return self._unstarted(Verdict(status=Status.LOST, reason=Reason.ATTEMPTS, message=message))

    def cancel(self, wish: str) -> tuple[spool.Entry, Verdict]:
        """Answer a request that somebody wants stopped before it was started."""
        return self._unstarted(cancelled(Reason.REQUESTED, f"{wish}; it had not been started"))

    def _unstarted(self, verdict: Verdict) -> tuple[spool.Entry, Verdict]:
        return self._sealed(verdict), verdict

    def clean_up(self) -> bool:
        """Remove the job's folders and whatever it put beside them; whether nothing remains."""
        self._log.close()
        removed = [remove_tree(left) for left in list(self._station.jobs.iterdir())]
        return all(removed)

    def _work(self) -> Verdict:
        if self._checked.refusal is not None:
            raise self._checked.refusal
        preset, supervised = self._checked.preset, self._supervised
        if preset is None or supervised is None:
            raise ValueError("a request that is not refused has a preset and a supervisor")
        with self._phase(Phase.WORKSPACE):
            try:
                self._lay_out(preset)
            except BusError:  # objects that were fetched cannot be read: the copy here is at fault
                self._repair()
                self._room.make()
                self._lay_out(preset)
            self._find_models(preset)
            argv = self._argv(preset)
            if decodes(preset):
                self._provide_kernels()
        with self._phase(Phase.RUNNING):
            began = self._now()
            ended = self._run_child(preset, supervised, argv)
            finished = self._now()
        if ended.stopped:
            if self._heart.lost:
                raise LeaseLost("the claim is no longer ours")
            if self._heart.wish is not None:
                return cancelled(Reason.REQUESTED, f"{self._heart.wish}; stopped after {ended.seconds:.1f} s")
            return cancelled(Reason.SHUTDOWN, "the runner was told to stop")
        with self._phase(Phase.GATING):
            return self._judged(preset, ended, began, finished)

    def _lay_out(self, preset: Preset) -> None:
        if preset.workspace == "none":
            return
        asked = {name: str(self._checked.params[name]) for name, item in preset.params.items() if item.format}
        whole = preset.workspace == "full"
        try:
            laid = workspace.lay_out(
                self._git,
                self._workload(),
                self._room.workspace,
                None if whole else list(asked.values()),
            )
        except workspace.WorkloadRefused as error:
            raise Refusal.of(Reason.BAD_WORKLOAD, error) from None
        for name, path in asked.items():
            if not (self._room.workspace / path).exists():
                message = f"parameter {name}: the commit {self._workload()[:12]} has no {path!r}"
                raise Refusal(Reason.BAD_PARAMETER, message)
            if path in laid.pointers:
                message = f"parameter {name}: {path!r} is a Git LFS pointer, not the file itself"
                raise Refusal(Reason.BAD_WORKLOAD, message)

    def _find_models(self, preset: Preset) -> None:
        """Where the preset's models lie here, said in the log and to whoever waits."""
        own = places(self._station, workload=self._room.workspace if preset.runs_repo_code else None)
        try:
            self._models = models.resolve(preset.models, own)
        except models.ModelMissing as error:
            raise Refusal.of(Reason.MODEL_MISSING, error) from None
        for name, found in self._models.items():
            self._note(f"runner: model {name}: {found}\n")
            self._heart.line(f"model {name}: {found}")

    def _provide_kernels(self) -> None:
        """Give the job the machine's compiled kernels, made now if they never were. Never fails the job."""
        kernels = self._station.kernels
        try:
            if kernels.wanted:
                self._heart.line(f"progress 0/1 {COMPILING}")
                kernels.make(self._is_to_stop)
                self._heart.line(f"progress 1/1 {COMPILING}")
            kernels.copy_to(self._room.temporary)
        except (MachineError, OSError) as error:
            self._note(f"runner: {described(error)}\n")

    def _argv(self, preset: Preset) -> list[str]:
        try:
            return presets.argv(preset, self._checked.params, self._resolve)
        except ParameterError as error:
            raise Refusal.of(Reason.BAD_PARAMETER, error) from None

    def _resolve(self, kind: str, name: str) -> list[str]:
        """What ``${kind:name}`` of a preset stands for on this machine, for this job."""
        station, preset = self._station, self._checked.preset
        if preset is None:
            raise ValueError("only a known preset has an argv")
        if kind in ("engine", "bridge"):
            return [sys.executable, "-I", "-m", kind]
        if kind == "python":
            return [sys.executable]
        if kind == "out":
            return [str(self._room.out / f"{name}.json")]
        if kind == "model":
            return [str(self._models[name].folder)]
        if kind == "env":
            if name not in station.environment:
                raise Refusal(Reason.MACHINE_UNFIT, f"the runner's environment has no {name}")
            return [station.environment[name]]
        return [
            *("--request-nonce", self._checked.pending.nonce),
            *("--workload-sha", self._workload()),
            *("--preset-digest", preset.digest),
            *("--engine-source", preset.engine),
        ]

    def _run_child(self, preset: Preset, supervised: Supervised, argv: list[str]) -> Ended:
        manifest = self._checked.manifest
        order = Order(
            argv=tuple(argv),
            env=isolation.environment(self._room, self._station.environment),
            cwd=self._room.workspace,
            limits=isolation.limits(supervised.enforced),
            timeout_s=self._station.policy.timeout_s(preset, manifest.timeout_s if manifest else None),
        )
        ended = supervised.run(
            order,
            self._log,
            on_line=self._heart.line,
            stop=self._is_to_stop,
        )
        self._tree_gone = ended.survivors == 0
        self._commands.append(
            Command(
                argv=tuple(argv),
                exit_code=ended.exit_code,
                seconds=ended.seconds,
                log=LOG_NAME,
                timed_out=ended.timed_out,
                truncated=ended.flooded,
            )
        )
        return ended

    def _is_to_stop(self) -> bool:
        return self._heart.lost or self._heart.wish is not None or self._abort()

    def _judged(self, preset: Preset, ended: Ended, began: datetime, finished: datetime) -> Verdict:
        """How the child ended, then what the gate says of its report."""
        name = presets.evidence_name(preset)
        try:
            report = collect.evidence(self._room.out, name) if name else None
        except collect.NotCollected as error:
            return Verdict(status=Status.FAILED, reason=Reason.NO_EVIDENCE, message=str(error))
        if report is not None and (leaked := find_secrets(report, self._secrets)):
            message = f"the report contains the runner's {', '.join(leaked)}"
            violation = Violation(code="SECRET_IN_EVIDENCE", message=message, file=name)
            return Verdict(
                status=Status.REJECTED, reason=Reason.EVIDENCE, message=message, violations=(violation,)
            )
        if report is not None and name is not None:
            self._files[name] = (report, "evidence")
        ending = of_ending(preset, ended)
        if ending is not None:
            return ending
        return judge(
            preset,
            report,
            name,
            nonce=self._checked.pending.nonce,
            workload_sha=self._workload(),
            began=began,
            finished=finished,
        )

    def _sealed(self, verdict: Verdict, *, bare: bool = False) -> spool.Entry:
        """The result with everything it names, in its exact bytes, signed where that is possible.

        With `bare`, nothing that came from the request or the job is in it, except who asked for what commit.
        """
        station, checked = self._station, self._checked
        manifest, preset = checked.manifest, checked.preset
        params = dict(checked.params) or (manifest.params if manifest else {})
        if bare:
            params, self._files, self._commands = {}, {}, []
        else:
            self._files[LOG_NAME] = (collect.log(self._log, self._secrets), "log")
        enforced = self._supervised.enforced if self._supervised is not None else None
        result = Result(
            nonce=checked.pending.nonce,
            request_commit=checked.pending.commit,
            workload_sha=manifest.workload_sha if manifest else None,
            preset=manifest.preset if manifest else None,
            preset_digest=preset.digest if preset else None,
            params=params,
            engine_source=preset.engine if preset else None,
            runner=self._runner(enforced),
            attempt=self._claim.attempt,
            started_at=format_time(self._started),
            finished_at=format_time(self._now()),
            phase_seconds=self._seconds,
            commands=tuple(self._commands),
            files=tuple(_described(path, data, role) for path, (data, role) in sorted(self._files.items())),
            verdict=verdict,
            tools=dict(station.tools),
        ).to_bytes()
        return spool.Entry(
            nonce=checked.pending.nonce,
            request_commit=checked.pending.commit,
            result_ref=manifest.result_ref if manifest else checked.pending.ref,
            result=result,
            signature=station.sign(result),
            files={path: data for path, (data, _) in self._files.items()},
        )

    def _runner(self, enforced: Enforced | None) -> RunnerFacts:
        station = self._station
        machine = {**station.machine, **facts.isolation(enforced), **facts.of_models(self._models)}
        return RunnerFacts(
            name=station.identity.name, id=station.identity.id, version=__version__, machine=machine
        )

    def _workload(self) -> str:
        if self._checked.manifest is None:
            raise ValueError("only a request with a manifest has a workload")
        return self._checked.manifest.workload_sha

    @contextlib.contextmanager
    def _phase(self, phase: Phase) -> Iterator[None]:
        self._heart.enter(phase)
        began = self._clock()
        try:
            yield
        finally:
            self._seconds[phase.value] = round(self._clock() - began, 4)

    def _note(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._log.write(text.encode("utf-8", "replace"))


def _sentence(error: BridgeError) -> str:
    return (error.message if error.remedy is None else f"{error.message}; {error.remedy}")[:4000]


def _described(path: str, data: bytes, role: str) -> File:
    import hashlib

    return File(path=path, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data), role=role)
