"""A workflow's log: lines that nobody else's text can turn into orders.

GitHub's runner obeys lines of a job's log that begin with ``::`` and, an older form, ``##[`` anywhere in one.
What a job prints and what came over the bus is shown with a mark before it and with neither form in it; while
a job runs GitHub's runner is told, with a random word, to obey nothing.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator

from bridge.protocol.sanitize import one_line

# A log is read by people; the whole of it is in the result.
MOST_CHARACTERS = 1 << 20
_MARK = "| "


class Log:
    """Where a job's lines go.

    Args:
        echo: Takes one line for standard output.
        is_actions: Whether GitHub's runner reads it.
    """

    def __init__(self, echo: Callable[[str], None], *, is_actions: bool) -> None:
        self._echo = echo
        self._is_actions = is_actions
        self._left = MOST_CHARACTERS

    def say(self, line: str) -> None:
        """One line of ours, in which text of others may stand."""
        self._echo(harmless(line))

    def show(self, line: str) -> None:
        """One line of the job's."""
        if self._left <= 0:
            return
        text = harmless(line)
        self._left -= len(text)
        self._echo(f"{_MARK}{text}")
        if self._left <= 0:
            self._echo("(more was printed: it is in the result's log.txt)")

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Have GitHub's runner obey no line of the log as long as the block runs."""
        if not self._is_actions:
            yield
            return
        word = f"kakeya{secrets.token_hex(16)}"
        self._echo(f"::stop-commands::{word}")
        try:
            yield
        finally:
            self._echo(f"::{word}::")

    def announce(self, level: str, title: str, message: str) -> None:
        """A line that the run's page shows, too.

        Args:
            level: ``notice``, ``warning`` or ``error``.
            title: Ours.
            message: May hold text of others.
        """
        text = harmless(message)
        if self._is_actions:
            self._echo(f"::{level} title={_property(title)}::{_data(text)}")
        else:
            self._echo(f"{title}: {text}")


def harmless(text: str) -> str:
    """A text on one line that no runner obeys."""
    text = one_line(text).replace("##[", "## [")
    bare = text.lstrip()  # a runner looks behind blanks, too
    return text if not bare.startswith("::") else f"{text[: len(text) - len(bare)]}: :{bare[2:]}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
