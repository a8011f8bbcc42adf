"""What counts as a runaway output."""

from __future__ import annotations

import pytest

from evidence_format.text import degeneration, loop_start
from tests.bridge.evidence.reports import filler


def templated_code(classes: int) -> list[int]:
    """Lines that repeat but for a name, as generated accessors do: 24 tokens with four of them new."""
    tokens: list[int] = []
    for i in range(classes):
        body = [11, 12, 1000 + i, 13, 14, 15, 16, 17, 18, 1000 + i, 19, 20]
        tokens += [*body, 21, 22, 500 + 3 * i, 23, 24, 25, 26, 27, 28, 29, 500 + 3 * i, 30]
    return tokens


@pytest.mark.parametrize(
    ("tokens", "degenerate"),
    [
        (filler(1, 200), False),
        (templated_code(12), False),
        ([7] * 40, False),  # too short to call
        ([1, 2, 3] * 15, False),
        (filler(1, 20) + [7] * 48, True),
        (filler(1, 20) + [1, 2, 3] * 16, True),
        (filler(1, 40) + list(range(16)) * 3, True),
        (filler(1, 40) + list(range(16)) * 3 + [99], False),  # it went on to say something else
        (filler(1, 10) + list(range(40)) * 4, True),
        (list(range(20)) * 5 + [99], True),  # most of it is a loop, though the end is not
        (filler(1, 100) + templated_code(5), False),
        ([], False),
    ],
)
def test_degeneration_is_told_from_templates(tokens: list[int], degenerate: bool) -> None:
    assert (degeneration(tuple(tokens)) is not None) == degenerate


@pytest.mark.parametrize(
    ("tokens", "start"),
    [
        (filler(1, 200), None),
        (filler(1, 20) + [7] * 48, 21),  # one of them is no repetition
        (filler(1, 20) + [1, 2, 3] * 16, 23),
        (list(range(20)) * 5 + [99], 20),
    ],
)
def test_a_loop_begins_where_nothing_new_is_said(tokens: list[int], start: int | None) -> None:
    assert loop_start(tuple(tokens)) == start
