"""Whether an engine used the caches it was handed: read off the caches themselves.

To give the k-th token after a prompt of P, a loop must have put P + k - 1 positions through the model. So
before a token is handed on, every layer's cache must have taken in that many: its offset says so, and as many
rows as it can keep are really there. Nothing is wrapped and no type changes, so what an engine or a model
decides by the kind of a cache stays as it is; a copy that an engine makes of a cache counts for nothing; and
a loop that stops using them midway is found out at the next token. A recurrent state does not tell how many
positions went into it, only whether any did.
"""

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import ArraysCache

from engine.cache.ring import SlidingRing
from engine.cache.transaction import members_of
from engine.errors import GenerationError


def taken_in(cache: Any) -> int | None:
    """Positions a layer's cache has taken in; None for a recurrent state that is not empty."""
    counts = [_positions(member) for member in members_of(cache)]
    known = [count for count in counts if count is not None]
    return min(known, default=None)


def _positions(member: Any) -> int | None:
    if member.empty():
        return 0
    if isinstance(member, ArraysCache):
        return None
    keys = member.keys[0] if isinstance(member.keys, tuple) else member.keys  # a quantized one has three
    offset, rows = int(member.offset), int(keys.shape[2])
    kept = min(offset, member.capacity) if type(member) is SlidingRing else offset
    return offset if rows >= kept else rows


def verify_use(engine: str, strategy: str, channel: str, caches: Sequence[Any], at_least: int) -> None:
    """Raise GenerationError unless every layer's cache has taken in so many positions.

    Args:
        engine: its name, for the message; strategy and channel likewise.
        strategy: see above.
        channel: see above.
        caches: as they were handed in.
        at_least: positions.
    """
    counts = [taken_in(cache) for cache in caches]
    short = [(layer, count) for layer, count in enumerate(counts) if count is not None and count < at_least]
    if short:
        layer, count = short[0]
        raise GenerationError(
            f"engine {engine} did not use the caches of channel {channel}, handed in by {strategy}: "
            f"layer {layer} took in {count} of at least {at_least} positions, "
            f"{len(short)} of {len(caches)} layers are short"
        )
