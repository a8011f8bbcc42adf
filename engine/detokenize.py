"""Tokens to text as they come. Incomplete characters wait for their last byte; stop tokens give no text."""

from collections.abc import Collection, Sequence
from typing import Any


class TextStream:
    """One text growing token by token, by mlx-lm's streaming detokenizer."""

    def __init__(self, tokenizer: Any, stops: Collection[int]) -> None:
        self._detokenizer = tokenizer.detokenizer
        self._stops = frozenset(stops)

    def add(self, tokens: Sequence[int]) -> str:
        """Text that became readable with these tokens, possibly none."""
        for token in tokens:
            if token not in self._stops:
                self._detokenizer.add_token(token)
        return str(self._detokenizer.last_segment)

    def finish(self) -> str:
        """What was still held back."""
        self._detokenizer.finalize()
        return str(self._detokenizer.last_segment)


def text_of(tokenizer: Any, tokens: Sequence[int], stops: Collection[int]) -> str:
    """The whole text of a finished sequence."""
    stream = TextStream(tokenizer, stops)
    return stream.add(tokens) + stream.finish()
