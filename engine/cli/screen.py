"""What a conversation shows: answers on standard output, everything else on stderr.

On a terminal reasoning is dimmed; elsewhere it is left out, and so is it never mistaken for the answer. What
models and files say is shown without the control characters a terminal would obey.
"""

import json
import os
import re
import sys
from typing import Any

import click

from engine.chat.turn import Turn
from engine.server.parsing import ParsedText
from engine.server.sequence import PrefillProgress

# Control characters but newline and tab, those that change the direction of text, halves of characters.
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
ERASE = "\r\x1b[K"
MANY = 512  # prompt tokens that take long enough to say how far they are


def harmless(text: str) -> str:
    r"""A text as a terminal may be given it: an escape character is shown as ``\x1b``, and so on."""
    return OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


class Screen:
    """Both streams of one conversation."""

    def __init__(self, *, as_json: bool, stats: bool) -> None:
        """Look at what the streams are.

        Args:
            as_json: each turn is one JSON line, and nothing else is on standard output.
            stats: each turn is followed by its figures.
        """
        self._as_json, self._stats = as_json, stats
        self._plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        self._reasoning = sys.stdout.isatty()
        self._lively = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._shown = ""  # the part of the answer that was shown last
        self._line_open = False  # standard output is in the midst of a line
        self._passing = False  # a line that will be erased stands on stderr

    def say(self, text: str) -> None:
        """Tell something that is not the answer."""
        self._settle()
        click.echo(harmless(text), err=True)

    def note(self, text: str) -> None:
        """The same, dimmed."""
        self._settle()
        click.echo(self._dimmed(harmless(text)), err=True)

    def passing(self, text: str) -> None:
        """Tell how far something is, on a terminal, until there is something else to show."""
        if self._lively:
            self._settle()
            click.echo(self._dimmed(harmless(text)), nl=False, err=True)
            self._passing = True

    def refuse(self, message: str) -> None:
        """Tell why there was no answer."""
        self.say(message)
        if self._as_json:
            click.echo(json.dumps({"error": message}))

    def begin(self) -> None:
        """An answer is coming."""
        self._shown = ""

    def progress(self, progress: PrefillProgress) -> None:
        """Tell how far a long prompt is read."""
        if progress.total - progress.done > MANY:
            self.passing(f"reading {progress.done:,} of {progress.total:,} tokens …")

    def piece(self, said: ParsedText) -> None:
        """Show a piece of the answer."""
        if self._as_json:
            return
        if said.reasoning and self._reasoning:
            self._show("reasoning", said.reasoning)
        if said.content:
            self._show("content", said.content)

    def turn(self, turn: Turn) -> None:
        """Show that an answer has ended, and its figures."""
        self._settle()
        if self._as_json:
            click.echo(json.dumps(_document(turn)))
        if self._stats:
            self.note(figures(turn))

    def _show(self, part: str, text: str) -> None:
        if self._shown == "reasoning" and part == "content":
            text = text.lstrip("\n")
            if not text:
                return
            self._settle()
            click.echo()
        elif self._passing:
            self._settle()
        self._shown = part
        shown = harmless(text)
        click.echo(self._dimmed(shown) if part == "reasoning" else shown, nl=False)
        self._line_open = not text.endswith("\n")

    def _settle(self) -> None:
        """End or erase the line that is open."""
        if self._passing:
            click.echo(ERASE, nl=False, err=True)
        if self._line_open:
            click.echo()
        self._passing = self._line_open = False

    def _dimmed(self, text: str) -> str:
        return text if self._plain else click.style(text, dim=True)


def figures(turn: Turn) -> str:
    """One line about an answer."""
    usage = turn.usage
    parts = [f"{usage.completion_tokens} tokens ({turn.finish})"]
    if turn.tokens_per_s is not None:
        parts.append(f"{turn.tokens_per_s:.1f} tok/s")
    if turn.acceptance_length is not None:
        parts.append(f"{turn.acceptance_length:.2f} tokens emitted per verify")
    parts.append(f"{turn.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
    return ", ".join(parts)


def _document(turn: Turn) -> dict[str, Any]:
    return {
        "content": turn.content,
        "reasoning": turn.reasoning or None,
        "finish_reason": turn.finish,
        "usage": turn.usage.model_dump(),
        "x_kakeya": turn.provenance.model_dump() if turn.provenance else None,
    }
