"""The pace of looking: quick after activity, slow when idle, slower still where looking fails or costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.runner.polling import (
    FAST_S,
    FAST_WINDOW_S,
    FASTEST_S,
    FASTEST_WINDOW_S,
    IDLE_S,
    LONGEST_FASTEST_S,
    MAX_BACKOFF_S,
    Polling,
)

idles = st.floats(0.2, 120)
quiets = st.floats(0, 600)


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def polling(clock: Clock, *, idle_s: float = IDLE_S, local: bool = False) -> Polling:
    return Polling(idle_s=idle_s, local=local, clock=clock)


def after(quiet_s: float, *, idle_s: float = IDLE_S, local: bool = False, look_s: float = 0.0) -> float:
    """The pause so long after the last activity."""
    clock = Clock()
    pace = polling(clock, idle_s=idle_s, local=local)
    clock.seconds += 12345
    pace.active()
    pace.looked(look_s)
    clock.seconds += quiet_s
    return pace.pause()


@pytest.mark.parametrize("local", [True, False])
def test_the_pace_after_activity(local: bool) -> None:
    assert after(0, local=local) == (FASTEST_S if local else FAST_S)
    assert after(FASTEST_WINDOW_S, local=local) == FAST_S
    assert after(FAST_WINDOW_S - 0.01, local=local) == FAST_S
    assert after(FAST_WINDOW_S + 4, local=local) == 1.0
    assert after(FAST_WINDOW_S + 4 * IDLE_S, local=local) == IDLE_S
    assert after(1e6, local=local) == IDLE_S


@given(quiets, quiets, idles, st.booleans())
def test_the_longer_it_is_idle_the_longer_it_waits_and_never_beyond_the_owners_interval(
    one: float, other: float, idle_s: float, local: bool
) -> None:
    earlier, later = sorted((one, other))
    pauses = [after(quiet, idle_s=idle_s, local=local) for quiet in (earlier, later)]
    assert pauses == sorted(pauses)
    assert pauses[0] >= FASTEST_S
    assert pauses[1] <= max(idle_s, FAST_S)


@given(st.floats(FASTEST_WINDOW_S, 600), st.floats(0, 60), st.booleans())
def test_a_costly_look_is_followed_by_a_pause_as_long(quiet_s: float, look_s: float, local: bool) -> None:
    """At most half of the time is spent looking, whatever a look costs."""
    assert after(quiet_s, local=local, look_s=look_s) >= min(look_s, IDLE_S)


def test_in_the_first_moments_on_a_local_remote_a_costly_look_does_not_hold_up() -> None:
    assert after(0, local=True, look_s=0.02) == 0.02
    assert after(0, local=True, look_s=5.0) == LONGEST_FASTEST_S
    assert after(0, local=False, look_s=5.0) == 5.0


@given(st.integers(1, 10_000), idles)
def test_a_remote_that_fails_is_asked_ever_more_seldom_up_to_a_minute(failures: int, idle_s: float) -> None:
    pace = polling(Clock(), idle_s=idle_s)
    pauses = []
    for count in (failures, failures + 1):
        pace.failures = count
        pauses.append(pace.pause())
    assert pauses == sorted(pauses)
    assert pauses[1] <= MAX_BACKOFF_S
    pace.failures = 1
    assert pace.pause() == min(idle_s, MAX_BACKOFF_S)
    pace.failures = 100
    assert pace.pause() == pytest.approx(MAX_BACKOFF_S, rel=0.2) or idle_s < 1
    pace.failures = 0
    assert pace.pause() == FAST_S


def test_a_runner_is_fast_only_after_activity_and_while_nothing_fails() -> None:
    clock = Clock()
    pace = polling(clock)
    assert pace.is_fast, "somebody who starts a runner may have asked already"
    pace.failures = 1
    assert not pace.is_fast
    pace.failures = 0
    clock.seconds += FAST_WINDOW_S
    assert not pace.is_fast
    pace.active()
    assert pace.is_fast


@pytest.mark.parametrize("local", [True, False])
def test_what_cannot_be_done_for_now_is_not_looked_at_all_the_time(local: bool) -> None:
    """Another job holds this machine, for hours perhaps: each look that finds so costs a supervisor."""
    clock = Clock()
    pace = polling(clock, local=local)
    looks, until = 0, clock.seconds + 600
    while clock.seconds < until:
        pace.calm()
        assert not pace.is_fast
        clock.seconds += pace.pause()
        looks += 1
    assert looks <= 600 / IDLE_S + 1
