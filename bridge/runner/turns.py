"""Whose request is next: a turn for each requester, and how much each may ask for. Pure; no I/O, no clock.

Requesters take turns, the one served longest ago first; within one, the oldest request first. However many
one of them queues, another's oldest request waits for at most one turn of each. A turn is whatever the
runner does for a request, a refusal included, so a flood of refusals is paid for by who caused it. Unsigned
requests are one requester together; those of which it is not yet known who asked come last.

What a requester queues beyond its quota, the newest, is refused before the next of its requests runs; after
some refusals in a row one runs all the same, for unsigned requests have many authors. What it may not run at
the same time waits; two runners that claim in the same instant can exceed that by one each. `Service` forgets
when its runner ends, and each runner has its own: over several, a requester's share is even on each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest

# So many refusals may come before a request of the same requester that may run.
REFUSALS_IN_A_ROW = 20

# A requester is the principal that signed; None: all unsigned requests together.
Requester = str | None


@dataclass(frozen=True)
class Asking:
    """A pending request, as far as turns are concerned.

    Attributes:
        nonce: The request; sorts by the time it was made.
        requester: Who asked.
        known: Whether `requester` has been found out; otherwise it means nothing.
        claimed: Whether some runner holds it. Its claim may have fallen silent, so it keeps a place.
    """

    nonce: str
    requester: Requester
    known: bool = True
    claimed: bool = False


@dataclass(frozen=True)
class Turn:
    """A request in its place.

    Attributes:
        nonce: The request.
        requester: Whose turn it is, for `Service.note`; of a request of which that is not known yet, None.
        over_quota: Why it must be refused, in one sentence; None: it may run.
    """

    nonce: str
    requester: Requester
    over_quota: str | None = None


class Service:
    """A runner's memory of whom it served last. Nobody is forgotten: whoever came back would be first."""

    def __init__(self) -> None:
        self._turns = 0
        self._last: dict[Requester, int] = {}
        self._refusals: dict[Requester, int] = {}

    def note(self, turn: Turn) -> None:
        """Something was done for a request in its turn: it ran, was refused, or failed."""
        requester = turn.requester
        self._turns += 1
        self._last[requester] = self._turns
        self._refusals[requester] = 0 if turn.over_quota is None else self.refusals(requester) + 1

    def last(self, requester: Requester) -> int:
        """The number of its last turn, counted up from 1; 0: it never had one."""
        return self._last.get(requester, 0)

    def refusals(self, requester: Requester) -> int:
        """How many of its last turns in a row were refusals for its quota."""
        return self._refusals.get(requester, 0)


def order(
    asking: Sequence[Asking],
    service: Service,
    *,
    max_queued: Callable[[Requester], int],
    max_running: int = 0,
) -> list[Turn]:
    """The order in which a runner should try what is pending.

    Try from the front until something was done for a request, `Service.note` its turn, and ask again.
    What is claimed takes no turn of its own: it stands just before the next request of its requester.

    Args:
        asking: What is pending, each nonce once, in any order.
        service: Whom this runner served.
        max_queued: How many requests a requester may have waiting, claimed ones not counted.
        max_running: How many of one requester may be claimed at the same time; 0: no limit.
    """
    known: dict[Requester, list[Asking]] = {}
    for request in sorted(asking, key=lambda request: request.nonce):
        if request.known:
            known.setdefault(request.requester, []).append(request)
    running = Counter(request.requester for request in asking if request.known and request.claimed)
    lines = [
        _line(requester, requests, max_queued(requester), max_running, service.refusals(requester))
        for requester, requests in sorted(
            known.items(),
            key=lambda item: (service.last(item[0]), running[item[0]], item[1][0].nonce),
        )
    ]
    rounds = chain.from_iterable(zip_longest(*lines, fillvalue=()))
    unknown = sorted(request.nonce for request in asking if not request.known)
    return [*chain.from_iterable(rounds), *(Turn(nonce, None) for nonce in unknown)]


def _line(
    requester: Requester, requests: Sequence[Asking], max_queued: int, max_running: int, refusals: int
) -> list[tuple[Turn, ...]]:
    """One requester's turns, oldest first, with what is refused before what runs; see `REFUSALS_IN_A_ROW`."""
    claimed = tuple(Turn(request.nonce, requester) for request in requests if request.claimed)
    waiting = [Turn(request.nonce, requester) for request in requests if not request.claimed]
    sentence = over_quota(requester, max_queued)
    refused = iter([replace(turn, over_quota=sentence) for turn in waiting[max_queued:]])
    may_run = max_running == 0 or len(claimed) < max_running
    line = list(islice(refused, max(0, REFUSALS_IN_A_ROW - refusals)))
    for turn in waiting[:max_queued] if may_run else ():
        line += [turn, *islice(refused, REFUSALS_IN_A_ROW)]
    line += refused
    if not line:
        return [claimed] if claimed else []
    return [(*claimed, line[0]), *((turn,) for turn in line[1:])]


def over_quota(requester: Requester, limit: int) -> str:
    """Why a request beyond a requester's quota is refused, in one sentence."""
    who = "unsigned requests together" if requester is None else f"the requester {requester}"
    return f"this machine lets {who} have at most {limit} waiting, and older ones fill that"
