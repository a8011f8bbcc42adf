"""The run itself: requests come, runners fall and come back, until everything is answered.

One thread starts and ends every process; a second one submits. The run ends when each request has its
answer, or at its deadline with what is still open. Leaving it, however that happens, leaves no process.
"""

from __future__ import annotations

import queue
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bridge.errors import EXIT_TERMINATED
from bridge.protocol import refs
from tests.e2e.faults import plan
from tests.e2e.faults.machines import Machine
from tests.e2e.faults.plan import Ask, Blow, Fault, RequestKind
from tests.e2e.faults.requesters import Accepted, Requester, Visitor
from tests.fixtures.repo import RepoFixture

IN_FLIGHT = 36
_TICK_S = 0.02
_LOOK_S = 0.25
_SAY_S = 5.0
_DRAIN_S = 60.0
_SETTLE_S = 20.0


class Unfinished(Exception):
    """The deadline came; the sentence says what is open."""


@dataclass
class Course:
    """One run.

    Attributes:
        repo: The remote and the clients' clone.
        machines: The runners.
        asks: What is requested.
        clients: The client processes in addition.
        blows: What befalls the runners; it may end.
        deadline: On the monotonic clock.
        say: Takes progress lines.
        faults: How often each fault befell a runner.
        latencies: Seconds from submission to the answer, by nonce.
    """

    repo: RepoFixture
    machines: list[Machine]
    asks: list[Ask]
    clients: list[plan.Client]
    blows: Iterator[Blow]
    deadline: float
    say: Callable[[str], None]
    faults: Counter[str] = field(default_factory=Counter)
    latencies: dict[str, float] = field(default_factory=dict)
    visitors: list[Visitor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.requester = Requester(self.repo)
        self._began = time.monotonic()
        self._open: set[str] = set()
        self._waiting: queue.Queue[Ask | None] = queue.Queue()
        self._stopping = threading.Event()
        self._asked = 0
        self._cancels: list[tuple[float, str]] = []
        self._cancelling: list[subprocess.Popen[bytes]] = []
        self._returns: list[tuple[float, Callable[[], None]]] = []
        self._away: set[int] = set()
        self._next_blow: tuple[float, Blow] | None = None
        self._said_at = self._looked_at = 0.0

    def run(self) -> None:
        """Everything asked is answered when this returns.

        Raises:
            Unfinished: At the deadline.
        """
        for machine in self.machines:
            machine.start()
        submitter = threading.Thread(target=self._submit, daemon=True)
        submitter.start()
        try:
            while not self._done():
                self._tick()
        finally:
            self._stopping.set()
            self._waiting.put(None)
            submitter.join(30)
        self._settle()

    def _done(self) -> bool:
        return self._asked == len(self.asks) and self._waiting.empty() and not self._busy()

    def _busy(self) -> bool:
        unanswered = len(self.requester.accepted) + len(self.requester.errors) < self._asked or len(
            self.latencies
        ) < len(self.requester.accepted)
        return bool(unanswered or self._open or self._cancels or self._here())

    def _here(self) -> list[Visitor]:
        return [visitor for visitor in self.visitors if visitor.process.poll() is None]

    def _tick(self) -> None:
        now = time.monotonic()
        if now > self.deadline:
            raise Unfinished(self._where())
        while (
            self._asked < len(self.asks)
            and self._asked - len(self.latencies) - len(self.requester.errors) < IN_FLIGHT
        ):
            self._waiting.put(self.asks[self._asked])
            self._asked += 1
            for client in self.clients:
                if client.after == self._asked - 1:
                    self.visitors.append(Visitor.start(self.repo, client))
        for visitor in self.visitors:
            visitor.attend()
        self._cancel_due(now)
        self._bring_back(now)
        self._strike(now)
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            self._look()
        if now - self._said_at >= _SAY_S:
            self._said_at = now
            self.say(self._where())
        time.sleep(_TICK_S)

    def _submit(self) -> None:
        while (ask := self._waiting.get()) is not None and not self._stopping.is_set():
            accepted = self.requester.submit(ask)
            if accepted is not None and ask.kind is RequestKind.CANCEL:
                self._cancels.append((accepted.at + ask.cancel_after_s, accepted.submitted.nonce))

    def _cancel_due(self, now: float) -> None:
        for due, nonce in [entry for entry in self._cancels if entry[0] <= now]:
            self._cancelling.append(self.requester.cancel(nonce))
            self._cancels.remove((due, nonce))
        self._cancelling = [process for process in self._cancelling if process.poll() is None]

    def _bring_back(self, now: float) -> None:
        for entry in [entry for entry in self._returns if entry[0] <= now]:
            self._returns.remove(entry)
            entry[1]()

    def _strike(self, now: float) -> None:
        if self._next_blow is None:
            following = next(self.blows, None)
            if following is None:
                return
            self._next_blow = (now + following.gap_s, following)
        due, blow = self._next_blow
        if now < due:
            return
        self._next_blow = None
        index, machine = blow.runner, self.machines[blow.runner]
        if blow.fault is Fault.GIT:
            self.faults[blow.fault] += machine.kill_git(blow.pause_s % 1.0)
            return
        if index in self._away or len(self._away) >= len(self.machines) - 1:
            return
        self.faults[blow.fault] += 1
        self._away.add(index)
        if blow.fault is Fault.SLEEP:
            machine.sleep()
            self._returns.append((now + blow.pause_s, lambda: self._wakes(index)))
        elif blow.fault in (Fault.DRAIN, Fault.SHUTDOWN):
            machine.drain()
            self._returns.append((now + _TICK_S, lambda: self._drained(index, blow, now)))
        else:
            machine.kill()
            if blow.fault is Fault.WIPE:
                machine.lose_state()
            self._returns.append((now + blow.pause_s, lambda: self._starts(index)))

    def _starts(self, index: int) -> None:
        self.machines[index].start()
        self._away.discard(index)

    def _wakes(self, index: int) -> None:
        self.machines[index].wake()
        self._away.discard(index)

    def _drained(self, index: int, blow: Blow, since: float) -> None:
        """Look whether a runner that was told to stop did; then start it again after its pause."""
        now, machine = time.monotonic(), self.machines[index]
        code = machine.ended(0)
        if code is None:
            if now - since > _DRAIN_S:
                raise Unfinished(f"{machine.name} did not stop within {_DRAIN_S:g} s of SIGTERM")
            if blow.fault is Fault.SHUTDOWN and now - since > 0.3:
                machine.drain()
            self._returns.append((now + 0.3, lambda: self._drained(index, blow, since)))
            return
        if code not in (0, EXIT_TERMINATED, -signal.SIGTERM):  # the last two: it had not set itself up yet
            raise Unfinished(f"{machine.name} ended with {code} on SIGTERM: {machine.text()[-600:]}")
        self._returns.append((now + blow.pause_s, lambda: self._starts(index)))

    def _look(self) -> None:
        """What is answered, by the remote's refs."""
        listed = self.repo.git("for-each-ref", "--format=%(refname) %(objectname)", cwd=self.repo.remote)
        found = {ref: commit for ref, _, commit in (line.partition(" ") for line in listed.splitlines())}
        now = time.monotonic()
        for nonce, accepted in list(self.requester.accepted.items()):
            if nonce not in self.latencies and _is_answered(found, accepted):
                self.latencies[nonce] = now - accepted.at
        self._open = {name for ref in found if (name := refs.nonce_of(ref, refs.INBOX))}

    def _settle(self) -> None:
        """Wake every runner that ever was and let it push what it may have kept, then stop them all."""
        self.say("everything is answered; every runner comes back once more, then all stop")
        self._returns.clear()
        for machine in self.machines:
            machine.wake()
        for turn in range(max(len(machine.states) for machine in self.machines)):
            self._stop_all()
            for machine in self.machines:
                machine.start(machine.states[min(turn, len(machine.states) - 1)])
            began = time.monotonic()
            while time.monotonic() - began < _SETTLE_S and not all(
                machine.has_settled() for machine in self.machines
            ):
                time.sleep(0.1)
            time.sleep(0.5)
        quiet = time.monotonic() + max(machine.lease_s for machine in self.machines) + 1.0
        while time.monotonic() < quiet:
            self._look()
            if self._open:
                raise Unfinished(f"open again after everything was answered: {sorted(self._open)}")
            time.sleep(0.5)
        self._stop_all()
        for process in self._cancelling:
            process.wait(60)

    def _stop_all(self) -> None:
        for machine in self.machines:
            machine.drain()
        for machine in self.machines:
            if machine.ended(_DRAIN_S) is None:
                raise Unfinished(f"{machine.name} did not stop within {_DRAIN_S:g} s of SIGTERM")

    def _where(self) -> str:
        answered, accepted = len(self.latencies), len(self.requester.accepted)
        struck = " ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        up = sum(machine.up for machine in self.machines)
        return (
            f"{time.monotonic() - self._began:5.0f} s  submitted {accepted}/{len(self.asks)}"
            f"  answered {answered}  open {accepted - answered}  runners up {up}/{len(self.machines)}"
            f"  {struck}"
        )


def _is_answered(found: dict[str, str], accepted: Accepted) -> bool:
    nonce, commit = accepted.submitted.nonce, accepted.submitted.commit
    tip = found.get(accepted.submitted.ref)
    return (tip is not None and tip != commit) or refs.RESULTS + nonce in found
