"""Is the newest value of a series a regression, and where did the series change? Pure; oldest value first.

The newest value is a regression when it is worse than the median of the values before it, at most `WINDOW`,
by more than the given share of that median, and by more than `NOISE_SIGMAS` standard deviations of the noise.
The one says what matters, the other what noise does as well. The noise is 1.0483 times the median absolute
difference of two successive values, which a step or an outlier among them does not move.

Change points are those of the piecewise constant series that fits best: optimal partitioning (B. Jackson et
al., An algorithm for optimal partitioning of data on an interval, 2005), where a segment costs the sum of its
absolute deviations from its median, so that a few outliers are no change, and each change a penalty.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

WINDOW, FEWEST = 10, 5  # earlier values that the newest is compared with: at most, at least
NOISE_SIGMAS = 3.0
SEGMENT = 3  # values between two changes, at least
PENALTY = 2.0  # of a change, times the log of the number of values, in standard deviations
_DIFFERENCE = 1.0483  # to a standard deviation, from the median absolute difference of two values
_EXACT = 0.001  # where most values are the same, a change is at least about this share of them


@dataclass(frozen=True)
class NewestValue:
    """The newest value and the values before it."""

    value: float
    median: float  # of the earlier values
    noise: float  # standard deviation of their noise
    earlier: int  # how many they are
    worse: float | None  # as a share of the median, negative where it is better; None: the median is 0
    is_regression: bool


def compare_newest(values: Sequence[float], margin: float, *, higher_is_better: bool) -> NewestValue | None:
    """Compare the newest value with those before it; None: they are fewer than `FEWEST`.

    `margin` is a share: 0.05 allows 5 %.
    """
    *earlier, value = values
    earlier = earlier[-WINDOW:]
    if len(earlier) < FEWEST:
        return None
    middle = median(earlier)
    noise = _noise(earlier)
    worse = middle - value if higher_is_better else value - middle
    return NewestValue(
        value=value,
        median=middle,
        noise=noise,
        earlier=len(earlier),
        worse=worse / abs(middle) if middle else None,
        is_regression=worse > margin * abs(middle) and worse > NOISE_SIGMAS * noise,
    )


def changes(values: Sequence[float]) -> dict[int, float | None]:
    """The relative change of the median at each change point, by its index; None: the median was 0."""
    starts = change_points(values)
    found = {}
    for before, start, end in zip([0, *starts], starts, [*starts[1:], len(values)], strict=False):
        old, new = median(values[before:start]), median(values[start:end])
        found[start] = (new - old) / abs(old) if old else None
    return found


def change_points(values: Sequence[float]) -> list[int]:
    """Indices of the first values after a change, in order. Quadratic: for some hundred values."""
    count = len(values)
    if count < 2 * SEGMENT:
        return []
    scale = max(_noise(values), _EXACT * median(map(abs, values))) or 1.0
    penalty = PENALTY * math.log(count) * scale
    # best[end]: the least cost of the first `end` values, and where their last segment begins
    best = [(0.0, 0)] + [(math.inf, 0)] * count
    for begin in range(count - SEGMENT + 1):
        before = best[begin][0] + (penalty if begin else 0.0)
        for end, cost in enumerate(_costs(values[begin:]), begin + 1):
            if end - begin >= SEGMENT and before + cost < best[end][0]:
                best[end] = (before + cost, begin)
    changes, end = [], count
    while (end := best[end][1]) > 0:
        changes.append(end)
    return changes[::-1]


def _noise(values: Sequence[float]) -> float:
    return _DIFFERENCE * median(abs(after - before) for before, after in pairwise(values))


def _costs(values: Sequence[float]) -> Iterator[float]:
    """The sum of absolute deviations from their median, of the first value, the first two, and so on."""
    low: list[float] = []  # the smaller half, negated, so that its largest value comes first
    high: list[float] = []
    total = 0.0  # of the larger half less the smaller
    for value in values:
        moved = -heapq.heappushpop(low, -value)
        heapq.heappush(high, moved)
        total += 2 * moved - value if moved != value else value
        if len(high) > len(low):
            moved = heapq.heappop(high)
            heapq.heappush(low, -moved)
            total -= 2 * moved
        # With an odd number the smaller half has the median as well.
        yield total - low[0] if len(low) > len(high) else total
