"""One request in its turn: examined, claimed, run and answered; or left alone, for now or for somebody else.

How it becomes ours is in `taking`, what happens to it then in `job`, how its answer gets away in `outbox`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from datetime import datetime

from bridge.bus.mirror import Mirror, Pending
from bridge.errors import described
from bridge.protocol.result import Reason, Status, Verdict
from bridge.protocol.runner_info import Work
from bridge.runner.answered import Answered
from bridge.runner.begun import Begun
from bridge.runner.check import Checked
from bridge.runner.child import Supervised
from bridge.runner.hearing import Hearing
from bridge.runner.job import Job
from bridge.runner.opening import Opening
from bridge.runner.outbox import Outbox
from bridge.runner.policy.hours import shown
from bridge.runner.reserve import Reserve
from bridge.runner.spool import Entry
from bridge.runner.station import Station
from bridge.runner.taking import Desk, Taken
from bridge.runner.turns import Turn
from bridge.runner.waiting_cancels import WaitingCancels
from bridge.runner.wishes import Wishes
from bridge.runner.yielding import Yielding

MAX_ATTEMPTS = 3


class Clerk:
    """Who does a runner's requests, one after the other.

    Args:
        station: The runner.
        mirror: Its copy of the queue.
        desk: Where requests are examined and claimed.
        begun: Takes down each attempt that begins.
        wishes: Who wants them stopped.
        answered: Which had their answer.
        reserve: Supervisors for jobs.
        outbox: Takes results.
        busy: Is told what a running job is, again and again.
        took: Is told of which preset a job ended well, and after how many seconds.
        cancelled: Is told of each request that was answered as cancelled while another ran.
        say: Takes one line for the owner.
        clock: Monotonic seconds.
        now: The time of day (aware).
    """

    def __init__(
        self,
        station: Station,
        mirror: Mirror,
        desk: Desk,
        *,
        begun: Begun,
        wishes: Wishes,
        answered: Answered,
        reserve: Reserve,
        outbox: Outbox,
        busy: Callable[[Work], None],
        took: Callable[[str, float], None],
        cancelled: Callable[[], None],
        say: Callable[[str], None],
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._station = station
        self._mirror = mirror
        self._desk = desk
        self._begun = begun
        self._wishes = wishes
        self._answered = answered
        self._reserve = reserve
        self._outbox = outbox
        self._busy = busy
        self._took = took
        self._cancelled = cancelled
        self._say = say
        self._clock = clock
        self._now = now
        self._opening = Opening(station, now=now)
        self._yielding = Yielding(station, mirror.git, clock=clock, now=now)
        # How often this process took a request that nevertheless stayed pending: bounds every loop.
        self._tries: dict[str, int] = {}
        self._abort = threading.Event()
        self._waiting_cancels = WaitingCancels(self._cancel_waiting, say=say)

    def abort(self) -> None:
        """Stop the running job and every later one; they end as ``cancelled/shutdown``."""
        self._abort.set()

    def look_again(self) -> None:
        """The owner's files changed: other rules may refuse what waits."""
        self._opening.keep(())

    def update(self, nonces: Collection[str]) -> None:
        """Forget every request that is not pending any more.

        Args:
            nonces: Those that are.
        """
        self._tries = {nonce: tries for nonce, tries in self._tries.items() if nonce in nonces}
        self._yielding.keep(nonces)
        self._opening.keep(nonces)

    def leaves_alone(self, nonce: str) -> bool:
        """Whether to take a request is of no use now: it was taken too often, or waits for the hours."""
        if self._tries.get(nonce, 0) > MAX_ATTEMPTS:
            return True
        return self._opening.holds(nonce, wished=nonce in self._wishes)

    def take(self, pending: Pending, turn: Turn, *, only_cancelled: bool = False) -> bool:
        """Examine, claim, run and publish one request; False when it is not ours to take (now).

        Args:
            pending: The request.
            turn: Whose turn it is.
            only_cancelled: Take it only if it is cancelled, so that nothing is run.

        Raises:
            MachineBusy: Another job has the machine.
            RemoteUnreachable: The remote did not answer.
        """
        attempt, silent = self._desk.place(pending, turn.requester)
        if attempt is None:
            return False
        self._desk.begin(pending, attempt)
        answered = self._answered.knows(pending.nonce)
        checked = self._desk.examine(pending, {pending.nonce} if answered else (), turn.over_quota)
        if checked is None:
            return False
        if checked.manifest is not None and checked.manifest.transport not in self._station.transports:
            return False
        if answered and not self._desk.is_open(pending):
            return False  # the mirror still shows the branch as it was before the answer
        if self._leaves(checked):
            return False
        if checked.refusal is not None and checked.refusal.reason is Reason.REPLAYED:
            self._tries[pending.nonce] = MAX_ATTEMPTS + 1
        cancelled = self._wishes.counted(checked) is not None
        if only_cancelled and not cancelled:
            return False
        runs = checked.refusal is None and attempt <= MAX_ATTEMPTS and not cancelled
        if runs and self._waits(checked):
            return False
        supervised = self._reserve.take(checked.preset) if runs and self._opening.is_open else None
        try:
            taken = self._desk.take(checked, silent)
            if taken is None:
                return False
            if runs and supervised is None and taken.wish is None:
                self._opening.hold(pending.nonce, checked.manifest, weighed=True)
                taken.claim.release()
                return False
            self._say(f"{pending.nonce}: claimed, attempt {taken.claim.attempt}{_asked(checked)}")
            self._run(checked, taken, supervised)
            self._tries[pending.nonce] = self._tries.get(pending.nonce, 0) + 1
        finally:
            if supervised is not None:
                supervised.close()
        return True

    def _cancel_waiting(self, nonce: str) -> None:
        """Answer a request that waits and is cancelled, beside the running job."""
        pending = self._mirror.waiting(nonce)
        if pending is not None and self.take(pending, Turn(nonce, None), only_cancelled=True):
            self._cancelled()

    def _waits(self, checked: Checked) -> bool:
        """Whether what may run is left until the owner's hours; what somebody wants stopped is not."""
        nonce = checked.pending.nonce
        if self._opening.is_open or nonce in self._wishes:
            return False
        if self._opening.hold(nonce, checked.manifest):
            hours = shown(self._station.policy.hours or ())
            self._say(f"{nonce}: waits for the hours in which jobs may begin, {hours}{_asked(checked)}")
        return True

    def _leaves(self, checked: Checked) -> bool:
        """Whether what is refused here is left to another machine that says it takes it."""
        if checked.refusal is None or checked.manifest is None:
            return False
        nonce = checked.pending.nonce
        return self._yielding.yields(nonce, checked.manifest.preset, checked.refusal.reason)

    def _run(self, checked: Checked, taken: Taken, supervised: Supervised | None) -> None:
        """Do a claimed request and send its result."""
        pending, began = checked.pending, self._clock()
        hearing = Hearing(
            self._mirror,
            self._wishes,
            checked,
            self._waiting_cancels,
            busy=self._busy,
            say=self._say,
            clock=self._clock,
        )
        try:
            job = Job(
                self._station,
                self._mirror.git,
                checked,
                taken.claim,
                supervised,
                abort=self._abort.is_set,
                look=hearing.look,
                repair=self._mirror.remake,
                say=self._say,
                clock=self._clock,
                now=self._now,
            )
        except OSError:
            taken.claim.release()  # nothing was begun, so this was no attempt
            raise
        try:
            done = self._ended(job, taken)
            if done is None:
                self._say(f"{pending.nonce}: the claim was lost, the job was stopped")
                return
            entry, verdict = done
            self._remember(checked, verdict, self._clock() - began)
            untouched = pending.ref is None and pending.nonce not in self._wishes
            self._outbox.send(entry, taken.claim, untouched=untouched)
            self._say(f"{pending.nonce}: {verdict.status}/{verdict.reason} {verdict.message}".rstrip())
            if checked.refusal is not None and checked.refusal.key is not None:
                self._say(f"{pending.nonce}: by {self._station.policy.decision(checked.refusal.key)}")
        finally:
            if not job.clean_up():
                self._say(f"{pending.nonce}: what the job left could not be removed")

    def _ended(self, job: Job, taken: Taken) -> tuple[Entry, Verdict] | None:
        if taken.claim.attempt > MAX_ATTEMPTS:
            return job.give_up(taken.last)
        if taken.wish is not None:
            return job.cancel(taken.wish)
        nonce = taken.claim.status.nonce
        try:
            self._begun.note(nonce, taken.claim.attempt)
        except OSError as error:
            self._say(f"{nonce}: that it was begun is known to this process only: {described(error)}")
        try:
            return job.run()
        finally:
            self._waiting_cancels.finish()

    def _remember(self, checked: Checked, verdict: Verdict, seconds: float) -> None:
        """Note how long such a job takes here."""
        if checked.preset is None or verdict.status not in (Status.PASSED, Status.REJECTED):
            return
        try:
            self._took(checked.preset.name, seconds)
        except OSError as error:
            self._say(f"how long the job took is not kept: {described(error)}")


def _asked(checked: Checked) -> str:
    name = checked.manifest.preset if checked.manifest is not None else "unreadable"
    return f" ({name}{'' if checked.requester is None else f', for {checked.requester}'})"
