"""Where a text ends: stop tokens, which are emitted, and stop strings, found as the text grows."""

from collections.abc import Collection, Sequence
from copy import copy
from typing import Any

from engine.errors import ConfigurationError


class Stops:
    """Stop tokens and stop strings of one sequence at a time."""

    def __init__(
        self, tokens: Collection[int] = (), texts: Sequence[str] = (), tokenizer: Any | None = None
    ) -> None:
        """End at any of ``tokens``, or where one of ``texts`` stands complete in the generated text.

        Args:
            tokens: ids that end a text.
            texts: strings that end a text.
            tokenizer: mlx-lm's wrapper, which turns tokens to text; needed for ``texts`` alone.

        Raises:
            ConfigurationError: a stop string is empty, or there is no tokenizer to find it with.
        """
        if not all(texts):
            raise ConfigurationError("a stop string must not be empty")
        if texts and tokenizer is None:
            raise ConfigurationError("stop strings need a tokenizer")
        self.tokens = frozenset(tokens)
        self.texts = tuple(texts)
        self._tokenizer = tokenizer
        self.start()

    def start(self) -> None:
        """Begin a new text."""
        self._detokenizer = self._tokenizer.detokenizer if self.texts and self._tokenizer else None
        self._tail = ""

    def find(self, tokens: Sequence[int]) -> int | None:
        """Take note of emitted tokens.

        Returns:
            How many of them there are up to and including the one that ends the text; None if it goes on.
        """
        for position, token in enumerate(tokens):
            if token in self.tokens or self._completes(token):
                return position + 1
        return None

    def _completes(self, token: int) -> bool:
        """Whether the text with this token holds a stop string that it did not hold before."""
        if self._detokenizer is None:
            return False
        self._detokenizer.add_token(token)
        text = self._tail + str(self._detokenizer.last_segment)
        longest = max(map(len, self.texts))
        self._tail = text[max(len(text) - longest + 1, 0) :]
        ended = copy(self._detokenizer)  # what waits for the next token, a space say, is text if none comes
        ended.finalize()
        return any(stop in text + str(ended.last_segment) for stop in self.texts)
