"""Tokens to text as they come. Incomplete characters wait for their last byte; stop tokens give no text.

Text that may turn out to be the beginning of a stop string waits too; the stop string itself is cut off with
everything behind it.
"""

from collections.abc import Sequence
from typing import Any

from engine.stops import Stops


class TextStream:
    """One text growing token by token, by mlx-lm's streaming detokenizer."""

    def __init__(self, tokenizer: Any, stops: Stops) -> None:
        self._detokenizer = tokenizer.detokenizer
        self._stops = stops
        self._held = ""  # readable, but perhaps part of a stop string
        self.ended = False  # by a stop string
        self.given = 0  # characters that became certain

    def add(self, tokens: Sequence[int]) -> str:
        """Text that became certain with these tokens, possibly none."""
        for token in tokens:
            if token not in self._stops.tokens:
                self._detokenizer.add_token(token)
        return self._certain(str(self._detokenizer.last_segment), final=False)

    def finish(self) -> str:
        """What was still held back."""
        self._detokenizer.finalize()
        return self._certain(str(self._detokenizer.last_segment), final=True)

    def _certain(self, segment: str, *, final: bool) -> str:
        if self.ended:
            return ""
        text = self._held + segment
        ends = [index for stop in self._stops.texts if (index := text.find(stop)) >= 0]
        if ends:
            self.ended, self._held = True, ""
            self.given += min(ends)
            return text[: min(ends)]
        hold = 0 if final else max((_overlap(text, stop) for stop in self._stops.texts), default=0)
        self._held = text[len(text) - hold :]
        self.given += len(text) - hold
        return text[: len(text) - hold]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def text_of(tokenizer: Any, tokens: Sequence[int], stops: Stops) -> str:
    """The whole text of a finished sequence."""
    stream = TextStream(tokenizer, stops)
    return stream.add(tokens) + stream.finish()
