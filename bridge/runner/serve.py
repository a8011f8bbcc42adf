"""The embedded runner: look at the queue, take what is pending, one job at a time, until told to stop.

Polling is fast after activity and slow when idle. A remote that is away costs nothing but waiting: results
are kept in the outbox and pushed when it is back. How a request becomes ours is in `taking`, what happens to
it then in `job`.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from bridge.bus.card import MAX_ANSWERED, State, Work
from bridge.bus.mirror import Mirror, Pending
from bridge.bus.refs import is_local
from bridge.bus.untrusted import clean_line
from bridge.errors import AccessDenied, BusError, MachineError, RemoteUnreachable, described
from bridge.result import Reason, Status, Verdict
from bridge.runner.check import Checked
from bridge.runner.child import MachineBusy, Supervised
from bridge.runner.folders import remove_tree
from bridge.runner.hearsay import Hearsay
from bridge.runner.holders import Holders
from bridge.runner.job import Job
from bridge.runner.later import Later
from bridge.runner.ledger import Ledger
from bridge.runner.opening import Opening
from bridge.runner.outbox import Outbox
from bridge.runner.peers import Peers
from bridge.runner.policy.hours import shown
from bridge.runner.polling import IDLE_S, Polling
from bridge.runner.presence import Presence
from bridge.runner.requesters import Requesters
from bridge.runner.reserve import Reserve
from bridge.runner.sessions import only_one
from bridge.runner.spool import Entry, Spool
from bridge.runner.station import Station
from bridge.runner.taking import Desk, Taken
from bridge.runner.turns import Service, Turn, order
from bridge.runner.upkeep import Upkeep
from bridge.runner.wishes import Wishes
from bridge.runner.yielding import Yielding

MAX_ATTEMPTS = 3
# Among so many of the first in the queue a runner chooses by chance while others are at work, too.
_CROWD = 4
# Under this name `Later` keeps apart how often the mirror is made again beside a running job.
_MIRROR = "mirror"


class Runner:
    """One embedded runner on one remote.

    Args:
        station: What it knows, from `open_station`.
        say: Takes one line for the owner about what happens.
        idle_s: Longest pause between two looks at an idle queue.
        upkeep: Retire old results when there is nothing else to do.
        clock: Monotonic seconds.
        now: The time of day (aware), for expiry and the result's times.
    """

    def __init__(
        self,
        station: Station,
        *,
        say: Callable[[str], None] = lambda _: None,
        idle_s: float = IDLE_S,
        upkeep: bool = True,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._station = station
        # Names and messages of requests go to the owner's terminal.
        self._say: Callable[[str], None] = lambda line: say(clean_line(line))
        self._clock = clock
        self._now = now
        digest = hashlib.sha256(station.audience.encode()).hexdigest()[:12]
        peers = Peers(station, self._say)
        self._mirror = Mirror(
            station.folder / f"mirror-{digest}.git",
            station.remote,
            with_cards=lambda: bool(peers.listed()),
            say=self._say,
        )
        self._later = Later(clock)
        self._upkeep = (
            Upkeep(station, self._mirror.git, say=self._say, clock=clock, now=now) if upkeep else None
        )
        self._requesters = Requesters(self._mirror.git, station)
        self._service = Service()
        self._opening = Opening(station, now=now)
        self._yielding = Yielding(station, self._mirror.git, clock=clock, now=now)
        answers = f"answered-{digest}"
        self._ledger = Ledger(station.folder / answers, now())
        self._presence = Presence(
            station,
            self._mirror.git,
            answered=lambda: self._ledger.replayable(self._now(), MAX_ANSWERED),
            clock=clock,
            now=now,
        )
        self._spool = Spool(station.folder / f"spool-{digest}")
        self._outbox = Outbox(
            self._mirror,
            self._spool,
            self._ledger,
            self._later,
            sign=lambda data: station.sign(data, self._say),
            sign_claim=station.sign_claim,
            say=self._say,
            clock=clock,
        )
        self._wishes = Wishes(station, self._mirror, say=self._say)
        self._holders = Holders(station, self._mirror, peers, clock=clock, now=now)
        self._desk = Desk(station, self._mirror, peers, self._holders, self._wishes, say=self._say, now=now)
        self._hearsay = Hearsay(station, self._mirror, peers, answers, say=self._say, now=now)
        # How often this process took a request that nevertheless stayed pending: bounds every loop.
        self._tries: dict[str, int] = {}
        self._abort = threading.Event()
        self._waiting = 0
        self._done = 0
        self._let_in = False
        self._blocked = False
        self._polling = Polling(idle_s=idle_s, local=is_local(station.remote), clock=clock)
        self._reserve = Reserve(station)

    def abort(self) -> None:
        """Stop the running job, too; it ends as ``cancelled/shutdown``. Set `stop` of `serve` as well."""
        self._abort.set()

    def serve(
        self, *, once: bool = False, stop: threading.Event | None = None, idle_timeout_s: float | None = None
    ) -> int:
        """Serve requests until `stop` is set; the running job is finished first (see `abort`).

        Args:
            once: Return after the first request that was answered.
            stop: Set it to drain.
            idle_timeout_s: With `once`: give up after so many seconds without a request; None: wait on.

        Returns:
            How many requests were answered.

        Raises:
            MachineError: Another runner of this name runs on this machine.
            AccessDenied: The remote let nobody in at the first look; later that is waited out.
        """
        stop = stop or threading.Event()
        self._done = 0
        with only_one(self._station) as sessions:
            self._holders.sessions = sessions
            self._spool.tidy()
            remove_tree(self._station.temporary)
            self._station.temporary.mkdir(exist_ok=True, mode=0o700)
            remove_tree(self._station.jobs)
            self._station.jobs.mkdir(exist_ok=True, mode=0o700)
            began = self._clock()
            try:
                while not stop.is_set():
                    did = self._turn()
                    self._done += did
                    if once and (did or self._late(began, idle_timeout_s)):
                        break
                    if not did:
                        for task in (self._get_ready, lambda: self._tell(State.IDLE), self._keep_up):
                            self._safely(task)
                        stop.wait(self._polling.pause())
            finally:
                self._reserve.empty()
                self._note(self._presence.stopped(done=self._done))
        return self._done

    def _turn(self) -> bool:
        """One look at the queue and at most one request that follows from it; whether one was answered.

        A remote that is away only slows the runner down. What goes wrong with one request or one kept result
        is counted against it alone: whoever can push must not be able to stop the others.
        """
        handled = False
        try:
            pending = self._look()
            self._let_in = True
            if not self._rules_stand():
                return False
            for request, turn in self._order(pending):
                if handled := self._attempt(request, turn):
                    self._service.note(turn)
                    break
            else:
                self._wishes.tidy()
        except MachineBusy as busy:
            if not self._blocked:
                self._say(f"waiting: {busy.message}")
            self._blocked = True
            self._polling.calm()
            return handled
        except Exception as error:  # a daemon outlives its own bugs, too; each pause is longer
            if isinstance(error, AccessDenied) and not self._let_in:
                raise  # whoever has just started it can put that right
            self._polling.failures += 1
            self._say(f"failure {self._polling.failures} in a row, trying again: {described(error)}")
            return handled
        self._blocked = False
        self._polling.failures = 0
        if handled:
            self._polling.active()
        return handled

    def _rules_stand(self) -> bool:
        """Read the owner's files again if they changed; False: they are wrong, and nothing may be taken."""
        book = self._station.rulebook
        if book.refresh():
            self._opening.keep(())  # other rules may refuse what waits
            self._presence.look_again()
            if book.fault is None:
                self._say(f"the policy was read again; {book.rules.summary()}")
            else:
                remedy = f" ({book.fault.remedy})" if book.fault.remedy else ""
                self._say(f"nothing is taken until this is put right: {book.fault.message}{remedy}")
        if book.fault is not None:
            self._polling.calm()
        return book.fault is None

    def _look(self) -> list[Pending]:
        """What is pending, after what waited here was pushed."""
        began = time.monotonic()
        pending = self._mirror.refresh()
        self._polling.looked(time.monotonic() - began)
        if self._outbox.flush(self._mirror.claims, self._holders.sessions):
            pending = self._mirror.refresh()
        self._desk.update(pending)
        self._waiting = len(pending)
        nonces = {request.nonce for request in pending}
        self._wishes.update(nonces)
        self._holders.update(nonces)
        self._hearsay.look(nonces)
        self._tries = {nonce: tries for nonce, tries in self._tries.items() if nonce in nonces}
        self._yielding.keep(nonces)
        self._opening.keep(nonces)
        self._later.keep(nonces | self._outbox.nonces())
        return pending

    def _order(self, pending: Sequence[Pending]) -> list[tuple[Pending, Turn]]:
        """What may be tried now, in the order to try it, each with whose turn it is."""
        policy = self._station.policy
        due = {request.nonce: request for request in pending if self._may_try(request.nonce)}
        asking = self._requesters.look(pending, self._holders.claimed(), self._now())
        turns = [
            turn
            for turn in order(
                asking,
                self._service,
                max_queued=policy.max_queued,
                max_running=policy.max_running_per_requester,
            )
            if turn.nonce in due
        ]
        if self._holders.others_at_work():
            # Runners that all begin with the same request lose most of their pushes to each other.
            first = turns[:_CROWD]
            random.shuffle(first)
            turns[:_CROWD] = first
        return [(due[turn.nonce], turn) for turn in turns]

    def _may_try(self, nonce: str) -> bool:
        tried = self._tries.get(nonce, 0) > MAX_ATTEMPTS
        held = self._opening.holds(nonce, wished=nonce in self._wishes)
        return not tried and not held and nonce not in self._outbox and self._later.is_due(nonce)

    def _attempt(self, pending: Pending, turn: Turn) -> bool:
        """`_take`; a request with which something went wrong is tried again later, and later each time."""
        try:
            return self._take(pending, turn)
        except (MachineBusy, RemoteUnreachable):
            raise
        except Exception as error:  # whatever this request provokes, the next one must be served
            pause = self._later.put_off(pending.nonce)
            self._service.note(turn)
            self._say(f"{pending.nonce}: {described(error)}; trying again in {pause:g} s")
            return False

    def _take(self, pending: Pending, turn: Turn) -> bool:
        """Examine, claim, run and publish one request; False when it is not ours to take (now)."""
        attempt, silent = self._desk.place(pending, turn.requester)
        if attempt is None:
            return False
        self._desk.begin(pending, attempt)
        if pending.nonce not in self._ledger.nonces and self._desk.was_archived(pending):
            self._ledger.add(pending.nonce)
        answered = pending.nonce in self._ledger.nonces or pending.nonce in self._hearsay
        checked = self._desk.examine(pending, {pending.nonce} if answered else (), turn.over_quota)
        if checked is None:
            return False
        if checked.manifest is not None and checked.manifest.transport != "embedded":
            return False
        if answered and not self._desk.is_open(pending):
            return False  # the mirror still shows the branch as it was before the answer
        if self._leaves(checked):
            return False
        if checked.refusal is not None and checked.refusal.reason is Reason.REPLAYED:
            self._tries[pending.nonce] = MAX_ATTEMPTS + 1
        runs = checked.refusal is None and attempt <= MAX_ATTEMPTS
        if runs and self._waits(checked):
            return False
        supervised = self._reserve.take(checked.preset) if runs and self._opening.is_open else None
        try:
            taken = self._desk.take(pending, checked, silent)
            if taken is None:
                return False
            if runs and supervised is None and taken.wish is None:
                self._opening.hold(pending.nonce, checked.manifest, weighed=True)
                taken.claim.release()
                return False
            self._say(f"{pending.nonce}: claimed, attempt {taken.claim.attempt}{_asked(checked)}")
            self._run(pending, checked, taken, supervised)
            self._tries[pending.nonce] = self._tries.get(pending.nonce, 0) + 1
        finally:
            if supervised is not None:
                supervised.close()
        return True

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

    def _run(self, pending: Pending, checked: Checked, taken: Taken, supervised: Supervised | None) -> None:
        """Do a claimed request and send its result."""
        began = self._clock()
        try:
            job = self._job(pending, checked, taken, supervised, began)
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

    def _job(
        self,
        pending: Pending,
        checked: Checked,
        taken: Taken,
        supervised: Supervised | None,
        began: float,
    ) -> Job:
        return Job(
            self._station,
            self._mirror.git,
            checked,
            taken.claim,
            supervised,
            abort=self._abort.is_set,
            look=lambda: self._hear(pending, checked, began),
            repair=self._repair,
            say=self._say,
            clock=self._clock,
            now=self._now,
        )

    def _ended(self, job: Job, taken: Taken) -> tuple[Entry, Verdict] | None:
        if taken.claim.attempt > MAX_ATTEMPTS:
            return job.give_up(taken.last)
        return job.run() if taken.wish is None else job.cancel(taken.wish)

    def _hear(self, pending: Pending, checked: Checked, began: float) -> str | None:
        """Beside a running job: whether it is to stop, and a word that this runner is busy."""
        try:
            wish = self._wishes.ask(pending, checked)
        except RemoteUnreachable:
            raise  # the next look may find it again
        except (BusError, MachineError, OSError) as error:
            if isinstance(error, BusError) or not self._mirror.git.directory.exists():
                self._mend(pending, checked, error)
            raise
        except Exception as error:  # a bug of ours must not end the heartbeat
            self._say(f"{pending.nonce}: whether it is to stop is not known: {described(error)}")
            return None
        preset = checked.preset.name if checked.preset is not None else ""
        self._tell(State.BUSY, Work(nonce=pending.nonce, preset=preset, elapsed_s=self._clock() - began))
        return wish

    def _remember(self, checked: Checked, verdict: Verdict, seconds: float) -> None:
        """Note how long such a job takes here."""
        if checked.preset is None or verdict.status not in (Status.PASSED, Status.REJECTED):
            return
        try:
            self._presence.took(checked.preset.name, seconds)
        except OSError as error:
            self._say(f"how long the job took is not kept: {described(error)}")

    def _tell(self, state: State, job: Work | None = None) -> None:
        if self._polling.failures:
            return
        self._note(self._presence.tell(state, job, pending=self._waiting, done=self._done))

    def _note(self, said: str | None) -> None:
        if said is not None:
            self._say(said)

    def _mend(self, pending: Pending, checked: Checked, error: Exception) -> None:
        """Make the mirror again beside a running job: without one no heartbeat goes out."""
        if not self._later.is_due(_MIRROR):
            return
        self._later.put_off(_MIRROR)
        if self._mirror.mend(lambda: self._wishes.ask(pending, checked)):
            self._say(f"{pending.nonce}: the copy of the queue was made again: {described(error)}")

    def _repair(self) -> None:
        """Make the mirror again, with what is pending in it."""
        self._mirror.remake()

    def _safely(self, task: Callable[[], None]) -> None:
        """Do what can also be left undone: whatever goes wrong with it must not end the daemon."""
        try:
            task()
        except Exception as error:
            self._say(f"between two looks: {described(error)}")

    def _get_ready(self) -> None:
        """Have the next job's supervisor wait for it, while a next job is likely."""
        if self._polling.is_fast:
            self._reserve.fill()
        else:
            self._reserve.empty()

    def _keep_up(self) -> None:
        """Upkeep of the bus, when there is nothing to do here: what still waits is not for this runner now.

        While another job has the machine it is left alone: the job may be measuring.
        """
        if self._upkeep is not None and not (
            self._blocked or self._polling.failures or self._polling.is_fast
        ):
            self._upkeep.work()

    def _late(self, began: float, idle_timeout_s: float | None) -> bool:
        return idle_timeout_s is not None and self._clock() - began >= idle_timeout_s


def _asked(checked: Checked) -> str:
    name = checked.manifest.preset if checked.manifest is not None else "unreadable"
    return f" ({name}{'' if checked.requester is None else f', for {checked.requester}'})"
