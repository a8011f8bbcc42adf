"""From rows of logits to the next token: processors first, then the likeliest or a draw.

One sequence. Which drafts of a block are confirmed is decided in `engine.accept`; forwards and caches are the
loop's. Nothing here waits for the device, but a processor may.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx

from engine.accept import likeliest, pack_greedy, pack_sampled
from engine.drafters.base import Draft
from engine.sampling import Sampler

Processor = Callable[[mx.array, mx.array], mx.array]  # tokens so far [N], logits [1, V] → logits [1, V]


class Choice:
    """How the tokens of one continuation are taken."""

    def __init__(self, sampler: Sampler | None, processors: Sequence[Processor]) -> None:
        """Take the likeliest tokens without a sampler, of the logits that the processors leave."""
        self.sampler, self.processors = sampler, processors
        self.so_far = mx.array([], mx.int32)  # prompt and emitted tokens [N], for the processors alone

    def start(self, prompt: Sequence[int]) -> None:
        """Begin after a prompt."""
        if self.processors:
            self.so_far = mx.array(list(prompt), mx.int32)

    def note(self, tokens: Sequence[int]) -> None:
        """Take note of emitted tokens."""
        if self.processors:
            self.so_far = self.joined(mx.array(list(tokens), mx.int32))

    def joined(self, tokens: mx.array) -> mx.array:
        """The tokens so far and these, where a processor wants to know."""
        return mx.concatenate([self.so_far, tokens]) if self.processors else self.so_far

    def of_row(self, logits: mx.array, so_far: mx.array) -> mx.array:
        """The token after a row of logits [1, V], int32 [1]; ``so_far`` are the tokens before it."""
        logits = self._processed(logits, so_far)
        if self.sampler is None:
            return likeliest(logits)
        return self.sampler.draw(self.sampler.distribution(logits))

    def before(self, drafts: mx.array) -> list[mx.array]:
        """The tokens before each row of a block of these drafts [B - 1]; nothing without processors."""
        if not self.processors:
            return []
        return [self.joined(drafts[:count]) for count in range(1 + drafts.shape[0])]

    def of_block(self, draft: Draft, logits: mx.array, before: Sequence[mx.array]) -> mx.array:
        """Acceptance of a block from its logits [B, V], int32 [1 + B], see `engine.accept`.

        Processors take the rows in order; ``before`` are the tokens before each, those drafted among them.
        """
        if before:
            rows = [self._processed(logits[i : i + 1], tokens) for i, tokens in enumerate(before)]
            logits = mx.concatenate(rows)
        if self.sampler is None:
            return pack_greedy(draft.tokens, logits)
        return pack_sampled(draft, logits, self.sampler)

    def _processed(self, logits: mx.array, so_far: mx.array) -> mx.array:
        for processor in self.processors:
            logits = processor(so_far, logits)
        return logits
