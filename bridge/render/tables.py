"""Tables that stay readable at 80 columns, and the console they are drawn on.

Cells come from the bus as often as not: `plain` makes them text that neither a terminal nor rich obeys.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from enum import Enum, auto
from typing import TYPE_CHECKING

from bridge.protocol.sanitize import clean_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Characters to a line where no terminal says how many it has.
WIDE = 140
# Names are cut beyond so many characters: where lines have fewer than 100, and elsewhere.
_LONGEST_NAMES = (11, 20)
_INDENT = 13  # of what goes on from the line before


class Column(Enum):
    """How a column gives way where the terminal is narrow."""

    SHORT = auto()  # never: what one copies, or what is short anyway
    NAME = auto()  # ends in an ellipsis
    TEXT = auto()  # goes on in the next line, between words


def table(width: int, **columns: Column) -> Table:
    """An empty table with a heading for each column, as named, for lines of so many characters."""
    shown = bare_table()
    longest = _LONGEST_NAMES[width >= 100]
    for heading, column in columns.items():
        if column is Column.SHORT:
            shown.add_column(heading, no_wrap=True)
        elif column is Column.NAME:
            shown.add_column(heading, no_wrap=True, overflow="ellipsis", max_width=longest)
        else:
            shown.add_column(heading, overflow="fold")
    return shown


def bare_table() -> Table:
    """A table without columns: a line under the headings, two spaces between columns, nothing around."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def plain(*cells: str) -> list[str]:
    """Cells without terminal escapes, and with rich's markup taken literally."""
    from rich.markup import escape

    return [escape(clean_line(cell)) for cell in cells]


def console() -> Console:
    """Standard output: as wide as its terminal, and wide where it is a file or a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDE)


def wrapped(line: str) -> str:
    """A line of a list, on a terminal broken between words and indented; else as it is."""
    if not sys.stdout.isatty():
        return line
    return textwrap.fill(
        line,
        shutil.get_terminal_size().columns,
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
