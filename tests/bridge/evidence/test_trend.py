"""What is a regression and what is a change, by rules that noise alone does not meet."""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from math import log
from statistics import median

import pytest

from bridge.evidence import trend
from bridge.evidence.trend import FEWEST, change_points, changes, compare_newest

STEADY = [100.0, 101.0, 99.0, 100.5, 99.5, 100.0]


@pytest.mark.parametrize(
    ("newest", "higher", "regression"),
    [
        (94.0, True, True),
        (94.0, False, False),
        (106.0, False, True),
        (96.0, True, False),
        (200.0, True, False),
    ],
)
def test_a_regression_is_worse_than_the_median_by_more_than_the_margin(
    newest: float, higher: bool, regression: bool
):
    found = compare_newest([*STEADY, newest], 0.05, higher_is_better=higher)
    assert found is not None
    assert (found.is_regression, found.median) == (regression, 100.0)
    assert found.worse == pytest.approx((100 - newest) / 100 * (1 if higher else -1))


def test_what_noise_does_as_well_is_no_regression():
    noisy = [80.0, 120.0, 90.0, 110.0, 100.0, 95.0]
    found = compare_newest([*noisy, 90.0], 0.05, higher_is_better=True)
    assert found is not None
    assert found.worse is not None
    assert found.worse > 0.05
    assert not found.is_regression
    assert compare_newest(STEADY[:FEWEST], 0.05, higher_is_better=True) is None


def test_the_false_alarms_and_the_finds_that_the_page_states():
    draw = random.Random(28)  # noqa: S311 - noise
    runs = 400

    def series(count: int, drop: float = 0.0, sd: float = 2.0) -> list[float]:
        return [100 + draw.gauss(0, sd) for _ in range(count)] + [100 - drop + draw.gauss(0, sd)]

    def share(drop: float) -> float:
        found = [compare_newest(series(10, drop), 0.05, higher_is_better=True) for _ in range(runs)]
        return sum(each is not None and each.is_regression for each in found) / runs

    assert share(0.0) <= 0.02
    assert share(10.0) >= 0.85
    steady = [bool(change_points(series(29))) for _ in range(100)]
    assert sum(steady) <= 5
    stepped = [change_points(series(14) + [90 + draw.gauss(0, 2) for _ in range(15)]) for _ in range(50)]
    assert sum(any(abs(at - 15) <= 1 for at in found) for found in stepped) >= 48


def test_changes_are_steps_and_no_outliers():
    values = [10.0] * 8 + [12.0] * 8
    assert changes(values) == {8: pytest.approx(0.2)}
    values[3], values[12] = 30.0, 1.0
    assert list(changes(values)) == [8]
    assert changes([0.0] * 5 + [1.0] * 5) == {5: None}
    assert change_points([1.0, 2.0, 3.0, 4.0, 5.0]) == []


def test_the_segments_are_the_best_there_are():
    """Against a search of every way to cut, with the costs written out."""
    draw = random.Random(3)  # noqa: S311 - values
    for _ in range(20):
        values = [draw.choice([0.0, 1.0, 5.0, draw.gauss(0, 1)]) for _ in range(9)]
        assert change_points(values) == _best(values)


def _best(values: list[float]) -> list[int]:
    scale = max(trend._noise(values), trend._EXACT * median(map(abs, values))) or 1.0

    def cost(cuts: tuple[int, ...]) -> float:
        parts = [values[a:b] for a, b in pairwise((0, *cuts, len(values)))]
        spread = sum(abs(each - median(part)) for part in parts for each in part)
        return spread + len(cuts) * trend.PENALTY * log(len(values)) * scale

    ways = [
        cuts
        for many in range(3)
        for cuts in combinations(range(1, len(values)), many)
        if all(b - a >= trend.SEGMENT for a, b in pairwise((0, *cuts, len(values))))
    ]
    return list(min(ways, key=cost))
