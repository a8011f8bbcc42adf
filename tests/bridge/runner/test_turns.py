"""Everybody gets a turn, however many others queue; quotas are exact; the order is one, whatever comes in."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.runner.turns import REFUSALS_IN_A_ROW, Asking, Requester, Service, Turn, order

PEOPLE: tuple[Requester, ...] = (None, "ann", "bob", "cat", "dan")


def nonce(number: int) -> str:
    return f"20260301t120000z{number:012x}"


@st.composite
def crowds(draw: st.DrawFn) -> list[Asking]:
    """Pending requests of a few requesters, some claimed, of some unknown who asked."""
    numbers = draw(st.lists(st.integers(0, 10_000), unique=True, max_size=40))
    return [
        Asking(
            nonce(number),
            draw(st.sampled_from(PEOPLE)),
            known=draw(st.integers(0, 9)) > 0,
            claimed=draw(st.integers(0, 4)) == 0,
        )
        for number in numbers
    ]


histories = st.lists(st.sampled_from(PEOPLE), max_size=12)
limits = st.integers(0, 12)


def remembering(history: Sequence[Requester]) -> Service:
    service = Service()
    for requester in history:
        service.note(Turn(nonce(0), requester))
    return service


def planned(
    crowd: Sequence[Asking], history: Sequence[Requester] = (), *, queued: int = 1000, running: int = 0
) -> list[Turn]:
    return order(crowd, remembering(history), max_queued=lambda _: queued, max_running=running)


def waiting(crowd: Sequence[Asking], requester: Requester) -> list[str]:
    mine = [a.nonce for a in crowd if a.known and not a.claimed and a.requester == requester]
    return sorted(mine)


def claimed(crowd: Sequence[Asking], requester: Requester) -> list[str]:
    return sorted(a.nonce for a in crowd if a.known and a.claimed and a.requester == requester)


@given(crowds(), histories, limits)
def test_each_request_has_one_place(crowd: list[Asking], history: list[Requester], queued: int) -> None:
    places = [turn.nonce for turn in planned(crowd, history, queued=queued)]
    assert sorted(places) == sorted(asking.nonce for asking in crowd)


@given(crowds(), histories, limits, st.integers(0, 3), st.randoms())
def test_the_order_does_not_depend_on_how_the_requests_came_in(
    crowd: list[Asking], history: list[Requester], queued: int, running: int, chance: random.Random
) -> None:
    shuffled = list(crowd)
    chance.shuffle(shuffled)
    once = planned(crowd, history, queued=queued, running=running)
    assert planned(shuffled, history, queued=queued, running=running) == once


@given(crowds(), histories, limits)
def test_exactly_the_newest_beyond_the_quota_are_refused(
    crowd: list[Asking], history: list[Requester], queued: int
) -> None:
    turns = planned(crowd, history, queued=queued)
    for requester in PEOPLE:
        refused = sorted(t.nonce for t in turns if t.over_quota and t.requester == requester)
        assert refused == waiting(crowd, requester)[queued:]
    assert all(str(queued) in turn.over_quota for turn in turns if turn.over_quota)


@given(crowds(), histories, st.integers(1, 3))
def test_who_has_enough_running_waits_and_others_do_not(
    crowd: list[Asking], history: list[Requester], running: int
) -> None:
    places = {turn.nonce for turn in planned(crowd, history, running=running)}
    for requester in PEOPLE:
        full = len(claimed(crowd, requester)) >= running
        assert places.issuperset(claimed(crowd, requester)), "a silent claim could not be taken over"
        assert places.intersection(waiting(crowd, requester)) == (
            set() if full else set(waiting(crowd, requester))
        )


@given(crowds(), histories)
def test_within_a_requester_the_oldest_is_first(crowd: list[Asking], history: list[Requester]) -> None:
    turns = planned(crowd, history)
    for requester in PEOPLE:
        mine = [t.nonce for t in turns if t.nonce in waiting(crowd, requester)]
        assert mine == waiting(crowd, requester)


@given(crowds(), histories)
def test_in_every_stretch_of_the_order_turns_are_even(crowd: list[Asking], history: list[Requester]) -> None:
    """Until its requests run out, no requester is more than one turn ahead of another."""
    left = {requester: len(waiting(crowd, requester)) for requester in PEOPLE}
    had: Counter[Requester] = Counter()
    holding = {asking.nonce for asking in crowd if asking.claimed or not asking.known}
    for turn in planned(crowd, history):
        if turn.nonce in holding:
            continue
        had[turn.requester] += 1
        for other, all_of_it in left.items():
            assert had[other] == all_of_it or had[turn.requester] <= had[other] + 1


@given(crowds(), histories)
def test_of_whom_nothing_is_known_comes_last(crowd: list[Asking], history: list[Requester]) -> None:
    unknown = {asking.nonce for asking in crowd if not asking.known}
    places = [turn.nonce in unknown for turn in planned(crowd, history)]
    assert places == sorted(places)


class Queue:
    """Requests that come and are served, one turn at a time."""

    def __init__(self, queued: int) -> None:
        self.crowd: list[Asking] = []
        self.service = Service()
        self.queued = queued
        self.pushed = 0

    def push(self, requester: Requester, count: int = 1) -> None:
        for _ in range(count):
            self.pushed += 1
            self.crowd.append(Asking(nonce(self.pushed), requester))

    def serve(self) -> Requester:
        """Whose turn it was."""
        turn = order(self.crowd, self.service, max_queued=lambda _: self.queued)[0]
        self.service.note(turn)
        self.crowd = [asking for asking in self.crowd if asking.nonce != turn.nonce]
        return turn.requester


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 60), st.integers(1, 40), st.integers(0, 30))
def test_nobody_starves_whatever_the_others_push(others: int, flood: int, queued: int, before: int) -> None:
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


def test_a_claim_costs_no_turn_and_stands_before_the_next_of_its_requester() -> None:
    crowd = [
        Asking(nonce(1), "ann", claimed=True),
        Asking(nonce(2), "ann", claimed=True),
        Asking(nonce(3), "bob"),
        Asking(nonce(4), "ann"),
        Asking(nonce(5), "bob"),
    ]
    # Bob has nothing running, so he is first among those never served.
    assert [turn.nonce[-1] for turn in planned(crowd)] == ["3", "1", "2", "4", "5"]
    assert [turn.nonce[-1] for turn in planned(crowd, ["bob"])] == ["1", "2", "4", "3", "5"]


def test_refusals_are_turns_and_come_before_what_runs() -> None:
    crowd = [Asking(nonce(n), "ann") for n in range(4)] + [Asking(nonce(n), "bob") for n in (8, 9)]
    turns = planned(crowd, ["bob"], queued=2)
    shown = [(turn.requester, turn.nonce[-1], turn.over_quota is not None) for turn in turns]
    assert shown == [
        ("ann", "2", True),
        ("bob", "8", False),
        ("ann", "3", True),
        ("bob", "9", False),
        ("ann", "0", False),
        ("ann", "1", False),
    ]


@given(st.integers(1, 5), st.integers(0, 3 * REFUSALS_IN_A_ROW))
def test_a_queue_served_to_its_end_ran_its_quota_and_what_had_to_run_meanwhile(quota: int, more: int) -> None:
    queue, refused = Queue(quota), list[bool]()
    queue.push("ann", quota + more)
    while queue.crowd:
        turn = order(queue.crowd, queue.service, max_queued=lambda _: quota)[0]
        assert queue.serve() == "ann"
        refused.append(turn.over_quota is not None)
    assert sum(refused) == more - more // (REFUSALS_IN_A_ROW + 1)
    if more <= REFUSALS_IN_A_ROW:
        assert refused == [True] * more + [False] * quota


def test_a_flood_of_one_author_does_not_keep_the_unsigned_ones_from_running() -> None:
    queue = Queue(1)
    queue.push(None, 100)
    ran = 0
    for _ in range(5 * (REFUSALS_IN_A_ROW + 1)):
        ran += order(queue.crowd, queue.service, max_queued=lambda _: 1)[0].over_quota is None
        queue.serve()
        queue.push(None)
    assert ran == 5


def test_one_requester_may_have_another_quota_and_unsigned_requests_share_one() -> None:
    crowd = [
        Asking(nonce(n), requester) for n, requester in enumerate(["ci", "ci", None, None, "ann", "ann"])
    ]
    quotas = {"ci": 2, None: 1, "ann": 0}
    turns = order(crowd, Service(), max_queued=lambda requester: quotas[requester])
    refused = {(turn.requester, turn.nonce[-1]): turn.over_quota for turn in turns if turn.over_quota}
    assert set(refused) == {(None, "3"), ("ann", "4"), ("ann", "5")}
    assert "unsigned requests together" in (refused[None, "3"] or "")
    assert "the requester ann have at most 0" in (refused["ann", "4"] or "")


def test_ordering_a_crowded_queue_is_quick() -> None:
    import time

    crowd = [Asking(nonce(n), PEOPLE[n % 5]) for n in range(20_000)]
    start = time.perf_counter()
    assert len(planned(crowd)) == 20_000
    assert time.perf_counter() - start < 2
