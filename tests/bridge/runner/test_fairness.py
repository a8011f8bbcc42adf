"""Each requester gets its turn, however many others queue; quotas are exact; the order is deterministic."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.bus.requests import RefValue
from bridge.runner.admission import Request
from bridge.runner.queue import REFUSALS_IN_A_ROW, Requester, Turns, note_turn, order
from bridge.signing.trust import Signature, TrustLevel

PEOPLE: tuple[Requester, ...] = (None, "ann", "bob", "cat", "dan")


def nonce(number: int) -> str:
    return f"20260301t120000z{number:012x}"


def ask(number: int, requester: Requester, *, known: bool = True, claimed: bool = False) -> Request:
    request = Request(nonce(number), "a" * 40, is_read=known)
    request.signer = None if requester is None else Signature(TrustLevel.TRUSTED, requester)
    request.claim = RefValue("refs/mac-bridge/claims/x", "b" * 40) if claimed else None
    return request


def plan(crowd: Sequence[Request], memory: Turns, queued: int = 1000, running: int = 0) -> list[Request]:
    return order(
        crowd,
        memory,
        requester=lambda request: request.requester,
        max_queued=lambda _: queued,
        max_running=running,
    )


@st.composite
def crowds(draw: st.DrawFn) -> list[Request]:
    """Pending requests of a few requesters, some claimed, of some unknown who asked."""
    numbers = draw(st.lists(st.integers(0, 10_000), unique=True, max_size=40))
    return [
        ask(
            number,
            draw(st.sampled_from(PEOPLE)),
            known=draw(st.integers(0, 9)) > 0,
            claimed=draw(st.integers(0, 4)) == 0,
        )
        for number in numbers
    ]


histories = st.lists(st.sampled_from(PEOPLE), max_size=12)
limits = st.integers(0, 12)


def remembering(history: Sequence[Requester]) -> Turns:
    memory: Turns = {}
    for requester in history:
        note_turn(memory, requester)
    return memory


def planned(
    crowd: Sequence[Request],
    history: Sequence[Requester] = (),
    *,
    queued: int = 1000,
    running: int = 0,
) -> list[Request]:
    return plan(crowd, remembering(history), queued, running)


def waiting(crowd: Sequence[Request], requester: Requester) -> list[str]:
    mine = [a.nonce for a in crowd if a.is_read and a.claim is None and a.requester == requester]
    return sorted(mine)


def claimed(crowd: Sequence[Request], requester: Requester) -> list[str]:
    return sorted(a.nonce for a in crowd if a.is_read and a.claim and a.requester == requester)


@given(crowds(), histories, limits)
def test_each_request_has_one_place(crowd: list[Request], history: list[Requester], queued: int) -> None:
    places = [turn.nonce for turn in planned(crowd, history, queued=queued)]
    assert sorted(places) == sorted(request.nonce for request in crowd)


@given(crowds(), histories, limits, st.integers(0, 3), st.randoms())
def test_order_does_not_depend_on_how_requests_came_in(
    crowd: list[Request], history: list[Requester], queued: int, running: int, chance: random.Random
) -> None:
    shuffled = list(crowd)
    chance.shuffle(shuffled)
    once = planned(crowd, history, queued=queued, running=running)
    assert planned(shuffled, history, queued=queued, running=running) == once


@given(crowds(), histories, limits)
def test_newest_beyond_the_quota_are_refused(
    crowd: list[Request], history: list[Requester], queued: int
) -> None:
    turns = planned(crowd, history, queued=queued)
    for requester in PEOPLE:
        refused = sorted(t.nonce for t in turns if t.over_quota and t.requester == requester)
        assert refused == waiting(crowd, requester)[queued:]


@given(crowds(), histories, st.integers(1, 3))
def test_requester_with_enough_running_waits_alone(
    crowd: list[Request], history: list[Requester], running: int
) -> None:
    places = {turn.nonce for turn in planned(crowd, history, running=running)}
    for requester in PEOPLE:
        full = len(claimed(crowd, requester)) >= running
        assert places.issuperset(claimed(crowd, requester)), "a silent claim could not be replaced"
        assert places.intersection(waiting(crowd, requester)) == (
            set() if full else set(waiting(crowd, requester))
        )


@given(crowds(), histories)
def test_turns_are_even(crowd: list[Request], history: list[Requester]) -> None:
    """Until its requests run out, no requester is more than one turn ahead of another."""
    left = {requester: len(waiting(crowd, requester)) for requester in PEOPLE}
    had: Counter[Requester] = Counter()
    holding = {request.nonce for request in crowd if request.claim or not request.is_read}
    for turn in planned(crowd, history):
        if turn.nonce in holding:
            continue
        had[turn.requester] += 1
        for other, all_of_it in left.items():
            assert had[other] == all_of_it or had[turn.requester] <= had[other] + 1


@given(crowds(), histories)
def test_unknown_requesters_come_last(crowd: list[Request], history: list[Requester]) -> None:
    unknown = {request.nonce for request in crowd if not request.is_read}
    places = [turn.nonce in unknown for turn in planned(crowd, history)]
    assert places == sorted(places)


class Queue:
    """Requests that come and are served, one turn at a time."""

    def __init__(self, queued: int) -> None:
        self.crowd: list[Request] = []
        self.memory: Turns = {}
        self.queued = queued
        self.pushed = 0

    def push(self, requester: Requester, count: int = 1) -> None:
        for _ in range(count):
            self.pushed += 1
            self.crowd.append(ask(self.pushed, requester))

    def serve(self) -> Requester:
        """Whose turn it was."""
        turn = plan(self.crowd, self.memory, self.queued)[0]
        note_turn(self.memory, turn.requester, refused=turn.over_quota)
        self.crowd = [request for request in self.crowd if request.nonce != turn.nonce]
        return turn.requester


@given(st.integers(1, 4), st.integers(1, 60), st.integers(1, 40), st.integers(0, 30))
def test_no_requester_starves(others: int, flood: int, queued: int, before: int) -> None:
    """However much the others queue and go on queueing, each is served within one turn of everybody."""
    queue = Queue(queued)
    flooders = [f"flooder {n}" for n in range(others)]
    for flooder in flooders:
        queue.push(flooder, flood)
    for _ in range(before):
        queue.push(queue.serve(), 2)
    queue.push("honest", 3)
    for _ in range(3):
        served = []
        while "honest" not in served:
            served.append(queue.serve())
            for flooder in flooders:
                queue.push(flooder, 2)
            assert len(served) <= others + 1, served


def test_claimed_request_takes_no_turn() -> None:
    crowd = [
        ask(1, "ann", claimed=True),
        ask(2, "ann", claimed=True),
        ask(3, "bob"),
        ask(4, "ann"),
        ask(5, "bob"),
    ]
    # Bob has nothing running, so he is first among those never served.
    assert [turn.nonce[-1] for turn in planned(crowd)] == ["3", "1", "2", "4", "5"]
    assert [turn.nonce[-1] for turn in planned(crowd, ["bob"])] == ["1", "2", "4", "3", "5"]


def test_refusals_are_turns_before_what_runs() -> None:
    crowd = [ask(n, "ann") for n in range(4)] + [ask(n, "bob") for n in (8, 9)]
    turns = planned(crowd, ["bob"], queued=2)
    shown = [(turn.requester, turn.nonce[-1], turn.over_quota) for turn in turns]
    assert shown == [
        ("ann", "2", True),
        ("bob", "8", False),
        ("ann", "3", True),
        ("bob", "9", False),
        ("ann", "0", False),
        ("ann", "1", False),
    ]


@pytest.mark.slow
@given(st.integers(1, 5), st.integers(0, 3 * REFUSALS_IN_A_ROW))
def test_one_request_runs_after_some_refusals(quota: int, more: int) -> None:
    queue, refused = Queue(quota), list[bool]()
    queue.push("ann", quota + more)
    while queue.crowd:
        turn = plan(queue.crowd, queue.memory, quota)[0]
        assert queue.serve() == "ann"
        refused.append(turn.over_quota)
    assert sum(refused) == more - more // (REFUSALS_IN_A_ROW + 1)
    if more <= REFUSALS_IN_A_ROW:
        assert refused == [True] * more + [False] * quota


def test_flood_does_not_keep_unsigned_requests_from_running() -> None:
    queue = Queue(1)
    queue.push(None, 100)
    ran = 0
    for _ in range(5 * (REFUSALS_IN_A_ROW + 1)):
        ran += plan(queue.crowd, queue.memory, 1)[0].over_quota is False
        queue.serve()
        queue.push(None)
    assert ran == 5


def test_quotas_are_per_requester() -> None:
    crowd = [ask(n, requester) for n, requester in enumerate(["ci", "ci", None, None, "ann", "ann"])]
    quotas = {"ci": 2, None: 1, "ann": 0}
    turns = order(crowd, {}, requester=lambda each: each.requester, max_queued=lambda who: quotas[who])
    refused = {(turn.requester, turn.nonce[-1]) for turn in turns if turn.over_quota}
    assert refused == {(None, "3"), ("ann", "4"), ("ann", "5")}
