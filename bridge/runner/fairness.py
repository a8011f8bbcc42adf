"""Whose request is next: a turn for each requester, and how much each may ask for. Pure; no I/O, no clock.

Requesters take turns, the one served longest ago first; within one, the oldest request first. However many
one of them queues, another's oldest request waits for at most one turn of each. A turn is whatever the
runner does for a request, a refusal included, so a flood of refusals is paid for by who caused it. Unsigned
requests are one requester together; those whose requester is not known yet come last.

What a requester queues beyond its quota, the newest, is refused before the next of its requests runs; after
some refusals in a row one runs all the same, for unsigned requests have many authors. What it may not run at
the same time waits; two runners that claim in the same instant can exceed that by one each. Each runner has
a `TurnMemory` of its own, for as long as it runs: a requester's share is even on each of them.
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
class WaitingRequest:
    """A pending request, as far as turns are concerned.

    Unless its requester is `known`, that means nothing. It may be `claimed` by a runner that has fallen
    silent, so it keeps a place. `over_quota` says why it must be refused in its turn; None: it may run.
    """

    nonce: str
    requester: Requester
    known: bool = True
    claimed: bool = False
    over_quota: str | None = None


class TurnMemory:
    """A runner's memory of whom it served last. None is forgotten: one that came back would be first."""

    def __init__(self) -> None:
        self._turns = 0
        self._last: dict[Requester, int] = {}
        self._refusals: dict[Requester, int] = {}

    def note(self, requester: Requester, *, refused: bool = False) -> None:
        """Something was done for a requester in its turn; `refused`: for its quota."""
        self._turns += 1
        self._last[requester] = self._turns
        self._refusals[requester] = self.refusals(requester) + 1 if refused else 0

    def last(self, requester: Requester) -> int:
        """The number of its last turn, counted up from 1; 0: it never had one."""
        return self._last.get(requester, 0)

    def refusals(self, requester: Requester) -> int:
        """How many of its last turns in a row were refusals for its quota."""
        return self._refusals.get(requester, 0)


def order(
    waiting: Sequence[WaitingRequest],
    memory: TurnMemory,
    *,
    max_queued: Callable[[Requester], int],
    max_running: int = 0,
) -> list[WaitingRequest]:
    """The order in which a runner should try what is pending.

    Try from the front until something was done for a request, `TurnMemory.note` its turn, and ask again.
    What is claimed takes no turn of its own: it comes just before the next request of its requester.
    `max_queued` says how many requests a requester may have waiting, claimed ones not counted; at most
    `max_running` of one may be claimed at the same time, with 0 any number.
    """
    by_age = sorted(waiting, key=lambda request: request.nonce)
    known: dict[Requester, list[WaitingRequest]] = {}
    for request in by_age:
        if request.known:
            known.setdefault(request.requester, []).append(request)
    running = Counter(request.requester for request in waiting if request.known and request.claimed)
    requesters = sorted(known, key=lambda who: (memory.last(who), running[who], known[who][0].nonce))
    lines = [_line(known[who], max_queued(who), max_running, memory.refusals(who)) for who in requesters]
    rounds = chain.from_iterable(zip_longest(*lines, fillvalue=()))
    return [*chain.from_iterable(rounds), *(request for request in by_age if not request.known)]


def _line(
    requests: Sequence[WaitingRequest], max_queued: int, max_running: int, refusals: int
) -> list[tuple[WaitingRequest, ...]]:
    """One requester's turns, oldest first, with what is refused before what runs; see `REFUSALS_IN_A_ROW`."""
    claimed = tuple(request for request in requests if request.claimed)
    waiting = [request for request in requests if not request.claimed]
    sentence = over_quota(requests[0].requester, max_queued)
    refused = iter([replace(request, over_quota=sentence) for request in waiting[max_queued:]])
    may_run = max_running == 0 or len(claimed) < max_running
    line = list(islice(refused, max(0, REFUSALS_IN_A_ROW - refusals)))
    for request in waiting[:max_queued] if may_run else ():
        line += [request, *islice(refused, REFUSALS_IN_A_ROW)]
    line += refused
    if not line:
        return [claimed] if claimed else []
    return [(*claimed, line[0]), *((request,) for request in line[1:])]


def over_quota(requester: Requester, limit: int) -> str:
    """Why a request beyond a requester's quota is refused, in one sentence."""
    who = "unsigned requests together" if requester is None else f"the requester {requester}"
    return f"this machine lets {who} have at most {limit} waiting, and older ones fill that"
