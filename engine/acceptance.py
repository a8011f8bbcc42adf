"""Acceptance: how many drafts the target confirms, and the token that follows. Pure; caches move elsewhere.

Row i of the verify forward holds the target's logits after block row i, and p_i is its distribution there.

    greedy     draft i is confirmed when it is argmax(p_i); the next token is argmax(p_a)
    sampling   draft i, drawn from q_i, is confirmed with probability min(1, p_i(d_i) / q_i(d_i)); the next
               token is drawn from max(0, p_a - q_a), normalised (Leviathan et al. 2023, arXiv 2211.17192)

a is the number of drafts confirmed before the first that is not; where all are, q_a is nothing and the next
token is drawn from p_a itself. A draft that was chosen, not drawn, has q_i = 1 at the draft. Either way the
emitted tokens are distributed exactly as the target's own. All of it is in graph: the host reads one array.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.drafters.base import Draft
from engine.sampling import Sampler
from engine.stops import Stops


def likeliest(logits: mx.array) -> mx.array:
    """The most likely token of each row [..., V], int32 [...], as mlx-lm's greedy decoding takes it.

    mlx-lm compares log-probabilities in the model's own precision, where in 16 bits different logits may
    become equal and the first of them is taken.
    """
    if logits.dtype != mx.float32:
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return mx.argmax(logits, axis=-1).astype(mx.int32)


def pack_greedy(drafts: mx.array, logits: mx.array) -> mx.array:
    """Everything the host needs of a greedy round, as one array, so that one transfer suffices.

    Args:
        drafts: draft tokens int32 [B - 1].
        logits: the target's logits over the block, [B, V].

    Returns:
        int32 [1 + B]: the number of confirmed drafts, then a token for each block row; the emitted tokens
        are the first ``confirmed + 1`` of these.
    """
    tokens = likeliest(logits)
    hits = (drafts == tokens[:-1]).astype(mx.int32)
    return mx.concatenate([mx.cumprod(hits).sum()[None], tokens])


def pack_sampled(draft: Draft, logits: mx.array, sampler: Sampler) -> mx.array:
    """As `pack_greedy`, by rejection sampling.

    Args:
        draft: the drafts and what they were drawn from.
        logits: the target's logits over the block, [B, V].
        sampler: the target's sampler; the drafts have to be drawn independently of its next numbers.
    """
    count = len(draft)
    p = sampler.distribution(logits)  # [B, V]
    if not count:
        return mx.concatenate([mx.zeros((1,), mx.int32), sampler.draw(p)])
    chosen = draft.tokens[:, None]  # [B - 1, 1]
    q = draft.q if draft.q is not None else _certain(chosen, p.shape[-1])  # [B - 1, V]
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


def _certain(tokens: mx.array, vocabulary: int) -> mx.array:
    """All probability on one token a row: [N, 1] to float32 [N, V]."""
    return (mx.arange(vocabulary)[None] == tokens).astype(mx.float32)


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
