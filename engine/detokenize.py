"""Tokens to text as they come. Incomplete characters wait for their last byte; stop tokens give no text.

Text that may turn out to be the beginning of a stop string waits too; the stop string itself is cut off with
everything behind it.
"""

from collections.abc import Sequence
from typing import Any

from engine.incremental_decoder import UNREADABLE, IncrementalDecoder
from engine.stops import Stops


class TextStream:
    """One text growing token by token."""

    def __init__(self, tokenizer: Any, stops: Stops, prompt: Sequence[int] = ()) -> None:
        """Begin a text.

        Args:
            tokenizer: turns tokens to text.
            stops: what ends the text.
            prompt: token ids the text continues; a space between the two belongs to the text.
        """
        self._decoder = IncrementalDecoder(tokenizer, prompt)
        self._stops = stops
        self._held = ""  # final, but perhaps part of a stop string
        self.ended = False  # by a stop string
        self.given = 0  # characters that became certain
        self.begins: list[int] = []  # of every token, where its text begins

    def add(self, tokens: Sequence[int]) -> str:
        """Text that became certain with these tokens, possibly none."""
        return "".join([self._take(token) for token in tokens])

    def finish(self) -> str:
        """What was still held back."""
        return "" if self.ended else self._give(self._held + self._decoder.pending)

    def _take(self, token: int) -> str:
        before = self._held + self._decoder.pending
        stopped = self.ended or token in self._stops.tokens
        self._held += "" if stopped else self._decoder.add(token)
        text = self._held + self._decoder.pending
        begin = self.given + _beginning(before, text)
        self.begins.append(max([begin, *self.begins[-1:]]))
        if stopped:
            return ""
        if (end := self._stops.first_in(text)) is not None:
            self.ended = True
            return self._give(text[:end])
        certain = self._held[: len(self._held) - self._stops.begun_in(self._held)]
        self._held = self._held[len(certain) :]
        return self._give(certain)

    def _give(self, text: str) -> str:
        self.given += len(text)
        return text


def _beginning(before: str, text: str) -> int:
    """Where the text of a token begins; that of a part of a character begins where the character does."""
    if text.startswith(before) and not text.startswith(before + UNREADABLE) and text != before:
        return len(before)
    return len(before.rstrip(UNREADABLE))


def text_of(tokenizer: Any, tokens: Sequence[int], stops: Stops, prompt: Sequence[int] = ()) -> str:
    """The whole text of a finished sequence, which continues a prompt."""
    stream = TextStream(tokenizer, stops, prompt)
    return stream.add(tokens) + stream.finish()
