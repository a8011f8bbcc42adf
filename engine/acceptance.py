"""Acceptance: which tokens follow rows of logits, and how many drafts the target confirms.

Row i of the verify forward holds the target's logits after block row i, and p_i is its distribution there.

    greedy     draft i is confirmed when it is argmax(p_i); the next token is argmax(p_a)
    sampling   draft i, drawn from q_i, is confirmed with probability min(1, p_i(d_i) / q_i(d_i)); the next
               token is drawn from max(0, p_a - q_a), normalised (Leviathan et al. 2023, arXiv 2211.17192)
    by seed    a token is drawn from p_i with the numbers of its position in the text; a draft is confirmed
               when it is that token, so the text is that of plain decoding with the same seed

a is the number of drafts confirmed before the first that is not; where all are, q_a is nothing and the next
token is drawn from p_a itself. A draft that was chosen, not drawn, has q_i = 1 at the draft. Either way the
emitted tokens are distributed exactly as the target's own. All of it is in graph: the host reads one array.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.drafters.base import Draft
from engine.logprobs import Logprobs, TokenLogprob
from engine.sampling import Sampler
from engine.stops import Stops

Processor = Callable[[mx.array, mx.array], mx.array]  # tokens so far [N], logits [1, V] → logits [1, V]


def likeliest(logits: mx.array) -> mx.array:
    """The most likely token of each row [..., V], int32 [...], as mlx-lm's greedy decoding takes it.

    mlx-lm compares log-probabilities in the model's own precision: in 16 bits different logits may be equal.
    """
    if logits.dtype != mx.float32:
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return mx.argmax(logits, axis=-1).astype(mx.int32)


def next_token(logits: mx.array, sampler: Sampler | None) -> mx.array:
    """The token after each row of logits [N, V], int32 [N]."""
    return likeliest(logits) if sampler is None else sampler.draw(sampler.distribution(logits))


def pack_greedy(drafts: mx.array, logits: mx.array) -> mx.array:
    """All that the host needs of a greedy round of drafts [B - 1] with logits [B, V], in one transfer.

    int32 [1 + B]: the number of confirmed drafts, then a token for each block row; the emitted tokens are the
    first ``confirmed + 1`` of these.
    """
    return pack_chosen(drafts, likeliest(logits))


def pack_chosen(drafts: mx.array, tokens: mx.array) -> mx.array:
    """As `pack_greedy`, from the tokens [B] that the target chose behind each block row."""
    hits = (drafts == tokens[:-1]).astype(mx.int32)
    return mx.concatenate([mx.cumprod(hits).sum()[None], tokens])


def pack_sampled(draft: Draft, logits: mx.array, sampler: Sampler) -> mx.array:
    """As `pack_greedy`, by rejection sampling; the drafts do not depend on the sampler's next numbers."""
    count = len(draft)
    p = sampler.distribution(logits)  # [B, V]
    if not count:
        return mx.concatenate([mx.zeros((1,), mx.int32), sampler.draw(p)])
    chosen = draft.tokens[:, None]  # [B - 1, 1]
    certain = (mx.arange(p.shape[-1])[None] == chosen).astype(mx.float32)
    q = draft.q if draft.q is not None else certain  # [B - 1, V]
    p_chosen = mx.take_along_axis(p[:count], chosen, axis=-1)[:, 0]
    q_chosen = mx.take_along_axis(q, chosen, axis=-1)[:, 0]
    hits = (mx.random.uniform(shape=(count,), key=sampler.key()) * q_chosen < p_chosen).astype(mx.int32)
    accepted = mx.cumprod(hits).sum()
    p_next = mx.take(p, accepted, axis=0)  # [V]
    q_next = mx.take(mx.concatenate([q, mx.zeros_like(q[:1])]), accepted, axis=0)
    residual = mx.maximum(p_next - q_next, 0)
    # Where p and q differ by rounding alone nothing may be left over: then they are equal, and p will do.
    residual = mx.where(residual.sum() > 0, residual, p_next)
    following = sampler.draw(residual[None])  # [1]
    rows = mx.arange(count + 1)
    tokens = mx.where(rows < accepted, mx.concatenate([draft.tokens, following]), following)
    return mx.concatenate([accepted.astype(mx.int32)[None], tokens])


@dataclass(frozen=True)
class Acceptance:
    """What one round confirmed and what of it is emitted."""

    accepted: int  # drafts confirmed, 0..B-1
    tokens: tuple[int, ...]  # emitted: confirmed drafts and one token of the target, cut where the text ends
    stopped: bool  # whether the text ends with the last emitted token

    @property
    def kept(self) -> int:
        """Block rows that belong in the caches: the bonus and every emitted token but the last."""
        return len(self.tokens)


def unpack(packed: Sequence[int], stops: Stops) -> Acceptance:
    """Read a packed round, cut at the first token that ends the text; ``stops`` takes note of the tokens."""
    accepted = packed[0]
    emitted = tuple(packed[1 : accepted + 2])
    end = stops.find(emitted)
    return Acceptance(accepted, emitted if end is None else emitted[:end], stopped=end is not None)


class TokenSelector:
    """Chooses the tokens of one sequence; nothing here waits for the device, but a processor may."""

    def __init__(
        self, sampler: Sampler | None, processors: Sequence[Processor], logprobs: Logprobs | None = None
    ) -> None:
        self.sampler, self.processors, self._logprobs = sampler, processors, logprobs
        self.so_far = mx.array([], mx.int32)  # prompt and emitted tokens [N], for the processors alone
        self._emitted = 0  # tokens

    @property
    def is_plain(self) -> bool:
        """Whether every token is the likeliest one, and nothing is recorded of it."""
        return self.sampler is None and not self.processors and self._logprobs is None

    @property
    def drafting(self) -> Sampler | None:
        """What draws the drafts; None: they are the likeliest."""
        return None if self.sampler is None or self.sampler.by_position else self.sampler

    def start(self, prompt: Sequence[int]) -> None:
        """Begin after a prompt."""
        self._emitted = 0
        if self.processors:
            self.so_far = mx.array(list(prompt), mx.int32)

    def note(self, tokens: Sequence[int]) -> None:
        """Take note of emitted tokens."""
        self._emitted += len(tokens)
        if self.processors:
            self.so_far = self.joined(mx.array(list(tokens), mx.int32))

    def joined(self, tokens: mx.array) -> mx.array:
        """The tokens so far and these, where a processor needs them."""
        return mx.concatenate([self.so_far, tokens]) if self.processors else self.so_far

    def before(self, drafts: mx.array) -> list[mx.array]:
        """The tokens before each row of a block of these drafts [B - 1]; nothing without processors."""
        if not self.processors:
            return []
        return [self.joined(drafts[:count]) for count in range(1 + drafts.shape[0])]

    def of_row(self, logits: mx.array, so_far: mx.array, ahead: int = 0) -> tuple[mx.array, mx.array]:
        """The token after a row of logits [1, V], int32 [1], and the same with its record behind it.

        ``ahead`` tokens were chosen that are not noted yet.
        """
        logits = self._processed(logits, so_far)
        if self.sampler is not None and self.sampler.by_position:
            token = self.sampler.draw_at(logits, self._emitted + ahead)
        else:
            token = next_token(logits, self.sampler)
        return token, self._recorded(token, token, logits)

    def of_block(self, draft: Draft, logits: mx.array, before: Sequence[mx.array]) -> mx.array:
        """Acceptance of a block from its logits [B, V], int32 [1 + B + its records], see `pack_greedy`.

        Processors change the rows in order; ``before`` are the tokens before each, drafts included.
        """
        if before:
            rows = [self._processed(logits[i : i + 1], tokens) for i, tokens in enumerate(before)]
            logits = mx.concatenate(rows)
        if self.sampler is None:
            packed = pack_greedy(draft.tokens, logits)
        elif self.sampler.by_position:
            packed = pack_chosen(draft.tokens, self.sampler.draw_at(logits, self._emitted))
        else:
            packed = pack_sampled(draft, logits, self.sampler)
        return self._recorded(packed, packed[1:], logits)

    def records(self, tokens: Sequence[int], numbers: Sequence[int]) -> tuple[TokenLogprob, ...] | None:
        """The emitted tokens' records, from what came behind the tokens; None where none were asked for."""
        return None if self._logprobs is None else self._logprobs.unpack(tokens, numbers)

    def _recorded(self, packed: mx.array, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._logprobs is None:
            return packed
        return mx.concatenate([packed, self._logprobs.pack(tokens, logits)])

    def _processed(self, logits: mx.array, so_far: mx.array) -> mx.array:
        for processor in self.processors:
            logits = processor(so_far, logits)
        return logits
