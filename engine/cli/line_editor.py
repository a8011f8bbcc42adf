"""What is said on standard input, a turn at a time: by a person with editing and history, or by a script.

A line that ends in a backslash goes on in the next one. Several lines pasted at once are one turn. History is
of this process alone; nothing is written to disk.
"""

import select
import sys
from io import TextIOWrapper
from typing import Any

import click

from engine.errors import ConfigurationError, PromptError

PROMPT, MORE = "> ", ". "
PASTE_S = 0.02  # a pasted line is followed by the next one so soon; nobody types that fast


class Lines:
    """Standard input as turns."""

    def __init__(self, *, quiet: bool) -> None:
        """Look at what standard input is.

        Args:
            quiet: standard output is for other things: prompts go to stderr, and there is no editing.

        Raises:
            ConfigurationError: there is none.
        """
        stream: Any = sys.stdin
        if stream is None:
            raise ConfigurationError("standard input is closed; give a file or a pipe, or /dev/null")
        self.terminal = bool(stream.isatty())
        self._editing = self.terminal and not quiet and sys.stdout.isatty()
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="surrogateescape")  # `next` says which bytes are no text
        self._pastes_whole = _prepare_editor() if self._editing else False

    def next(self) -> str | None:
        """The next turn; None at the end.

        Raises:
            PromptError: it holds bytes that are no text.
            KeyboardInterrupt: Ctrl-C; what was typed of it is lost.
        """
        lines: list[str] = []
        while (line := self._line(MORE if lines else PROMPT)) is not None:
            goes_on = line.endswith("\\")
            lines.append(line[:-1] if goes_on else line)
            if not goes_on and not self._pasted():
                break
        return _checked("\n".join(lines)) if lines else None

    def _line(self, prompt: str) -> str | None:
        if self._editing:
            try:
                return input(prompt)
            except EOFError:
                return None
        if self.terminal:
            click.echo(prompt, nl=False, err=True)
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None

    def _pasted(self) -> bool:
        """Whether the next line is there already; editors that take pasted text as one need not be asked."""
        if not self.terminal or self._pastes_whole:
            return False
        ready, _, _ = select.select([sys.stdin], [], [], PASTE_S)
        return bool(ready)


def _prepare_editor() -> bool:
    """Have `input` edit lines where there is something to do that; whether it takes pasted lines as one."""
    try:
        import readline
    except ImportError:
        return False
    if "libedit" in (readline.__doc__ or ""):
        return False
    readline.parse_and_bind("set enable-bracketed-paste on")
    return True


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"character {error.start + 1} is no {sys.stdin.encoding} text; nothing was sent"
        ) from None
    return text
