"""Each failure of one thing doubles its own pause, up to a minute, and nobody else's."""

from __future__ import annotations

from bridge.runner.later import FIRST_PAUSE_S, MAX_PAUSE_S, Later


class Clock:
    def __init__(self) -> None:
        self.seconds = 50.0

    def __call__(self) -> float:
        return self.seconds


def test_pauses_double_up_to_a_bound_and_are_kept() -> None:
    clock = Clock()
    later = Later(clock)
    assert later.is_due("a"), "what never failed waits for nothing"
    pauses = []
    for _ in range(9):
        pause = later.put_off("a")
        pauses.append(pause)
        assert not later.is_due("a")
        clock.seconds += pause - 0.01
        assert not later.is_due("a")
        clock.seconds += 0.01
        assert later.is_due("a")
    assert pauses == [FIRST_PAUSE_S, 2, 4, 8, 16, 32, MAX_PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S]


def test_what_fails_holds_up_itself_alone() -> None:
    later = Later(Clock())
    for _ in range(5):
        later.put_off("bad")
    assert later.is_due("good")
    assert later.put_off("good") == FIRST_PAUSE_S


def test_what_is_gone_is_forgotten_and_begins_anew() -> None:
    later = Later(Clock())
    for name in ("a", "b"):
        later.put_off(name)
        later.put_off(name)
    later.keep({"b", "never seen"})
    assert later.is_due("a")
    assert not later.is_due("b")
    assert (later.put_off("a"), later.put_off("b")) == (FIRST_PAUSE_S, 4 * FIRST_PAUSE_S)
