"""What a run asks for and what befalls it, drawn from one seed.

The same seed gives the same requests, clients and faults in the same order with the same pauses. When each of
them meets a runner depends on the machine's speed, so a failure may need more than one run to come back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class RequestKind(StrEnum):
    """What a request is about."""

    INSTANT = "instant"
    WORK = "work"
    FAIL = "fail"
    REFUSED = "refused"
    CANCEL = "cancel"
    CROWDED = "crowded"  # its disk fills while it runs; never drawn


class Fault(StrEnum):
    """What befalls a runner."""

    KILL = "kill"  # -9, started again soon, with what it had on disk
    KILL_LONG = "kill-long"  # -9, and dead for longer than its lease
    WIPE = "wipe"  # -9, and what it had on disk is out of reach until the end
    GIT = "kill-git"  # -9 to one of its git children
    DRAIN = "drain"  # SIGTERM: finish the job, then stop
    SHUTDOWN = "shutdown"  # SIGTERM twice: stop the job, too
    SLEEP = "sleep"  # the whole machine stops for longer than its lease


_KINDS = {
    RequestKind.INSTANT: 44,
    RequestKind.WORK: 26,
    RequestKind.FAIL: 12,
    RequestKind.REFUSED: 10,
    RequestKind.CANCEL: 8,
}
# One deck of blows; it is shuffled and dealt again and again, so that every kind comes soon.
_DECK = {
    Fault.KILL: 8,
    Fault.KILL_LONG: 2,
    Fault.WIPE: 1,
    Fault.GIT: 6,
    Fault.DRAIN: 1,
    Fault.SHUTDOWN: 1,
    Fault.SLEEP: 1,
}
_MEAN_GAP_S = 1.4
_KILLED_CLIENTS = 0.75


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        word: Its parameter; no other request has it, so a result that was mixed up shows.
        kind: What it is about.
        seconds: How long its job takes.
        cancel_after_s: When it is cancelled, counted from its submission.
    """

    word: str
    kind: RequestKind
    seconds: float
    cancel_after_s: float


@dataclass(frozen=True)
class Client:
    """One ``kakeya_mac run``.

    Attributes:
        name: Who it says asks.
        after: The request after which it starts.
        kill_at_s: Seconds until it is killed; None: never.
        from_push: They count from the moment it pushes, not from its start.
        with_children: Its git children are killed with it.
    """

    name: str
    after: int
    kill_at_s: float | None
    from_push: bool
    with_children: bool


@dataclass(frozen=True)
class Blow:
    """One fault: seconds after the one before, what, on which runner, and how long that one is away."""

    gap_s: float
    fault: Fault
    runner: int
    pause_s: float


def asks(seed: int, count: int, *, cancels: bool) -> list[Ask]:
    """The requests of a run, in order."""
    chance = _chance(seed, "asks")
    weights = {kind: weight for kind, weight in _KINDS.items() if cancels or kind is not RequestKind.CANCEL}
    drawn = []
    for index in range(count):
        kind = chance.choices(list(weights), list(weights.values()))[0]
        seconds = round(chance.uniform(0.1, 0.6), 3) if kind is RequestKind.WORK else 0.0
        seconds = 20.0 if kind is RequestKind.CANCEL else seconds
        drawn.append(Ask(f"word-{index:05d}", kind, seconds, round(chance.uniform(0.0, 3.0), 3)))
    return drawn


def clients(seed: int, count: int) -> list[Client]:
    """Client processes in addition, one for about a dozen requests."""
    chance = _chance(seed, "clients")
    drawn = []
    for index in range(max(2, count // 12)):
        from_push = chance.random() < 0.6
        kill_at_s = round(chance.uniform(0.0, 0.1) if from_push else chance.uniform(0.05, 1.0), 3)
        drawn.append(
            Client(
                name=f"client-{index:04d}",
                after=chance.randrange(count),
                kill_at_s=kill_at_s if chance.random() < _KILLED_CLIENTS else None,
                from_push=from_push,
                with_children=chance.random() < 0.5,
            )
        )
    return drawn


def blows(seed: int, runners: int, lease_s: float) -> Iterator[Blow]:
    """The faults of a run, without end."""
    chance = _chance(seed, "blows")
    deck = [fault for fault, count in _DECK.items() for _ in range(count)]
    while True:
        chance.shuffle(deck)
        for fault in deck:
            long = fault in (Fault.KILL_LONG, Fault.SLEEP)
            pause = chance.uniform(1.2, 2.0) * lease_s if long else chance.uniform(0.0, 1.5)
            yield Blow(chance.expovariate(1 / _MEAN_GAP_S), fault, chance.randrange(runners), pause)


def _chance(seed: int, what: str) -> random.Random:
    return random.Random(f"{seed}/{what}")  # noqa: S311 - the same seed must give the same run
