"""Where a text ends: stop tokens, which are emitted, and stop strings, found as the text grows."""

from collections.abc import Collection, Sequence
from typing import Any

from engine.detokenize import IncrementalDecoder, TextEnds
from engine.errors import ConfigurationError


class Stops(TextEnds):
    """Stop tokens and stop strings of one sequence at a time."""

    def __init__(
        self,
        tokens: Collection[int] = (),
        texts: Sequence[str] = (),
        tokenizer: Any | None = None,
        *,
        least: int = 0,
    ) -> None:
        """End at any of ``tokens``, or where the generated text holds one of ``texts``.

        No string that is complete before so many tokens as ``least`` ends a text.
        """
        if not all(texts):
            raise ConfigurationError("a stop string must not be empty")
        if texts and tokenizer is None:
            raise ConfigurationError("stop strings need a tokenizer")
        self.tokens = frozenset(tokens)
        self.texts = tuple(texts)
        self.least = least
        self._tokenizer = tokenizer
        self.start()

    def start(self, prompt: Sequence[int] = ()) -> None:
        """Begin a new text, which continues a prompt."""
        self._decoder = IncrementalDecoder(self._tokenizer, prompt) if self.texts else None
        self._tail = ""  # final text that may be the beginning of a stop string
        self._count = 0  # tokens of the text

    def find(self, tokens: Sequence[int]) -> int | None:
        """Note emitted tokens; how many there are up to the one that ends the text, None if it goes on."""
        for position, token in enumerate(tokens):
            if token in self.tokens or self._completes(token):
                return position + 1
        return None

    def _completes(self, token: int) -> bool:
        """Whether the text, if it ended with this token, would hold a stop string."""
        if self._decoder is None:
            return False
        self._count += 1
        self._tail += self._decoder.add(token)
        found = self.first_in(self._tail + self._decoder.pending, self._count) is not None
        self._tail = self._tail[len(self._tail) - self.partial_in(self._tail) :]
        return found
