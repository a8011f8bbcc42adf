"""The embedded runner: look at the queue, take what is pending, one job at a time, until told to stop.

Polling is fast after activity and slow when idle. A remote that is away costs nothing but waiting: results
are kept in the outbox and pushed when it is back. What is done for a request in its turn is in `clerk`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from bridge.bus.mirror import Mirror, Pending
from bridge.errors import AccessDenied, RemoteUnreachable, described
from bridge.protocol.refs import is_local
from bridge.protocol.runner_info import MAX_ANSWERED, State, Work
from bridge.protocol.sanitize import clean_line
from bridge.runner.answered import Answered
from bridge.runner.begun import Begun
from bridge.runner.child import MachineBusy
from bridge.runner.clerk import Clerk
from bridge.runner.folders import remove_tree
from bridge.runner.hearsay import Hearsay
from bridge.runner.holders import Holders
from bridge.runner.later import Later
from bridge.runner.ledger import Ledger
from bridge.runner.outbox import Outbox
from bridge.runner.peers import Peers
from bridge.runner.polling import IDLE_S, Polling
from bridge.runner.presence import Presence
from bridge.runner.requesters import Requesters
from bridge.runner.reserve import Reserve
from bridge.runner.sessions import only_one
from bridge.runner.spool import Spool
from bridge.runner.station import Station
from bridge.runner.taking import Desk
from bridge.runner.turns import Service, Turn, order
from bridge.runner.upkeep import Upkeep
from bridge.runner.wishes import Wishes

# Among so many of the first in the queue a runner chooses by chance while others are at work, too.
_CROWD = 4


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
        digest = station.tag
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
        answers = f"answered-{digest}"
        ledger = Ledger(station.folder / answers, now())
        self._presence = Presence(
            station,
            self._mirror.git,
            answered=lambda: ledger.replayable(now(), MAX_ANSWERED),
            clock=clock,
            now=now,
        )
        self._spool = Spool(station.folder / f"spool-{digest}")
        self._outbox = Outbox(
            self._mirror,
            self._spool,
            ledger,
            self._later,
            sign=lambda data: station.sign(data, self._say),
            sign_claim=station.sign_claim,
            say=self._say,
            clock=clock,
        )
        self._wishes = Wishes(station, self._mirror, say=self._say)
        begun = Begun(station.folder / f"begun-{digest}", now())
        self._holders = Holders(station, self._mirror, peers, begun, clock=clock, now=now)
        self._desk = Desk(station, self._mirror, peers, self._holders, self._wishes, say=self._say, now=now)
        self._hearsay = Hearsay(station, self._mirror, peers, answers, say=self._say, now=now)
        self._reserve = Reserve(station)
        self._clerk = Clerk(
            station,
            self._mirror,
            self._desk,
            begun=begun,
            wishes=self._wishes,
            answered=Answered(station, self._mirror.git, ledger, self._hearsay, now=now),
            reserve=self._reserve,
            outbox=self._outbox,
            busy=lambda job: self._tell(State.BUSY, job),
            took=self._presence.took,
            cancelled=self._count,
            say=self._say,
            clock=clock,
            now=now,
        )
        self._waiting = 0
        self._done = 0
        self._let_in = False
        self._blocked = False
        self._polling = Polling(idle_s=idle_s, local=is_local(station.remote), clock=clock)

    def abort(self) -> None:
        """Stop the running job, too; it ends as ``cancelled/shutdown``. Set `stop` of `serve` as well."""
        self._clerk.abort()

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
        handled, pending = False, []
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
            self._safely(lambda: self._cancel_waiting(pending))
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
            self._clerk.look_again()
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
        self._clerk.update(nonces)
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
        return nonce not in self._outbox and self._later.is_due(nonce) and not self._clerk.leaves_alone(nonce)

    def _attempt(self, pending: Pending, turn: Turn) -> bool:
        """Take a request; one with which something went wrong is tried again later, and later each time."""
        try:
            return self._clerk.take(pending, turn)
        except (MachineBusy, RemoteUnreachable):
            raise
        except Exception as error:  # whatever this request provokes, the next one must be served
            pause = self._later.put_off(pending.nonce)
            self._service.note(turn)
            self._say(f"{pending.nonce}: {described(error)}; trying again in {pause:g} s")
            return False

    def _cancel_waiting(self, pending: Sequence[Pending]) -> None:
        """Answer what waits and is cancelled while another runner's job has the machine: it runs nothing."""
        cancelled = self._wishes.of_others("")
        for request in pending:
            if request.nonce in cancelled and self._may_try(request.nonce):
                turn = Turn(request.nonce, None)
                self._done += self._clerk.take(request, turn, only_cancelled=True)

    def _count(self) -> None:
        self._done += 1

    def _tell(self, state: State, job: Work | None = None) -> None:
        if self._polling.failures:
            return
        self._note(self._presence.tell(state, job, pending=self._waiting, done=self._done))

    def _note(self, said: str | None) -> None:
        if said is not None:
            self._say(said)

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
