"""One request from claim to result: prepared, run, gated, sealed. Every way out is a verdict.

What may run was settled in `check` before the claim; what is read here of the request is typed values and
git objects. Each phase is timed. A hold on the request that is lost stops the job, and then no result is
given: it is the next holder's. A failure of our own becomes ``failed/runner_error``, its traceback goes to
the log only. What a job gets is made in `prepare`, what it left is put together in `seal`.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from bridge import presets
from bridge.bus.git import Git
from bridge.errors import BridgeError, BusError, LeaseLost, described
from bridge.presets import Preset
from bridge.protocol.manifest import Manifest
from bridge.protocol.result import Command, Phase, Reason, RunStatus, Status, Verdict, Violation
from bridge.runner import awake, collect, facts, private
from bridge.runner.check import Checked, Refusal
from bridge.runner.child import Ended, Order, Supervised
from bridge.runner.folders import remove_tree
from bridge.runner.heartbeat import Heartbeat
from bridge.runner.hold import Hold
from bridge.runner.isolation.room import Room, allowed, environment, resource_limits
from bridge.runner.prepare import Preparation
from bridge.runner.seal import LOG_NAME, Record, seal, with_room
from bridge.runner.spool import Entry
from bridge.runner.station import Station
from bridge.runner.verdict import cancelled, judge, of_ending

SHUTDOWN = cancelled(Reason.SHUTDOWN, "the runner was told to stop")


class Job:
    """One request that is ours.

    Args:
        station: The runner.
        git: A repository that holds the request and its workload.
        checked: What `check.examine` found.
        hold: What keeps the request ours: a claim, or a workflow run.
        supervised: The lock and the child's keeper; None for a request that is refused.
        abort: True when the runner is to stop at once.
        aborted: How a job ends that `abort` stopped.
        look: Asks the remote whether this job shall stop; see `Heartbeat`.
        repair: Makes `git` anew, holding this request, when it turned out to be broken.
        say: Takes one line for the owner.
        show: Takes each line of the job's output, without this machine's secrets.
        clock: Monotonic seconds.
        now: The time of day (aware).
    """

    def __init__(
        self,
        station: Station,
        git: Git,
        checked: Checked,
        hold: Hold,
        supervised: Supervised | None,
        *,
        abort: Callable[[], bool],
        aborted: Verdict = SHUTDOWN,
        look: Callable[[], str | None] = lambda: None,
        repair: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda _: None,
        show: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._station = station
        self._git = git
        self._checked = checked
        self._attempt = hold.attempt
        self._supervised = supervised
        self._abort = abort
        self._aborted = aborted
        self._repair = repair
        self._say = say
        self._clock = clock
        self._now = now
        self._secrets = private.secrets(station)
        self._room = Room(station.jobs / checked.pending.nonce)
        # Has no name, so nothing the job does to files can put another file in its place.
        self._log = tempfile.TemporaryFile(dir=station.folder)  # noqa: SIM115 - closed by `clean_up`
        self._heart = Heartbeat(
            hold,
            interval_s=station.beat_s,
            secrets=self._secrets,
            look=look,
            look_s=station.look_s,
            say=self._say_of_it,
            show=show,
            clock=clock,
        )
        self._record = Record(
            hold.attempt, started=now(), enforced=None if supervised is None else supervised.enforced
        )
        self._tree_gone = False
        self._began = False

    def run(self) -> tuple[Entry, Verdict] | None:
        """Do the job; the signed result, ready to be published, or None when the hold was lost."""
        self._began = True
        self._heart.start()
        try:
            self._room.make()
            with awake.kept(self._say_of_it) as self._record.kept_awake:
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
            return with_room(lambda: self._sealed(verdict), self._say_of_it), verdict
        except Exception as error:  # every accepted request ends in a result, if only in the barest one
            message = f"the runner could not put the result together: {described(error)}"[:4000]
            verdict = Verdict(status=Status.FAILED, reason=Reason.RUNNER_ERROR, message=message)
            return with_room(lambda: self._sealed(verdict, bare=True), self._say_of_it), verdict

    def _end_tree(self) -> None:
        """See to it that nothing of the job runs any more."""
        if self._supervised is None:
            return
        if self._tree_gone:
            self._supervised.let_go()
        else:
            self._supervised.close()

    def give_up(self, last: RunStatus | None) -> tuple[Entry, Verdict]:
        """Answer a request whose earlier attempts were all lost, without another one.

        Args:
            last: The last sign of the last of them; what it says goes into the log.
        """
        if last is not None:
            seen = f"attempt {last.attempt} on {last.runner} was last seen {last.phase} at {last.updated_at}"
            self._note("\n".join([f"runner: {seen}, after {last.elapsed_s:.0f} s", *last.log_tail, ""]))
        message = f"{self._attempt - 1} attempts lost their runner; not tried again"
        return self._unstarted(Verdict(status=Status.LOST, reason=Reason.ATTEMPTS, message=message))

    def cancel(self, wish: str) -> tuple[Entry, Verdict]:
        """Answer a request that somebody wants stopped before it was started."""
        return self._unstarted(cancelled(Reason.REQUESTED, f"{wish}; it had not been started"))

    def _unstarted(self, verdict: Verdict) -> tuple[Entry, Verdict]:
        return self._sealed(verdict), verdict

    def clean_up(self) -> bool:
        """Remove the job's folders and whatever it put beside them; whether nothing remains.

        One that was not begun has none: what lies there is of the job that runs.
        """
        self._log.close()
        if not self._began:
            return True
        removed = [remove_tree(left) for left in list(self._station.jobs.iterdir())]
        return all(removed)

    def _work(self) -> Verdict:
        if self._checked.refusal is not None:
            raise self._checked.refusal
        preset, manifest, supervised = self._checked.preset, self._checked.manifest, self._supervised
        if preset is None or manifest is None or supervised is None:
            raise ValueError("a request that is not refused has a manifest, a preset and a supervisor")
        with self._phase(Phase.WORKSPACE):
            argv = self._prepared(preset, manifest)
        with self._phase(Phase.RUNNING):
            began = self._now()
            ended = self._run_child(preset, manifest, supervised, argv)
            finished = self._now()
        if ended.stopped:
            if self._heart.lost:
                raise LeaseLost("the request is no longer ours")
            if self._heart.wish is not None:
                return cancelled(Reason.REQUESTED, f"{self._heart.wish}; stopped after {ended.seconds:.1f} s")
            return self._aborted
        with self._phase(Phase.GATING):
            return self._judged(preset, manifest, ended, began, finished)

    def _prepared(self, preset: Preset, manifest: Manifest) -> list[str]:
        """Make what the job needs; its argv."""
        preparation = Preparation(
            station=self._station,
            git=self._git,
            nonce=self._checked.pending.nonce,
            workload=manifest.workload_sha,
            preset=preset,
            params=self._checked.params,
            room=self._room,
            note=self._note,
            tell=self._heart.line,
        )
        try:
            preparation.lay_out(self._is_to_stop)
        except BusError:  # objects that were fetched cannot be read: the copy here is at fault
            self._repair()
            self._room.make()
            preparation.lay_out(self._is_to_stop)
        self._record.models = preparation.find_models()
        self._record.inputs = facts.of_inputs(preset, self._record.models)
        argv = preparation.argv(self._record.models)
        preparation.provide_kernels(self._is_to_stop)
        return argv

    def _run_child(
        self, preset: Preset, manifest: Manifest, supervised: Supervised, argv: list[str]
    ) -> Ended:
        policy = self._station.policy
        order = Order(
            argv=tuple(argv),
            env=environment(self._room, self._station.environment, policy.environment),
            room=self._room.root,
            cwd=self._room.workspace,
            limits=resource_limits(policy.limits, supervised.enforced),
            timeout_s=policy.timeout_s(preset, manifest.timeout_s),
            output_limit=policy.limits.output_bytes,
            allowed=allowed(policy.limits, facts.memory_bytes()),
        )
        ended = supervised.run(
            order,
            self._log,
            on_line=self._heart.line,
            stop=self._is_to_stop,
        )
        self._tree_gone = ended.survivors == 0
        self._record.survivors = ended.survivors
        if ended.strays:
            self._note(f"runner: {ended.strays} processes had left the job's tree and were killed\n")
        self._record.commands.append(
            Command(
                argv=tuple(map(self._secrets.cut_text, argv)),
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

    def _judged(
        self, preset: Preset, manifest: Manifest, ended: Ended, began: datetime, finished: datetime
    ) -> Verdict:
        """How the child ended, then what the gate says of its report."""
        name = presets.evidence_name(preset)
        try:
            report = collect.evidence(self._room.out, name) if name else None
        except collect.NotCollected as error:
            return Verdict(status=Status.FAILED, reason=Reason.NO_EVIDENCE, message=str(error))
        if report is not None and (leaked := self._secrets.found_in(report)):
            message = f"the report contains the runner's {', '.join(leaked)}"
            violation = Violation(code="SECRET_IN_EVIDENCE", message=message, file=name)
            return Verdict(
                status=Status.REJECTED, reason=Reason.EVIDENCE, message=message, violations=(violation,)
            )
        if report is not None and name is not None:
            # Of a preset that promises no report for the gate it is one about something else.
            self._record.files[name] = (report, "evidence" if preset.evidence else "report")
        ending = of_ending(preset, ended)
        if ending is not None:
            return ending
        return judge(
            preset,
            report,
            name,
            nonce=self._checked.pending.nonce,
            workload_sha=manifest.workload_sha,
            began=began,
            finished=finished,
        )

    def _sealed(self, verdict: Verdict, *, bare: bool = False) -> Entry:
        """The result; with `bare`, without the log and whatever else the job brought."""
        if not bare:
            self._record.files[LOG_NAME] = (self._log_so_far(), "log")
        return seal(
            self._station,
            self._checked,
            self._record,
            verdict,
            finished=self._now(),
            say=self._say_of_it,
            bare=bare,
        )

    def _log_so_far(self) -> bytes:
        flooded = any(command.truncated for command in self._record.commands)
        return collect.log(self._log, self._secrets, broken_off=flooded)

    @contextlib.contextmanager
    def _phase(self, phase: Phase) -> Iterator[None]:
        self._heart.enter(phase)
        began = self._clock()
        try:
            yield
        finally:
            self._record.seconds[phase.value] = round(self._clock() - began, 4)

    def _say_of_it(self, line: str) -> None:
        self._say(f"{self._checked.pending.nonce}: {line}")

    def _note(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._log.write(text.encode("utf-8", "replace"))


def _sentence(error: BridgeError) -> str:
    return (error.message if error.remedy is None else f"{error.message}; {error.remedy}")[:4000]
