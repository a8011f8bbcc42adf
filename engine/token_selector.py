"""From rows of logits to tokens: processors first, then the likeliest or a draw, and how likely it was.

One sequence. Which drafts of a block are confirmed is decided in `engine.acceptance`; forwards and caches
are the
loop's. Nothing here waits for the device, but a processor may.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx

from engine.acceptance import likeliest, pack_greedy, pack_sampled
from engine.drafters.base import Draft
from engine.logprobs import Logprobs, TokenLogprob
from engine.sampling import Sampler

Processor = Callable[[mx.array, mx.array], mx.array]  # tokens so far [N], logits [1, V] → logits [1, V]


class TokenSelector:
    """How the tokens of one continuation are taken."""

    def __init__(
        self, sampler: Sampler | None, processors: Sequence[Processor], logprobs: Logprobs | None = None
    ) -> None:
        """Take the likeliest tokens without a sampler, of the logits that the processors leave."""
        self.sampler, self.processors, self._logprobs = sampler, processors, logprobs
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

    def of_row(self, logits: mx.array, so_far: mx.array) -> tuple[mx.array, mx.array]:
        """What follows a row of logits [1, V], given the tokens before it.

        Returns:
            The token, int32 [1], and what the host needs of it, int32 [1 + its record].
        """
        logits = self._processed(logits, so_far)
        if self.sampler is None:
            token = likeliest(logits)
        else:
            token = self.sampler.draw(self.sampler.distribution(logits))
        return token, self._recorded(token, token, logits)

    def before(self, drafts: mx.array) -> list[mx.array]:
        """The tokens before each row of a block of these drafts [B - 1]; nothing without processors."""
        if not self.processors:
            return []
        return [self.joined(drafts[:count]) for count in range(1 + drafts.shape[0])]

    def of_block(self, draft: Draft, logits: mx.array, before: Sequence[mx.array]) -> mx.array:
        """Acceptance of a block from its logits [B, V], int32 [1 + B + its records], see `engine.acceptance`.

        Processors take the rows in order; ``before`` are the tokens before each, those drafted among them.
        """
        if before:
            rows = [self._processed(logits[i : i + 1], tokens) for i, tokens in enumerate(before)]
            logits = mx.concatenate(rows)
        if self.sampler is None:
            packed = pack_greedy(draft.tokens, logits)
        else:
            packed = pack_sampled(draft, logits, self.sampler)
        return self._recorded(packed, packed[1:], logits)

    def records(self, tokens: Sequence[int], numbers: Sequence[int]) -> tuple[TokenLogprob, ...] | None:
        """The emitted tokens' records, from what came behind the tokens; None where none were asked for."""
        return None if self._logprobs is None else self._logprobs.unpack(tokens, numbers)

    def _recorded(self, packed: mx.array, tokens: mx.array, logits: mx.array) -> mx.array:
        """An array for the host, with the records of tokens [N] behind it where these were asked for."""
        if self._logprobs is None:
            return packed
        return mx.concatenate([packed, self._logprobs.pack(tokens, logits)])

    def _processed(self, logits: mx.array, so_far: mx.array) -> mx.array:
        for processor in self.processors:
            logits = processor(so_far, logits)
        return logits
