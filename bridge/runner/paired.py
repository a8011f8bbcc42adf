"""A paired run: the two sides of a request take turns until their difference is known well enough."""

from __future__ import annotations

import time
from collections.abc import Callable

from bridge.evidence.paired import BLOCK, FEWEST_BLOCKS, MOST_BLOCKS, PRECISE, summarise
from bridge.protocol.result import Reason, Verdict
from evidence_format.paired import PairedRun, PairedSummary, SideName

# Runs the command of a side: whether that is a warm-up, and within how many seconds.
RunSide = Callable[[SideName, bool, float], PairedRun]


class RunFailed(Exception):
    """A run did not end as a job that passes does; `verdict` None: the runner was told to stop."""

    def __init__(self, verdict: Verdict | None) -> None:
        super().__init__()
        self.verdict = verdict


def run_blocks(
    run: RunSide, *, limit_s: float, seed: str, on_progress: Callable[[str], None]
) -> list[PairedRun]:
    """Run both sides block by block within a limit; the warm-ups and all whole blocks.

    It ends when the smallest effect that the runs could show is small enough, never because of the ratio
    itself, which would favour a difference. `RunFailed` comes from `run`; where that only ran out of time,
    the blocks before it count.
    """
    deadline = time.monotonic() + limit_s

    def take(sides: tuple[SideName, ...], *, warm_up: bool) -> list[PairedRun]:
        return [run(side, warm_up, max(1.0, deadline - time.monotonic())) for side in sides]

    on_progress(f"progress 0/{MOST_BLOCKS} warming up")
    runs = take(("workload", "against"), warm_up=True)
    slowest, said = 0.0, f"measuring, {FEWEST_BLOCKS} at least"
    for number in range(MOST_BLOCKS):
        began = time.monotonic()
        if number and began + slowest > deadline:
            break
        on_progress(f"progress {number}/{MOST_BLOCKS} {said}")
        try:
            runs += take(BLOCK, warm_up=False)
        except RunFailed as failure:
            verdict = failure.verdict
            if number and verdict is not None and verdict.reason is Reason.TIMEOUT:
                break
            raise
        slowest = max(slowest, time.monotonic() - began)
        found = summarise(runs, seed)
        said = _so_far(found)
        if found.smallest_effect is not None and found.smallest_effect <= PRECISE:
            break
    return runs


def _so_far(found: PairedSummary) -> str:
    if found.ratio is None or found.smallest_effect is None:
        return f"measuring, {FEWEST_BLOCKS} at least"
    return f"time ratio {found.ratio:.3f}, smallest effect {found.smallest_effect:.1%}"
