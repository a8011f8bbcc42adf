"""A busy machine's times say nothing of a speed: the gate rejects them, and the measurement is made again."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

from tests.fixtures.repo import Done

SPREADS = {"SPEEDUP_PREFILL_SPREAD", "SPEEDUP_DECODE_SPREAD"}
TRIES = 2


def was_busy(done: Done) -> bool:
    """Whether evidence was rejected for uneven times of identical work, and for nothing else."""
    codes = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b(?=:)", done.out))
    return done.code == 3 and bool(codes) and codes <= SPREADS


def when_quiet(measure: Callable[[], Done]) -> Done:
    """How a measurement ended; where the machine was busy it is made again, at most `TRIES` times in all."""
    for _ in range(TRIES - 1):
        if not was_busy(done := measure()):
            return done
        warnings.warn(f"measured again, for the machine was busy: {done.out}", stacklevel=2)
    return measure()
