"""Who can take a request: every reason why not, how long it may take, and what people are told."""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.bus.catalogue import Seen, publish_card
from bridge.bus.results import Standing
from bridge.client.availability import Outlook, signed_only, who_can
from bridge.client.lookout import Lookout, trusted_names
from bridge.errors import KeyListError
from bridge.protocol import refs
from bridge.protocol.manifest import ParamValue, format_time
from bridge.protocol.runner_info import Limits, Load, Property, RunnerCard, State, Work
from tests.bridge.cards import NOW, card, offer
from tests.houses import wait_for
from tests.worlds import World

NONCE = "20260301t120000z0123456789ab"


def seen(base: RunnerCard | None = None, *, trusted: bool = False, **changes: Any) -> Seen:
    one = base or card(**changes)
    standing = Standing.TRUSTED if trusted else Standing.UNSIGNED
    return Seen(
        one.name, f"refs/mac-bridge/runners/{one.name}", "0" * 40, one, standing, "x" if trusted else None
    )


def ask(
    *cards: Seen, preset: str = "probe", params: Mapping[str, ParamValue] | None = None, **changes: Any
) -> Outlook:
    fields: dict[str, Any] = {"params": params or {"limit": 4}, "now": NOW, "signed": False, **changes}
    return who_can(cards, preset=preset, **fields)


def why(one: Seen, **changes: Any) -> str:
    outlook = ask(one, **changes)
    assert outlook.able == ()
    return outlook.unable[one.name]


def test_a_live_runner_that_offers_it_can_take_it():
    outlook = ask(seen(), seen(name="other", id="f" * 16))
    assert (outlook.live, outlook.able, dict(outlook.unable)) == (2, ("mac", "other"), {})
    assert outlook.expected_s == 0.0
    assert outlook.sentences == ()


def test_an_alias_is_the_preset():
    assert ask(seen(presets=(offer("bench", aliases=("probe",)),))).able == ("mac",)


def test_every_obstacle_has_its_reason():
    gone = format_time(NOW - timedelta(seconds=3600))
    assert why(seen(age_s=3600)) == f"not seen since {gone}"
    assert why(seen(state=State.STOPPED)) == f"stopped at {format_time(NOW)}"
    assert why(seen(age_s=-100_000)).startswith("its card is from the future")
    assert why(seen(presets=())) == "it has no preset probe"
    refused = offer(available=False, why="its policy does not allow probe")
    assert why(seen(presets=(refused,))) == "its policy does not allow probe"
    assert why(seen(presets=(offer(available=False),))) == "it cannot run probe now"
    strict = Limits(max_timeout_s=60, require_signature=True)
    assert why(seen(limits=strict)) == "it takes only signed requests, and this one is unsigned"
    assert ask(seen(limits=strict), signed=True).able == ("mac",)
    other = why(seen(), audience="/another")
    assert other == "it serves /bus, and this request is meant for /another"
    assert ask(seen(), audience="/bus").able == ("mac",)


VALUES: tuple[tuple[dict[str, Any], ParamValue, str | None], ...] = (
    ({"type": "integer", "minimum": 1, "maximum": 9}, 9, None),
    ({"type": "integer", "minimum": 1, "maximum": 9}, 0, "the minimum is 1"),
    ({"type": "integer", "minimum": 1, "maximum": 9}, 10, "the maximum is 9"),
    ({"type": "integer"}, 1.5, "it must be of type integer"),
    ({"type": "integer"}, True, "it must be of type integer"),
    ({"type": "number"}, 2, None),
    ({"type": "boolean"}, True, None),
    ({"type": "boolean"}, 1, "it must be of type boolean"),
    ({"type": "string", "enum": ("a", "b")}, "b", None),
    ({"type": "string", "enum": ("a", "b")}, "c", "it must be one of a, b"),
    ({"type": "string", "prefix": "tests/"}, "tests/x", None),
    ({"type": "string", "prefix": "tests/"}, "../x", "it must begin with tests/"),
    ({"type": "string", "suffix": ".py"}, "x.sh", "it must end in .py"),
    ({"type": "string", "maxLength": 3}, "abc", None),
    ({"type": "string", "maxLength": 3}, "abcd", "it may have 3 characters"),
    ({"type": "string", "pattern": "(a+)+$"}, "a" * 40 + "!", None),  # a stranger's pattern is not tried
)


@pytest.mark.parametrize(("known", "value", "reason"), VALUES)
def test_a_value_is_held_against_that_runners_version(
    known: dict[str, Any], value: ParamValue, reason: str | None
):
    one = seen(presets=(offer(parameters={"p": Property(default="", **known)}),))
    outlook = ask(one, params={"p": value})
    if reason is None:
        assert outlook.able == ("mac",)
    else:
        assert outlook.unable["mac"].endswith(reason)
        assert outlook.unable["mac"].startswith("its probe does not take p = ")


def test_a_parameter_that_runner_lacks_or_needs_is_named():
    assert why(seen(), params={"limit": 4, "fresh": 1}) == "its probe has no parameter fresh"
    needy = seen(presets=(offer(parameters={"must": Property(type="string")}),))
    outlook = who_can([needy], preset="probe", params={}, now=NOW, signed=False)
    assert outlook.unable["mac"] == "its probe needs the parameter must"


def test_people_are_told_who_cannot_and_why_those_who_are_there_first():
    away = seen(name="away", age_s=3600, id="a" * 16)
    here = seen(name="here", presets=(offer(available=False, why="its policy does not allow probe"),))
    outlook = ask(away, here)
    assert outlook.live == 1
    gone = format_time(NOW - timedelta(seconds=3600))
    assert outlook.sentences == (
        "no live runner can take this request now: here: its policy does not allow probe;"
        f" away: not seen since {gone}",
    )
    assert ask().sentences == ("no runner has been seen on this remote: probe waits until one comes",)
    crowd = [seen(name=f"m{n}", id=f"{n:016x}", age_s=3600) for n in range(30)]
    assert ask(*crowd).sentences[0].endswith("; and 25 more")
    assert len(ask(*crowd).unable) == 30
    assert ask(*crowd).as_json()["able"] == []


def test_a_hostile_reason_is_shortened():
    long = seen(presets=(offer(available=False, why="x" * 1000),))
    assert len(why(long)) == 300


def test_a_client_that_trusts_keys_is_told_when_only_others_can_take_it():
    outlook = ask(seen(), pinned=True)
    assert outlook.able == ("mac",)
    assert "not trusted here" in outlook.sentences[0]
    assert ask(seen(), seen(name="b", id="b" * 16), pinned=False).sentences == ()
    assert ask(seen(trusted=True), seen(name="b", id="b" * 16), pinned=True).sentences == ()


def test_a_time_limit_that_is_cut_is_said():
    short = seen(limits=Limits(max_timeout_s=60, require_signature=False))
    [note] = ask(short, timeout_s=300).sentences
    assert note == "the live runners allow it at most 60 s; 300 s were asked for"
    assert ask(short, seen(name="b", id="b" * 16), timeout_s=300).sentences == ()


def busy(
    name: str, elapsed_s: float, *, typical_s: float | None = 100.0, pending: int = 0, age_s: float = 0
) -> Seen:
    work = Work(nonce=NONCE, preset="probe", elapsed_s=elapsed_s)
    one = card(name, state=State.BUSY, job=work, load=Load(pending=pending), age_s=age_s)
    return seen(one.model_copy(update={"presets": (offer(typical_s=typical_s),), "id": name[0] * 16}))


def test_the_expected_wait_is_the_rest_of_a_job_and_a_share_of_the_queue():
    assert ask(busy("a", 40)).expected_s == 60.0
    assert ask(busy("a", 40), busy("b", 90)).expected_s == 10.0
    assert ask(busy("a", 40), ahead=3).expected_s == 360.0
    assert ask(busy("a", 40), busy("b", 90), ahead=3).expected_s == 160.0
    assert ask(busy("a", 40, age_s=25)).expected_s == 35.0


def test_a_runner_with_a_job_is_never_free():
    assert ask(busy("a", 100)).expected_s == 50.0
    assert ask(busy("a", 400)).expected_s == 200.0
    assert ask(busy("a", 400, age_s=20)).expected_s == 210.0
    assert ask(busy("a", 99.99)).expected_s == 1.0
    assert ask(busy("a", 0, typical_s=0.2)).expected_s == 1.0
    assert ask(seen(state=State.BUSY)).expected_s is None


def test_a_claim_that_no_card_shows_yet_takes_a_runner_that_looks_idle():
    idle = [seen(name=name, id=name * 16) for name in ("a", "b")]
    assert ask(*idle, ahead=0, running=1).expected_s == 0.0
    assert ask(*idle, ahead=0, running=2).expected_s is None
    assert ask(*idle, ahead=0, running=9).expected_s is None
    assert ask(idle[0], busy("b", 40), ahead=0, running=1).expected_s == 0.0
    assert ask(idle[0], busy("b", 40), ahead=0, running=2).expected_s == 60.0
    gone = busy("b", 40, age_s=3600)
    assert ask(idle[0], gone, ahead=0, running=1).expected_s is None


def test_who_is_free_takes_the_oldest():
    idle = [seen(name=name, id=name * 16) for name in ("a", "b")]
    assert ask(*idle, ahead=1).expected_s == 0.0
    assert ask(*idle, ahead=2).expected_s is None
    assert ask(busy("a", 90), busy("b", 40), ahead=1).expected_s == 60.0


@given(
    free=st.lists(st.integers(1, 200), min_size=1, max_size=6),
    each=st.integers(0, 60),
    ahead=st.integers(0, 40),
)
def test_the_expected_start_is_that_of_a_queue_gone_through(free: list[int], each: int, ahead: int):
    def runner(number: int, left: int) -> Seen:
        work = Work(nonce=NONCE, preset="other", elapsed_s=200.0 - left)
        offers = (offer(typical_s=float(each)), offer("other", typical_s=200.0))
        return seen(name=f"m{number}", id=f"{number:016x}", state=State.BUSY, job=work, presets=offers)

    times = sorted(free)
    for _ in range(ahead):
        heapq.heapreplace(times, times[0] + each)
    found = ask(*(runner(number, left) for number, left in enumerate(free)), ahead=ahead)
    assert found.expected_s == pytest.approx(times[0], abs=0.06)


def test_a_queue_that_a_card_makes_up_costs_no_time():
    liar = busy("a", 0, typical_s=1e9, pending=10**9)
    began = time.perf_counter()
    assert (ask(liar).expected_s or 0.0) > 1e17
    assert time.perf_counter() - began < 1


def test_what_runs_is_not_counted_as_waiting():
    assert ask(busy("a", 40, pending=1)).expected_s == 60.0
    assert ask(busy("a", 40, pending=3)).expected_s == 260.0
    assert ask(busy("a", 40, pending=3), busy("b", 90, pending=2)).expected_s == 60.0
    gone = busy("b", 90, pending=2, age_s=3600)
    assert ask(busy("a", 40, pending=2), gone).expected_s == 160.0


def test_a_request_that_is_claimed_counts_as_pending_on_a_card(world: World):
    """`load.pending` is what the last look at the queue found, and a claim does not lower that."""
    world.submit()
    world.claim(*world.mirror.refresh())
    world.submit()
    assert len(world.mirror.refresh()) == 2


def test_a_live_runner_that_heeds_only_signatures_is_named():
    strict = Limits(max_timeout_s=60, require_signature=True)
    cards = [seen(), seen(name="strict", limits=strict), seen(name="gone", limits=strict, age_s=3600)]
    assert signed_only(cards, NOW) == ("strict",)


def test_an_unknown_wait_is_none():
    assert ask(busy("a", 40, typical_s=None)).expected_s is None
    assert ask(seen(), ahead=2).expected_s is None
    assert ask(seen(age_s=3600)).expected_s is None
    stranger = busy("a", 40)
    job = Work(nonce=NONCE, preset="other", elapsed_s=1.0)
    stranger = replace(stranger, card=stranger.card.model_copy(update={"job": job}))
    assert ask(stranger).expected_s is None


def test_a_look_beside_other_work_finds_who_is_there(world: World, tmp_path: Path):
    publish_card(world.git, world.remote, card(), None)
    found, failure = Lookout(world.git, world.remote, tmp_path / "trusted", limit_s=30).result()
    assert failure is None
    assert found is not None
    assert [entry.name for entry in found.seen] == ["mac"]


def test_a_look_that_fails_or_takes_too_long_is_a_sentence(world: World, tmp_path: Path):
    found, failure = Lookout(world.git, "/nothing.git", tmp_path / "trusted", limit_s=30).result()
    assert found is None
    assert "not known" in (failure or "")
    assert Lookout(world.git, world.remote, tmp_path / "trusted", limit_s=0.0).result() == (
        None,
        "which runners are there could not be read within 0 s",
    )


def test_a_damaged_line_among_the_trusted_keys_spoils_the_list(world: World, tmp_path: Path):
    path = tmp_path / "trusted"
    path.write_text('mac namespaces="kakeya-mac-result" ssh-ed25519 A*A\n')
    with pytest.raises(KeyListError, match=":1: 'ssh-ed25519 A"):
        trusted_names(path)
    found, failure = Lookout(world.git, world.remote, path, limit_s=30).result()
    assert found is None
    assert f"{path}:1" in (failure or "")


def test_a_look_counts_the_older_requests_that_wait(world: World, tmp_path: Path):
    running, waiting = world.submit(), world.submit()
    pending = next(one for one in world.mirror.refresh() if one.nonce == running.nonce)
    world.claim(pending)
    later = refs.new_nonce(datetime.now(UTC) + timedelta(seconds=60), b"abcdef")
    lookout = Lookout(world.git, world.remote, tmp_path / "trusted", count=True, limit_s=30)
    lookout.result()
    wait_for(lambda: lookout.ahead(later) == 1)
    assert lookout.ahead(waiting.nonce) == 0
    assert (lookout.running(), lookout.running(besides=running.nonce)) == (1, 0)
    without = Lookout(world.git, world.remote, tmp_path / "trusted", limit_s=30)
    without.result()
    assert (without.ahead(later), without.running()) == (None, None)


def test_a_claim_counts_before_its_runners_card_shows_it(world: World, tmp_path: Path):
    publish_card(world.git, world.remote, card(now=datetime.now(UTC)), None)

    def expected_s() -> float | None:
        lookout = Lookout(world.git, world.remote, tmp_path / "trusted", count=True, limit_s=30)
        lookout.result()
        wait_for(lambda: lookout.running() is not None)
        return lookout.expected_s("probe", 0)

    world.submit()
    assert expected_s() == 0.0
    world.claim(*world.mirror.refresh())
    assert expected_s() is None


def test_where_only_branches_are_taken_nobody_knows_what_is_ahead(world: World, tmp_path: Path):
    def ahead(nonce: str) -> int | None:
        lookout = Lookout(world.git, world.remote, tmp_path / "trusted", count=True, limit_s=30)
        lookout.result()
        wait_for(lambda: lookout.running() is not None)
        return lookout.ahead(nonce)

    later = refs.new_nonce(datetime.now(UTC) + timedelta(seconds=60), b"abcdef")
    assert ahead(later) == 0
    world.take_branches_only()
    waiting = world.submit()
    assert (ahead(waiting.nonce), ahead(later)) == (None, None)
    world.claim(*world.mirror.refresh())
    lookout = Lookout(world.git, world.remote, tmp_path / "trusted", count=True, limit_s=30)
    wait_for(lambda: lookout.running() == 1)
