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
    if sys.stderr.isatty():
        with _bar() as show:
            yield show
    else:
        yield _Lines()


class _Lines:
    def __init__(self) -> None:
        self._last = float("-inf")

    def __call__(self, done: int, total: int, phase: str, detail: str) -> None:
        now = monotonic()
        if now - self._last < EVERY_S and done < total:
            return
        self._last = now
        print(f"progress {done}/{total} {phase} {detail}", file=sys.stderr, flush=True)


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int, phase: str, detail: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{phase} {detail}")

        yield show
