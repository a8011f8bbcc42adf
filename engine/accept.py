"""Greedy acceptance: how many drafts the target confirms. Pure; the caller moves the caches.

Row i of the verify forward gives the target's token after block row i. Draft i is confirmed when it equals
the target's token of row i - 1 and every draft before it was confirmed. Sampling is not covered.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx


def pack_greedy(drafts: mx.array, logits: mx.array) -> mx.array:
    """Everything the host needs of a round, as one array, so that one transfer suffices.

    Args:
        drafts: draft tokens [B - 1].
        logits: the target's logits over the block, [1, B, V].

    Returns:
        int32 [1 + B]: the number of confirmed drafts, then the target's token after each block row.
    """
    tokens = mx.argmax(logits[0], axis=-1).astype(mx.int32)
    hits = (drafts.astype(mx.int32) == tokens[:-1]).astype(mx.int32)
    return mx.concatenate([mx.cumprod(hits).sum()[None], tokens])


@dataclass(frozen=True)
class Verdict:
    """What one round confirmed and what of it is emitted."""

    accepted: int  # drafts confirmed, 0..B-1
    tokens: tuple[int, ...]  # emitted: confirmed drafts and one token of the target, cut at a stop token
    stopped: bool  # whether the last emitted token is a stop token

    @property
    def kept(self) -> int:
        """Block rows that belong in the caches: the bonus and every emitted token but the last."""
        return len(self.tokens)


def unpack_greedy(packed: Sequence[int], stops: Collection[int]) -> Verdict:
    """Read `pack_greedy`'s array.

    A confirmed draft equals the target's token of the row before, so the emitted tokens are simply the
    target's first ``accepted + 1``.
    """
    accepted, tokens = packed[0], packed[1:]
    emitted = tokens[: accepted + 1]
    for position, token in enumerate(emitted):
        if token in stops:
            return Verdict(accepted, tuple(emitted[: position + 1]), stopped=True)
    return Verdict(accepted, tuple(emitted), stopped=False)
