"""Hours are in the machine's local time, and nights end on the next day."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bridge.errors import PolicyError
from bridge.runner import policy
from bridge.runner.policy import DAYS, check_span, is_within, next_opening

MONDAY = datetime(2026, 3, 2)  # local time, without a zone


def at(text: str) -> datetime:
    """``fri 22:00`` of that week."""
    day, _, hour = text.partition(" ")
    hours, _, minutes = hour.partition(":")
    return MONDAY + timedelta(days=DAYS.index(day), hours=int(hours), minutes=int(minutes))


@pytest.mark.parametrize(
    ("span", "inside", "outside"),
    [
        (
            "mon-fri 22:00-06:00",
            ["mon 22:00", "tue 05:59", "sat 05:59"],
            ["mon 21:59", "sat 06:00", "mon 05:00"],
        ),
        ("sat,sun", ["sat 00:00", "sun 23:59"], ["fri 23:59", "mon 00:00"]),
        ("08:00-12:30", ["mon 08:00", "sun 12:29"], ["mon 07:59", "sun 12:30"]),
        ("fri-mon", ["fri 00:00", "sat 12:00", "mon 23:59"], ["tue 00:00", "thu 23:59"]),
        ("sun 20:00-04:00", ["sun 20:00", "mon 03:59"], ["sun 03:00", "mon 04:00"]),
        ("wed 10:00-24:00", ["wed 23:59"], ["thu 00:00", "wed 09:59"]),
        ("wed 00:00-24:00", ["wed 00:00", "wed 23:59"], ["thu 00:00"]),
        ("mon", ["mon 12:00"], ["tue 12:00"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_span_holds_its_hours_and_no_others(span: str, inside: list[str], outside: list[str]) -> None:
    assert [text for text in inside if not is_within([span], at(text))] == []
    assert [text for text in outside if is_within([span], at(text))] == []


@pytest.mark.parametrize(
    "text",
    ["", " ", "monday", "mon-", "-fri", "mon,,tue", "Mon", "mon 22:00", "22:00-", "8:00-9:00", "10:00-10:00",
     "24:00-06:00", "10:00-24:01", "10:60-11:00", "99:00-99:30",
     "mon  10:00-11:00", "mon 10:00-11:00\n", "mon 10:00-11:00 "],
    ids=repr,
)  # fmt: skip
def test_what_says_no_hours_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        check_span(text)


def test_any_of_several_spans_will_do_and_none_is_never() -> None:
    spans = ["mon-fri 22:00-06:00", "sat,sun"]
    assert is_within(spans, at("sat 12:00"))
    assert not is_within(spans, at("fri 12:00"))
    assert not is_within([], at("fri 12:00"))


@pytest.mark.parametrize(
    ("spans", "now", "opens"),
    [
        (["mon-fri 22:00-06:00"], "mon 12:00", "mon 22:00"),
        (["mon-fri 22:00-06:00"], "sat 06:00", "mon 22:00"),
        (["mon-fri 22:00-06:00", "sat 12:00-13:00"], "sat 06:00", "sat 12:00"),
        (["mon"], "tue 00:00", "mon 00:00"),
        (["08:00-12:30"], "mon 12:30", "tue 08:00"),
        ([], "mon 12:30", None),
    ],
)
def test_the_next_opening_is_the_first_begin_of_a_span(spans: list[str], now: str, opens: str | None) -> None:
    found, moment = next_opening(spans, at(now)), None if opens is None else at(opens)
    assert found == (moment if moment is None or moment > at(now) else moment + timedelta(days=7))


def test_the_machines_own_zone_counts_also_when_its_clocks_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Berlin: at 01:00 UTC of 29 March 2026 its clocks go from 02:00 to 03:00."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    try:
        loaded = policy.parse(Path("policy.toml"), b'hours = ["03:00-04:00"]\noutside_hours = "refuse"')
        begins = datetime(2026, 3, 29, 1, 0, tzinfo=UTC)
        assert not loaded.is_open(begins - timedelta(minutes=1))
        assert loaded.is_open(begins)
        assert loaded.is_open(datetime(2026, 3, 28, 2, 0, tzinfo=UTC))
        loaded.check_hours(begins)
        said = r"only within 03:00-04:00 of its local time; next at Sun 2026-03-29 03:00 \+0200"
        with pytest.raises(PolicyError, match=said):
            loaded.check_hours(begins - timedelta(minutes=1))
    finally:
        monkeypatch.undo()
        time.tzset()
