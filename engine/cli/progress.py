"""How far a long command has come: a bar on a terminal, otherwise plain lines that a runner can follow.

The lines are ``progress DONE/TOTAL PHASE DETAIL`` on stderr, at most two a second, the last one always.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from engine.evaluation.measure import Progress

EVERY_S = 0.5


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """A function that shows progress, for as long as the block lasts."""
    if not sys.stderr.isatty():
        last = float("-inf")

        def line(done: int, total: int, phase: str, detail: str) -> None:
            nonlocal last
            if done >= total or monotonic() - last >= EVERY_S:
                last = monotonic()
                print(f"progress {done}/{total} {phase} {detail}", file=sys.stderr, flush=True)

        yield line
        return

    from rich import progress as rich
    from rich.console import Console

    columns = ("{task.description}", rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn())
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, phase, detail: bar.update(
            task, completed=done, total=total, description=f"{phase} {detail}"
        )
