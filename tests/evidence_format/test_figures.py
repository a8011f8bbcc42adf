"""The interval of a mean is Student's."""

from __future__ import annotations

import pytest

from evidence_format.figures import mean_interval

STUDENT = {7: 2.3646243, 8: 2.3060041, 11: 2.2009852, 30: 2.0422725}  # two-sided 95 %, from a table


@pytest.mark.parametrize("degrees", STUDENT)
def test_interval_of_a_mean_has_the_width_of_the_table(degrees: int) -> None:
    values = [1.0, *[0.0] * degrees]
    count, middle = degrees + 1, 1 / (degrees + 1)
    deviation = (sum((value - middle) ** 2 for value in values) / degrees) ** 0.5
    low, high = mean_interval(values)
    assert low + high == pytest.approx(2 * middle)
    assert (high - low) / 2 == pytest.approx(STUDENT[degrees] * deviation / count**0.5, rel=1e-3)
