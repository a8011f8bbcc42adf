"""How far a long command has come: a bar on a terminal, otherwise plain lines that a runner can follow.

The lines are ``progress DONE/TOTAL PHASE DETAIL`` on stderr, at most two a second, the last one always.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from engine.cli.terminal import console, is_interactive

Progress = Callable[[int, int, str, str], None]  # done, total, phase, detail
EVERY_S = 0.5
QUIET_S = 2.0  # until progress of what is mostly quick is worth a line


@contextmanager
def shown_progress(after: float = 0.0) -> Iterator[Progress]:
    """A function that shows progress while the block lasts; as lines from ``after`` seconds on."""
    if not is_interactive(sys.stderr):
        since, last = monotonic(), float("-inf")

        def line(done: int, total: int, phase: str, detail: str) -> None:
            nonlocal last
            now = monotonic()
            if now - since >= after and (done >= total or now - last >= EVERY_S):
                last = now
                print(f"progress {done}/{total} {phase} {detail}", file=sys.stderr, flush=True)

        yield line
        return

    from rich import progress as rich

    columns = ("{task.description}", rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn())
    with rich.Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, phase, detail: bar.update(
            task, completed=done, total=total, description=f"{phase} {detail}"
        )
