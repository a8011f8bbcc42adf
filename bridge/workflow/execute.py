"""The job on the Mac: one request, examined by the machine's own policy, run, sealed, laid out as a parcel.

A refusal is a result, too, and so is a run that somebody cancelled. What may run is asked of the same
questions as the embedded runner's (`bridge.runner.check`); that it is this machine's turn, GitHub's fleet has
decided, so there is no claim. A result that was sealed here once is given again, and its job not run again,
when its run is asked for once more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Event

from bridge.bus.mirror import Pending, Standing
from bridge.bus.requests import has_result
from bridge.errors import BusError, MachineError, described
from bridge.protocol.manifest import Manifest
from bridge.protocol.result import Reason, Status, Verdict, parse_result
from bridge.runner.answered import Answered
from bridge.runner.check import Checked, Refusal, examine
from bridge.runner.child import MachineBusy, Supervised
from bridge.runner.folders import remove_tree
from bridge.runner.hearsay import Hearsay
from bridge.runner.job import Job
from bridge.runner.ledger import Ledger
from bridge.runner.lineage import Lineage
from bridge.runner.peers import Peers
from bridge.runner.policy.hours import shown
from bridge.runner.policy.types import BRANCHES
from bridge.runner.reserve import Reserve
from bridge.runner.sessions import NameTaken, only_one
from bridge.runner.spool import Entry, Spool
from bridge.runner.station import Station
from bridge.runner.verdict import cancelled
from bridge.runner.wishes import Wishes
from bridge.workflow import parcel
from bridge.workflow.asked import Asked
from bridge.workflow.local import LEFT, TRANSPORT, Copy, unreachable
from bridge.workflow.log import Log
from bridge.workflow.run import Turn

CANCELLED = "the workflow run was cancelled"
# Sealed results that are kept to be given again.
_KEPT = 32
_POLL_S = 1.0


@dataclass(frozen=True)
class Executed:
    """What came of a run.

    Attributes:
        verdict: How the request ended.
        parcel: Where its result lies.
        signature: Detached, of ``result.json``; None: it is unsigned.
        is_repeated: It was sealed by an earlier run.
    """

    verdict: Verdict
    parcel: parcel.Parcel
    signature: bytes | None
    is_repeated: bool = False


class Executor:
    """Executes requests of a workflow's runs on one machine.

    Args:
        station: The machine's runner.
        log: Takes what happens, and what a job prints.
        stop: Set when the run is cancelled.
        clock: Monotonic seconds.
        now: The time of day (aware).
    """

    def __init__(
        self,
        station: Station,
        log: Log,
        stop: Event,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._station = station
        self._log = log
        self._stop = stop
        self._clock = clock
        self._now = now
        self._spool = Spool(station.folder / f"sealed-{station.tag}")
        self._copy = Copy(station.folder / f"asked-{station.tag}.git", station.remote, say=log.say)

    def execute(self, asked: Asked, out: Path, *, attempt: int) -> Executed | None:
        """Execute one request; None: it is one that a workflow leaves alone.

        Args:
            asked: The request.
            out: Folder for the result; must be empty, or not exist.
            attempt: Which attempt of the run this is, from 1.

        Raises:
            MachineError: `out` holds something, or this machine lacks something; there is no result.
            BusError: The request is not to be had, so nothing is known of it; there is no result.
        """
        parcel.require_free(out)
        with self._alone():
            standing = self._copy.bring(asked)
            if (entry := self._sealed_before(asked)) is not None:
                self._log.say("this request was executed here before: its sealed result is given again")
                return self._delivered(entry, out, is_repeated=True)
            checked = self._examined(asked, standing)
            manifest = checked.manifest
            if manifest is not None and manifest.transport != TRANSPORT:
                self._log.say(f"left alone: {LEFT}")
                return None
            entry = self._run(checked, attempt)
            self._keep(entry)
            return self._delivered(entry, out)

    def _delivered(self, entry: Entry, out: Path, *, is_repeated: bool = False) -> Executed:
        verdict = parse_result(entry.result).verdict
        self._log.say(f"{verdict.status}/{verdict.reason} {verdict.message}".rstrip())
        return Executed(verdict, parcel.write(entry, out), entry.signature, is_repeated)

    # Examined ---------------------------------------------------------------------------------------------

    def _examined(self, asked: Asked, standing: Standing) -> Checked:
        pending = Pending(asked.nonce, asked.commit, asked.branch)
        station, git = self._station, self._copy.git
        if not self._copy.holds(asked.commit):
            raise unreachable(asked)
        folder = git.directory
        known = self._answers()
        answered = known.knows(asked.nonce) or self._copy.is_answered(asked, standing)
        checked = examine(
            git,
            pending,
            station,
            now=self._now(),
            answered={asked.nonce} if answered else (),
            lineage=Lineage(station, git, folder.with_name(f"workloads-of-{folder.name}")).check,
        )
        if checked.refusal is None and checked.manifest is not None and station.policy.allow_refs is not None:
            return self._placed(checked, checked.manifest, standing, asked)
        return checked

    def _answers(self) -> Answered:
        """What is known here of answers: own, and those of this machine's other runners."""
        station, name = self._station, f"answered-{self._station.tag}"
        say = self._log.say
        hearsay = Hearsay(station, self._copy.mirror, Peers(station, say), name, say=say, now=self._now)
        ledger = Ledger(station.folder / name, self._now())
        return Answered(station, self._copy.git, ledger, hearsay, now=self._now)

    def _placed(self, checked: Checked, manifest: Manifest, standing: Standing, asked: Asked) -> Checked:
        """Refuse what does not stand on the branch it names, where the policy goes by branches."""
        tip, nonce = standing.branch, asked.nonce
        stands = tip == asked.commit or (tip is not None and has_result(self._copy.git, tip, nonce))
        if manifest.result_ref == asked.branch and stands:
            return checked
        branch = manifest.result_ref.removeprefix(BRANCHES)
        message = (
            f"the branch {branch} does not hold this request, and this machine's policy goes by branches"
        )
        return replace(checked, refusal=Refusal(Reason.POLICY, message, key=("allow_refs",)))

    # Run --------------------------------------------------------------------------------------------------

    def _run(self, checked: Checked, attempt: int) -> Entry:
        """Do the request; its sealed result."""
        wishes = Wishes(self._station, self._copy.mirror, say=self._log.say)
        supervised: Supervised | None = None
        wish: str | None = None
        if checked.refusal is None:
            wish = self._first_wish(checked, wishes)
            if wish is None:
                supervised, wish = self._machine(checked, wishes)
        asked = Asked(checked.pending.nonce, checked.pending.commit, checked.pending.ref or "")

        def look() -> str | None:
            return CANCELLED if self._stop.is_set() else wishes.ask(checked)

        try:
            job = Job(
                self._station,
                self._copy.git,
                checked,
                Turn(attempt, self._log.say),
                supervised,
                abort=self._stop.is_set,
                aborted=cancelled(Reason.REQUESTED, CANCELLED),
                look=look,
                repair=lambda: self._copy.renew(asked),
                say=self._log.say,
                show=self._log.show,
                clock=self._clock,
                now=self._now,
            )
            try:
                with self._log.quiet():
                    done = job.cancel(wish) if wish is not None else job.run()
            finally:
                if not job.clean_up():
                    self._log.say("what the job left could not be removed")
        finally:
            if supervised is not None:
                supervised.close()
        if done is None:
            raise ValueError("a workflow run's hold on its request cannot be lost")
        if checked.refusal is not None and checked.refusal.key is not None:
            self._log.say(f"by {self._station.policy.decision(checked.refusal.key)}")
        return done[0]

    def _first_wish(self, checked: Checked, wishes: Wishes) -> str | None:
        """Who wants it not even to begin; a branch that is away has time to come back."""
        said = False
        while (wish := wishes.ask(checked)) is None and wishes.misses_branch(checked.pending.nonce):
            if not said:
                self._log.say("waiting: its branch is not there, which may be for a moment")
            said = True
            if self._stop.wait(_POLL_S):
                return CANCELLED
        return wish

    def _machine(self, checked: Checked, wishes: Wishes) -> tuple[Supervised | None, str | None]:
        """Wait for the owner's hours and for the machine; or who wants no more waiting."""
        policy, reserve = self._station.policy, Reserve(self._station)
        said = ""
        while True:
            if policy.refuses_outside_hours or policy.is_open(self._now()):
                try:
                    return reserve.take(checked.preset), None
                except MachineBusy as busy:
                    why = busy.message
            else:
                why = f"jobs may begin within {shown(policy.hours or ())} of this machine's time"
            if why != said:
                self._log.say(f"waiting: {why}")
                said = why
            if self._stop.wait(_POLL_S):
                return None, CANCELLED
            with contextlib.suppress(BusError, MachineError, OSError):  # a remote that is away says nothing
                if (wish := wishes.ask(checked)) is not None:
                    return None, wish

    # Kept -------------------------------------------------------------------------------------------------

    def _sealed_before(self, asked: Asked) -> Entry | None:
        """The result that an earlier run sealed of the same commit; None: there is none that can be read."""
        if asked.nonce not in self._spool:
            return None
        try:
            entry = self._spool.read(asked.nonce)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._log.say(f"an earlier result of this request is of no use: {described(error)}")
            return None
        return entry if entry.request_commit == asked.commit else None

    def _keep(self, entry: Entry) -> None:
        """Remember that this request was answered, and how; one that was cancelled may be run after all."""
        verdict = parse_result(entry.result).verdict
        if verdict.status is Status.CANCELLED or verdict.reason is Reason.REPLAYED:
            return
        try:
            Ledger(self._station.folder / f"answered-{self._station.tag}", self._now()).add(
                entry.nonce, entry.until
            )
            self._spool.put(entry)
            for nonce in self._spool.nonces()[:-_KEPT]:
                self._spool.remove(nonce)
        except OSError as error:
            self._log.say(f"that it was executed is not kept: {described(error)}")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Be the one process that has the runner's name, waiting for it; its folders are made and empty."""
        station, said = self._station, False
        while True:
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(only_one(station))
                except NameTaken as error:
                    if self._stop.is_set():
                        raise
                    if not said:
                        self._log.say(f"waiting: {error.message}")
                    said = True
                else:
                    self._spool.tidy()
                    for folder in (station.temporary, station.jobs):
                        remove_tree(folder)
                        folder.mkdir(exist_ok=True, mode=0o700)
                    yield
                    return
            self._stop.wait(_POLL_S)
