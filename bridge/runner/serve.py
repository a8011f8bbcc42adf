"""The embedded runner: look at the queue, take what is pending, one job at a time, until told to stop.

Polling is fast after activity and slow when idle. A remote that is away costs nothing but waiting: results
are kept in the spool and pushed when it is back. What happens to one request is in `job`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from bridge.bus.claims import Claim, LeaseWatch, Silent, claim, read_status, take_over
from bridge.bus.handles import Held, state_of
from bridge.bus.mirror import Mirror, Pending
from bridge.bus.publish import publish
from bridge.bus.untrusted import clean_line
from bridge.errors import (
    LeaseLost,
    MachineError,
    PushRejected,
    RemoteUnreachable,
    ResultError,
    described,
)
from bridge.result import Reason
from bridge.runner import isolation
from bridge.runner.check import Checked, examine
from bridge.runner.child import MachineBusy, Supervised
from bridge.runner.folders import remove_tree
from bridge.runner.job import Job
from bridge.runner.spool import Entry, Spool
from bridge.runner.station import Station

MAX_ATTEMPTS = 3
IDLE_S = 5.0
FAST_S = 0.1
FAST_WINDOW_S = 20.0
FIRST_PAUSE_S = 1.0
MAX_BACKOFF_S = 60.0


class Runner:
    """One embedded runner on one remote.

    Args:
        station: What it knows, from `open_station`.
        say: Takes one line for the owner about what happens.
        idle_s: Longest pause between two looks at an idle queue.
        clock: Monotonic seconds.
        now: The time of day (aware), for expiry and the result's times.
    """

    def __init__(
        self,
        station: Station,
        *,
        say: Callable[[str], None] = lambda _: None,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._station = station
        # Names and messages of requests go to the owner's terminal.
        self._say: Callable[[str], None] = lambda line: say(clean_line(line))
        self._idle_s = idle_s
        self._clock = clock
        self._now = now
        digest = hashlib.sha256(station.audience.encode()).hexdigest()[:12]
        self._mirror = Mirror(station.folder / f"mirror-{digest}.git", station.remote)
        self._spool = Spool(station.folder / f"spool-{digest}")
        self._ledger = station.folder / f"answered-{digest}"
        self._answered = set(self._ledger.read_text().split()) if self._ledger.exists() else set()
        self._watch = LeaseWatch(clock)
        self._claims: dict[str, Held] = {}
        # How often this process took a request that nevertheless stayed pending: bounds every loop.
        self._tries: dict[str, int] = {}
        # What went wrong (a request, a kept result) and when it may be tried again: (clock, pause).
        self._later: dict[str, tuple[float, float]] = {}
        self._abort = threading.Event()
        self._active_at = clock()
        self._failures = 0

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
        """
        stop = stop or threading.Event()
        handled = 0
        with self._only_one():
            remove_tree(self._station.jobs)
            self._station.jobs.mkdir(exist_ok=True, mode=0o700)
            began = self._clock()
            while not stop.is_set():
                did = self._turn(stop, once=once)
                handled += did
                if once and (handled or self._late(began, idle_timeout_s)):
                    break
                stop.wait(0 if did else self._pause())
        return handled

    def _turn(self, stop: threading.Event, *, once: bool) -> int:
        """One look at the queue and everything that follows from it.

        A remote that is away only slows the runner down. What goes wrong with one request or one spooled
        result is counted against it alone: whoever can push must not be able to stop the others.
        """
        handled = 0
        try:
            pending = self._mirror.refresh()
            if self._flush():
                pending = self._mirror.refresh()
            self._claims = self._mirror.claims() if pending else {}
            for request in pending:
                if stop.is_set() or (once and handled):
                    break
                handled += self._attempt(request)
            self._watch.forget([request.nonce for request in pending])
        except MachineBusy as busy:
            self._say(f"waiting: {busy.message}")
            self._active_at = self._clock() - FAST_WINDOW_S
        except Exception as error:  # a daemon outlives its own bugs, too; each pause is longer
            self._failures += 1
            self._say(f"failure {self._failures} in a row, trying again: {described(error)}")
            return handled
        self._failures = 0
        if handled:
            self._active_at = self._clock()
        return handled

    def _attempt(self, pending: Pending) -> bool:
        """`_take`; a request with which something went wrong is tried again later, and later each time."""
        if not self._is_due(pending.nonce):
            return False
        try:
            return self._take(pending)
        except (MachineBusy, RemoteUnreachable):
            raise
        except Exception as error:  # whatever this request provokes, the next one must be served
            self._put_off(pending.nonce, error)
            return False

    def _is_due(self, nonce: str) -> bool:
        return nonce not in self._later or self._clock() >= self._later[nonce][0]

    def _put_off(self, nonce: str, error: Exception) -> None:
        pause = min(2 * self._later.get(nonce, (0.0, FIRST_PAUSE_S / 2))[1], MAX_BACKOFF_S)
        self._later[nonce] = (self._clock() + pause, pause)
        self._say(f"{nonce}: {described(error)}; trying again in {pause:g} s")

    def _take(self, pending: Pending) -> bool:
        """Examine, claim, run and publish one request; False when it is not ours to take (now)."""
        station, git = self._station, self._mirror.git
        attempt, silent = self._standing(pending)
        if attempt is None or self._tries.get(pending.nonce, 0) > MAX_ATTEMPTS:
            return False
        checked = examine(git, pending, station, now=self._now(), answered=self._answered)
        if checked.manifest is not None and checked.manifest.transport != "embedded":
            return False
        if pending.nonce in self._answered and not self._is_open(pending):
            return False  # the mirror still shows the branch as it was before our answer
        if checked.refusal is not None and checked.refusal.reason is Reason.REPLAYED:
            self._tries[pending.nonce] = MAX_ATTEMPTS + 1
        supervised = None
        if checked.refusal is None and attempt <= MAX_ATTEMPTS:
            hide = isolation.hidden(station.home, station.environment, *station.private)
            supervised = Supervised(station.lock, hide=hide, keep=[station.jobs])
        try:
            held = self._claim(pending, silent)
            if held is None or self._came_too_late(pending, held):
                return False
            self._tries[pending.nonce] = self._tries.get(pending.nonce, 0) + 1
            self._say(f"{pending.nonce}: claimed, attempt {held.attempt}{_asked(checked)}")
            job = Job(
                station,
                git,
                checked,
                held,
                supervised,
                abort=self._abort.is_set,
                clock=self._clock,
                now=self._now,
            )
            done = job.give_up() if held.attempt > MAX_ATTEMPTS else job.run()
        finally:
            if supervised is not None:
                supervised.close()
        if done is None:
            self._say(f"{pending.nonce}: the claim was lost, the job was stopped")
        else:
            entry, verdict = done
            self._spool.put(entry)
            self._publish(entry, held)
            self._say(f"{pending.nonce}: {verdict.status}/{verdict.reason} {verdict.message}".rstrip())
        if not job.clean_up():
            self._say(f"{pending.nonce}: what the job left could not be removed")
        return True

    def _standing(self, pending: Pending) -> tuple[int | None, Silent | None]:
        """The attempt we would be, with the silent claim we would replace; (None, None): somebody has it."""
        held = self._claims.get(pending.nonce)
        if pending.nonce in self._spool:
            return None, None
        if held is None:
            return 1, None
        status = read_status(self._mirror.git, held.commit)
        silent = self._watch.observe(pending.nonce, held, status)
        if silent is None and status is not None and status.runner_id == self._station.identity.id:
            # Ours, from before a crash: we hold the name's lock, so no other process of ours has it.
            silent = Silent(held.ref, held.commit, status.attempt)
        return (None, None) if silent is None else (silent.attempt + 1, silent)

    def _came_too_late(self, pending: Pending, held: Claim) -> bool:
        """Whether another runner answered between our look at the queue and our claim.

        Its answer removed its claim, so ours succeeded. While we hold the claim nobody else answers, so one
        look after claiming settles it.
        """
        if self._is_open(pending):
            return False
        held.release()
        return True

    def _is_open(self, pending: Pending) -> bool:
        """Whether the request still waits for its answer, by one look at the remote."""
        found = self._mirror.git.ls_remote(self._station.remote)
        return state_of(found, pending.nonce).is_open(pending.commit)

    def _claim(self, pending: Pending, silent: Silent | None) -> Claim | None:
        station = self._station
        if silent is None:
            return claim(self._mirror.git, station.remote, pending, station.identity, lease_s=station.lease_s)
        return take_over(
            self._mirror.git,
            station.remote,
            pending,
            station.identity,
            silent=silent,
            lease_s=station.lease_s,
        )

    def _publish(self, entry: Entry, held: Claim | None) -> None:
        """Push a result; one that cannot be pushed now stays in the spool, one that came too late goes."""
        try:
            where = publish(
                self._mirror.git,
                self._station.remote,
                request_commit=entry.request_commit,
                nonce=entry.nonce,
                result_ref=entry.result_ref,
                files=entry.files,
                result=entry.result,
                signature=entry.signature,
                claim=held,
            )
        except LeaseLost as error:
            self._say(f"{entry.nonce}: not published: {error.message}")
        except (RemoteUnreachable, PushRejected) as error:
            self._say(f"{entry.nonce}: kept for later: {error.message}")
            return
        else:
            self._say(f"{entry.nonce}: published as {where.commit[:12]} on {where.ref}")
            self._answered.add(entry.nonce)
            self._later.pop(entry.nonce, None)
            with self._ledger.open("a", encoding="ascii") as ledger:
                ledger.write(entry.nonce + "\n")
        self._spool.remove(entry.nonce)

    def _flush(self) -> int:
        """Push what an earlier failure or an earlier process left; how many entries there were."""
        waiting = self._spool.nonces()
        claims = self._mirror.claims() if waiting else {}
        for nonce in waiting:
            if not self._is_due(nonce):
                continue
            try:
                entry = self._spool.read(nonce)
                self._publish(entry, self._own_claim(claims.get(nonce)))
            except RemoteUnreachable:
                raise
            except (ValueError, KeyError, TypeError, FileNotFoundError, ResultError) as error:
                place = self._spool.set_aside(nonce)
                self._say(f"{nonce}: not published, set aside in {place}: {type(error).__name__}: {error}")
            except Exception as error:  # a full disk passes; and one entry must not hold up the others
                self._put_off(nonce, error)
        return len(waiting)

    def _own_claim(self, held: Held | None) -> Claim | None:
        """The claim as ours to use, where an earlier process of this runner made it."""
        git = self._mirror.git
        status = None if held is None else read_status(git, held.commit)
        if held is None or status is None or status.runner_id != self._station.identity.id:
            return None
        return Claim(git, self._station.remote, ref=held.ref, commit=held.commit, status=status)

    def _late(self, began: float, idle_timeout_s: float | None) -> bool:
        return idle_timeout_s is not None and self._clock() - began >= idle_timeout_s

    def _pause(self) -> float:
        """Seconds until the next look: short after activity, then growing to the idle interval."""
        if self._failures:
            return min(self._idle_s * (1 << min(self._failures - 1, 8)), MAX_BACKOFF_S)
        quiet = self._clock() - self._active_at - FAST_WINDOW_S
        return FAST_S if quiet < 0 else min(self._idle_s, max(FAST_S, quiet / 4))

    @contextlib.contextmanager
    def _only_one(self) -> Iterator[None]:
        """Hold the name: one process per runner name on a machine."""
        station = self._station
        with (station.folder / "lock").open("a+") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                raise MachineError(
                    f"a runner named {station.identity.name} already runs on this machine"
                    f" (process {handle.read().strip() or 'unknown'})",
                    "stop it, or start this one with another --name",
                ) from None
            handle.truncate(0)
            handle.write(f"{os.getpid()}\n")
            handle.flush()
            yield


def _asked(checked: Checked) -> str:
    name = checked.manifest.preset if checked.manifest is not None else "unreadable"
    return f" ({name}{'' if checked.requester is None else f', for {checked.requester}'})"
