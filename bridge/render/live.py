"""How a request that is followed is shown: a view that is drawn over, or one line for every change.

Everything goes to standard error. Texts of others pass `clean_line`, and no text is read as markup.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import click

from bridge.client.watch import Update
from bridge.protocol.manifest import parse_time
from bridge.protocol.result import Phase
from bridge.protocol.sanitize import clean_line
from bridge.render import terminal
from bridge.render.outcome import age_text, status_line, tokens_per_s

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.text import Text

_PROGRESS_LINE = re.compile(r"progress \d+/\d+( .*)?")


class LiveView:
    """Shows the updates of one request; with `log`, each line of its job that heartbeats tell."""

    def __init__(self, *, requested_at: str | None, log: bool = False) -> None:
        self._requested_at, self._log = requested_at, log
        self._update = Update(Phase.QUEUED)
        self._seen_at = time.monotonic()  # when that came
        self._said: str | None = None
        self._tail: Sequence[str] = ()
        self._live: Live | None = None

    def __enter__(self) -> LiveView:
        if terminal.is_interactive(sys.stderr):
            from rich.live import Live

            self._live = Live(
                get_renderable=self._render,
                console=terminal.console(stderr=True),
                transient=True,
                refresh_per_second=2,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, update: Update) -> None:
        """Show how the request is now."""
        if self._log and update.status is not None:
            for line in new_lines(self._tail, update.status.log_tail):
                click.echo(f"| {clean_line(line)}", err=True)
        self._tail = update.status.log_tail if update.status is not None else self._tail
        self._update, self._seen_at = update, time.monotonic()
        if self._live is not None:
            self._live.refresh()
            return
        said = status_line(update, elapsed=False)
        if said != self._said and update.phase is not Phase.DONE:
            click.echo(status_line(update), err=True)
            self._said = said

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        update, beat = self._update, self._update.status
        if beat is not None:
            elapsed_s = beat.elapsed_s + time.monotonic() - self._seen_at
        else:
            since = time.time() if self._requested_at is None else parse_time(self._requested_at).timestamp()
            elapsed_s = time.time() - since
        rows: list[RenderableType] = [_one_line(Text(status_line(update, elapsed=False), style="bold"))]
        facts = Table.grid(padding=(0, 2))
        cells: list[RenderableType] = [age_text(elapsed_s)]
        if beat is not None and beat.progress is not None and beat.progress.total:
            done, total = beat.progress.done, beat.progress.total
            cells += [ProgressBar(total=total, completed=done, width=20), f"{done}/{total}"]
            if (rate := tokens_per_s(beat.progress)) is not None:
                cells.append(f"{rate:.1f} tokens/s")
        facts.add_row(*cells)
        rows.append(facts)
        if line := next((each for each in reversed(self._tail) if not _PROGRESS_LINE.fullmatch(each)), None):
            rows.append(_one_line(Text(f"| {clean_line(line)}", style="dim")))
        return Group(*rows)


def new_lines(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """The lines of a log's tail that an earlier tail does not end in; lines of progress are left out."""
    old, new = ([line for line in tail if not _PROGRESS_LINE.fullmatch(line)] for tail in (before, after))
    for size in range(min(len(old), len(new)), 0, -1):
        if old[-size:] == new[:size]:
            return new[size:]
    return new


def _one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
