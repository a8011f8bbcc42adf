"""Only a busy machine is asked again: whatever else is rejected stays rejected."""

from __future__ import annotations

import pytest

from tests.e2e.busy import TRIES, was_busy, when_quiet
from tests.fixtures.repo import Done

BUSY = (
    "report.json: REJECTED (throughput)\n  claim speedup: 3.6\n  SPEEDUP_DECODE_SPREAD: arm 'plain': took\n"
)


@pytest.mark.parametrize(
    ("code", "out", "busy"),
    [
        (3, BUSY, True),
        (3, BUSY + "  SUMMARY_MISMATCH: arm 'plain'\n", False),
        (3, "report.json: REJECTED (throughput)\n", False),
        (0, BUSY, False),
    ],
)
def test_it_was_busy_only_if_the_gate_says_that_and_no_more(code: int, out: str, busy: bool):
    assert was_busy(Done(code, out, "")) is busy


def test_a_machine_that_stays_busy_is_a_failure():
    asked: list[Done] = []

    def measure() -> Done:
        asked.append(Done(3, BUSY, ""))
        return asked[-1]

    with pytest.warns(UserWarning, match="measured again"):
        assert when_quiet(measure).code == 3
    assert len(asked) == TRIES
