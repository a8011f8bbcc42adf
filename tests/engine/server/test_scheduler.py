"""The engine's thread: turns, cancelling, models that come and go, and nothing left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.cache.transaction import Transaction
from engine.decode import Step
from engine.errors import ConfigurationError, EngineError, ModelError, ModelNotHere
from engine.registry import CHANNELS, ModelEntry, Places, Source, locate
from engine.sampling import Sampling
from engine.server.scheduler import DecodeJob, Scheduler, SchedulerLimits
from engine.server.schema import ShuttingDownError
from engine.server.sequence import DecodeFailed, DecodeFinished, DecodeRequest, Event, PrefillProgress
from engine.server.sessions import LoadedModel
from engine.session import Session
from engine.target.loading import SHIPPED_TARGET

NATIVE = CHANNELS["native"]
ENDLESS = {2: -100.0, 7: -100.0}
PLACES = Places({}, Path("/nowhere"))
ENTRIES = {
    name: ModelEntry(name=name, summary="", target=target, drafter=drafter)
    for name, target, drafter in (
        ("one", Source(shipped=True), Source(shipped=True)),
        ("two", Source(path=str(SHIPPED_TARGET)), Source(path="prompt-lookup")),
        ("bad", Source(path="/nowhere"), None),
        ("away", Source(folder="no-such-folder"), None),
    )
}


@dataclass
class Heard:
    """What the thread said of one request."""

    events: list[Event] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events if isinstance(event, Step) for token in event.tokens]

    @property
    def last(self) -> Any:
        return self.events[-1] if self.events else None

    def over(self) -> bool:
        return isinstance(self.last, DecodeFinished | DecodeFailed)


class Bench:
    """A scheduler and short ways to it."""

    def __init__(self, **limits: Any) -> None:
        self.loads: list[str] = []
        self.scheduler = Scheduler(self._find, SchedulerLimits(**limits))
        self.scheduler.start()

    def _find(self, entry: ModelEntry) -> Callable[[], LoadedModel]:
        located = locate(entry, PLACES)

        def load() -> LoadedModel:
            self.loads.append(entry.name)
            return LoadedModel.load(located)

        return load

    def submit(
        self,
        prompt: list[int],
        count: int = 20,
        heard: Heard | None = None,
        choice_of: object | None = None,
        **work: Any,
    ) -> tuple[DecodeJob, Heard]:
        """Ask for a text that does not end by itself."""
        heard = heard or Heard()
        asked = DecodeRequest(prompt, len(prompt) - 1, count, **({"channel": NATIVE, "bias": ENDLESS} | work))
        lease = self.scheduler.lease(ENTRIES["one"])
        lease.granted.result(30)
        return self.scheduler.submit(lease, asked, heard.events.append, choice_of), heard

    def ended(self, heard: Heard) -> DecodeFinished:
        wait(heard.over)
        assert isinstance(heard.last, DecodeFinished), heard.last
        return heard.last


def wait(until: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench(parallel=3, models=1, chunk=16, session_s=0.5)
    yield bench
    bench.scheduler.stop()


PROMPT = list(range(300, 340))


def test_the_last_event_has_the_measurements(bench: Bench):
    _, heard = bench.submit(PROMPT)
    ended = bench.ended(heard)
    assert len(heard.tokens) == 20
    assert ended.outcome.finish == "length"
    assert ended.outcome.resident_bytes > 0
    assert ended.outcome.drafter_resident_bytes > 0
    assert [type(event) for event in heard.events[:2]] == [PrefillProgress, PrefillProgress]
    assert heard.events[0] == PrefillProgress(0, 40)


def test_requests_take_turns_and_do_not_affect_each_other(bench: Bench):
    prompts = [[first, *PROMPT] for first in (20, 21, 22)]
    alone = []
    for prompt in prompts:
        _, heard = bench.submit(prompt, 20)
        bench.ended(heard)
        alone.append(heard.tokens)
    order: list[int] = []
    heards = [
        bench.submit(prompt, 20, Heard(Noting(index, order)))[1] for index, prompt in enumerate(prompts)
    ]
    wait(lambda: all(heard.over() for heard in heards))
    assert [heard.tokens for heard in heards] == alone
    changes = sum(one != other for one, other in pairwise(order))
    assert changes > 2 * len(prompts)  # not one after the other


def test_a_request_of_many_choices_leaves_room_for_another(bench: Bench):
    order: list[int] = []
    heards = [
        bench.submit([first, *PROMPT], 40, Heard(Noting(first, order)), choice_of="many")[1]
        for first in range(9)
    ]
    heards.append(bench.submit([9, *PROMPT], 1, Heard(Noting(9, order)), choice_of="other")[1])
    wait(lambda: all(heard.over() for heard in heards))
    assert list(dict.fromkeys(order)).index(9) in {3, 4}  # behind those that were begun, not behind all


class Noting(list[Event]):
    """Events, whose order among all requests is noted."""

    def __init__(self, index: int, order: list[int]) -> None:
        super().__init__()
        self._index, self._order = index, order

    def append(self, event: Event) -> None:
        self._order.append(self._index)
        super().append(event)


def test_a_cancelled_request_ends_and_its_session_stays_good(bench: Bench):
    job, heard = bench.submit(PROMPT, 900)
    wait(lambda: len(heard.tokens) > 5)
    job.cancelled.set()
    wait(lambda: bench.scheduler.stats.active == 0)
    assert not heard.over()
    got = heard.tokens
    _, again = bench.submit([*PROMPT, *got[:-1]], 4)
    assert bench.ended(again).cached_tokens >= len(PROMPT) - 1


@pytest.mark.slow
def test_snapshots_expire_and_free_their_memory(bench: Bench):
    _, heard = bench.submit(PROMPT)
    bench.ended(heard)
    wait(lambda: bench.scheduler.stats.active == 0 and bench.scheduler.stats.cached == 0, 10)
    assert (bench.scheduler.stats.cached_bytes, bench.scheduler.stats.active_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("work", "error", "says"),
    [
        ({"block": 99}, ConfigurationError, "block 99 is more than 16"),
        ({"block": 4, "drafter": "none"}, ConfigurationError, "needs a drafter"),
        ({"channel": CHANNELS["sliding-bounded-512"]}, None, ""),
    ],
)
def test_an_impossible_request_fails_alone(bench: Bench, work: Any, error: Any, says: str):
    _, heard = bench.submit(PROMPT, 3, **work)
    wait(heard.over)
    if error is None:
        assert isinstance(heard.last, DecodeFinished)
    else:
        assert isinstance(heard.last.error, error)
        assert says in str(heard.last.error)
    _, other = bench.submit(PROMPT, 3)
    bench.ended(other)


def test_a_bug_in_one_request_ends_that_one(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object, **__: object) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr("engine.generate.Sampler", broken)
    _, heard = bench.submit(PROMPT, 5, sampling=Sampling(temperature=1.0))
    _, other = bench.submit(PROMPT, 5)
    wait(lambda: heard.over() and other.over())
    assert isinstance(heard.last.error, RuntimeError)
    assert isinstance(other.last, DecodeFinished)
    assert bench.scheduler.healthy


def test_a_second_model_waits_and_is_not_overtaken():
    bench = Bench(models=1)
    try:
        first = bench.scheduler.lease(ENTRIES["one"])
        assert first.granted.result(30).entry.name == "one"
        second = bench.scheduler.lease(ENTRIES["two"])
        third = bench.scheduler.lease(ENTRIES["one"])
        time.sleep(0.3)
        assert not second.granted.done()
        assert not third.granted.done()  # although its model is there
        bench.scheduler.release(first)
        assert second.granted.result(30).entry.name == "two"
        assert not third.granted.done()
        bench.scheduler.release(second)
        assert third.granted.result(30).entry.name == "one"
        assert bench.loads == ["one", "two", "one"]
        wait(lambda: bench.scheduler.stats.models == ("one",))
    finally:
        bench.scheduler.stop()


def test_a_failed_load_fails_its_lease_alone():
    bench = Bench(models=2)
    try:
        bad = bench.scheduler.lease(ENTRIES["bad"])
        with pytest.raises(ModelError):
            bad.granted.result(30)
        bench.scheduler.release(bad)
        _, heard = bench.submit(PROMPT, 3)
        bench.ended(heard)
    finally:
        bench.scheduler.stop()


def test_a_lease_released_before_its_grant_is_dropped():
    bench = Bench(models=1)
    try:
        first = bench.scheduler.lease(ENTRIES["one"])
        first.granted.result(30)
        bench.scheduler.release(bench.scheduler.lease(ENTRIES["two"]))
        third = bench.scheduler.lease(ENTRIES["one"])
        assert third.granted.result(30).entry.name == "one"
        assert bench.loads == ["one"]
    finally:
        bench.scheduler.stop()


def test_stopping_fails_active_requests():
    bench = Bench()
    _, heard = bench.submit(PROMPT, 900)
    wait(lambda: heard.tokens)
    bench.scheduler.stop()
    assert isinstance(heard.last, DecodeFailed)
    assert "shutting down" in str(heard.last.error)
    assert not bench.scheduler.healthy
    assert (bench.scheduler.stats.active_bytes, bench.scheduler.stats.models) == (0, ())
    bench.scheduler.stop()


def test_all_requests_fail_when_the_thread_dies(monkeypatch: pytest.MonkeyPatch):
    bench = Bench()
    _, heard = bench.submit(PROMPT, 900)
    wait(lambda: heard.tokens)

    def broken() -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(bench.scheduler, "_admit", broken)
    wait(heard.over)
    assert isinstance(heard.last.error, EngineError)
    wait(lambda: not bench.scheduler.healthy)
    with pytest.raises(EngineError, match="has ended"):
        bench.scheduler.lease(ENTRIES["one"])


def test_a_missing_model_unloads_no_other():
    bench = Bench(models=1)
    try:
        _, heard = bench.submit(PROMPT, 3)
        bench.ended(heard)
        away = bench.scheduler.lease(ENTRIES["away"])
        with pytest.raises(ModelNotHere):
            away.granted.result(30)
        bench.scheduler.release(away)
        _, again = bench.submit([*PROMPT, *heard.tokens[:-1]], 3)
        assert bench.ended(again).cached_tokens > 30  # its session is still there
        assert bench.loads == ["one"]
    finally:
        bench.scheduler.stop()


def test_a_model_is_free_when_its_requests_have_ended():
    bench = Bench(models=1)
    try:
        _, heard = bench.submit(PROMPT, 3)
        bench.ended(heard)  # no lease was released here
        assert bench.scheduler.lease(ENTRIES["two"]).granted.result(30).entry.name == "two"
    finally:
        bench.scheduler.stop()


@pytest.mark.parametrize("place", ["Session.close", "Transaction.abort"])
def test_a_failed_clean_up_fails_its_request_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch, place: str):
    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    kind = {"Session.close": Session, "Transaction.abort": Transaction}[place]
    name = place.partition(".")[2]
    job, heard = bench.submit(PROMPT, 900)
    wait(lambda: heard.tokens)
    with monkeypatch.context() as patched:
        patched.setattr(kind, name, broken)
        if place == "Transaction.abort":
            job.cancelled.set()
        else:
            patched.setattr(Session, "forward", broken)
        wait(lambda: bench.scheduler.stats.active == 0)
        wait(lambda: heard.over() or place == "Transaction.abort")
    assert bench.scheduler.healthy
    _, other = bench.submit(PROMPT, 3)
    bench.ended(other)


def test_abandoned_requests_get_an_error(bench: Bench):
    _, active = bench.submit(PROMPT, 900)
    wait(lambda: active.tokens)
    bench.scheduler.abandon()
    wait(active.over)
    assert isinstance(active.last.error, ShuttingDownError)
    wait(lambda: bench.scheduler.stats.active == 0)
    _, other = bench.submit(PROMPT, 3)
    bench.ended(other)


def test_sessions_are_separate_for_each_api_key(bench: Bench):
    prompt = [299, *PROMPT]
    for owner, cached in (("anna", 0), ("bert", 0), ("anna", 40)):
        _, heard = bench.submit(prompt, 3, owner=owner)
        assert (bench.ended(heard).cached_tokens > 0) == (cached > 0)


def test_requests_at_once_compute_what_they_share_once_and_only_with_one_key():
    """The second begins where the first has come to: also where layers cannot go back, and both go on."""
    shared = [5 + 7 * at % 300 for at in range(150)]
    prompts = [[*shared, *tail] for tail in (range(300, 330), range(340, 440), range(340, 440))]
    bench = Bench(parallel=4, chunk=16)
    try:
        alone = []
        for prompt in prompts:
            _, heard = bench.submit(prompt, 12, owner=f"alone{len(alone)}")
            assert bench.ended(heard).cached_tokens == 0
            alone.append(heard.tokens)
        heards = [bench.submit(prompt, 12, owner="anna")[1] for prompt in prompts]
        _, apart = bench.submit(prompts[0], 12, owner="bert")
        ends = [bench.ended(heard) for heard in heards]
        assert [heard.tokens for heard in heards] == alone
        assert (bench.ended(apart).cached_tokens, apart.tokens) == (0, alone[0])
        assert [end.cached_tokens for end in ends] == [0, 150, 249]
        assert [end.cached_from for end in ends] == [None, "memory", "memory"]
    finally:
        bench.scheduler.stop()


def test_a_request_waits_for_no_prefill_that_was_cancelled():
    shared = [5 + 7 * at % 300 for at in range(200)]
    bench = Bench(parallel=4, chunk=8)
    try:
        job, first = bench.submit([*shared, 7], 900)
        _, second = bench.submit([*shared, 8, 9], 9)
        wait(lambda: first.events)
        job.cancelled.set()
        assert len(second.tokens) == 9 or bench.ended(second)
        assert len(second.tokens) == 9
    finally:
        bench.scheduler.stop()
