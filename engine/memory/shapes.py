"""What each layer of a model writes into its cache, as shapes; and buffers that are shapes alone.

mlx builds arrays lazily, so a forward that nobody evaluates tells every shape and type and computes nothing.
Zeros that nobody evaluates take no memory, however many there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache

from engine.cache.coded import CodedKV
from engine.cache.policy import RestoredKV
from engine.cache.ring import SlidingRing
from engine.cache.transaction import members_of, new_caches
from engine.errors import ModelError

ATTENDING = (KVCache, RestoredKV, SlidingRing, ChunkedKVCache)


@dataclass(frozen=True)
class Rows:
    """Keys and values of an attention layer.

    Attributes:
        heads: KV heads of the keys and of the values.
        dims: likewise the values of a row.
        dtypes: likewise their types.
    """

    heads: tuple[int, int]
    dims: tuple[int, int]
    dtypes: tuple[mx.Dtype, mx.Dtype]

    def of(self, count: int, batch: int = 1) -> tuple[mx.array, mx.array]:
        """Keys and values of ``count`` positions of ``batch`` sequences, [batch, heads, count, dim]."""
        parts = zip(self.heads, self.dims, self.dtypes, strict=True)
        keys, values = (mx.zeros((batch, heads, count, dim), dtype) for heads, dim, dtype in parts)
        return keys, values


@dataclass(frozen=True)
class State:
    """The arrays of a recurrent layer of one sequence: shape and type of each, None for one not used."""

    arrays: tuple[tuple[tuple[int, ...], mx.Dtype] | None, ...]

    def of(self) -> list[mx.array | None]:
        """Such arrays."""
        return [None if each is None else mx.zeros(*each) for each in self.arrays]


Written = tuple[Rows | State | None, ...]
"""What one layer writes: a part for each member of its cache; None for a member that is never written."""


def written_by(model: Any) -> list[Written]:
    """What each layer's cache of a model is given, in the order of the caches.

    Args:
        model: an mlx-lm model; its weights are not computed.

    Raises:
        ModelError: a cache is of a kind whose growth is not known here.
    """
    caches = new_caches(model, 1)
    model(mx.zeros((1, 2), mx.int32), cache=caches)
    return [tuple(_written(member) for member in members_of(cache)) for cache in caches]


def _written(member: Any) -> Rows | State | None:
    if type(member) is ArraysCache:
        return State(tuple(None if each is None else (each.shape, each.dtype) for each in member.cache))
    if type(member) not in ATTENDING:
        raise ModelError(
            f"how {type(member).__name__} layers grow is not known; their memory is not predicted"
        )
    if member.empty():
        return None
    both = member.keys, member.values
    heads, dims, dtypes = zip(*((each.shape[1], each.shape[3], each.dtype) for each in both), strict=True)
    return Rows(heads, dims, dtypes)


def feed(cache: Any, written: Written, count: int, batch: int = 1) -> None:
    """Let a layer's cache take in ``count`` positions, as a forward would.

    Args:
        cache: of a layer; of ``batch`` sequences if merged.
        written: what the layer writes.
        count: positions of each sequence.
        batch: sequences.
    """
    if type(cache) is CodedKV:  # its stores are filled through it, by codes of the rows it is given
        _feed(cache, written[0], count, batch)
    else:
        for member, part in zip(members_of(cache), written, strict=True):
            _feed(member, part, count, batch)
    forget([cache])


def _feed(member: Any, part: Rows | State | None, count: int, batch: int) -> None:
    if isinstance(part, Rows):
        if type(member) is ChunkedKVCache:
            member.maybe_trim_front()  # type: ignore[no-untyped-call]  # its models do so in every forward
        member.update_and_fetch(*part.of(count, batch))
    elif isinstance(part, State) and batch == 1:  # a merged state is replaced by one of the same shape
        member.cache = part.of()


def forget(caches: Sequence[Any]) -> None:
    """Put zeros of the same shapes in the place of all buffers, so that what led to them is forgotten."""
    for cache in caches:
        for member in members_of(cache):
            if type(member) is not ArraysCache and member.keys is not None:
                member.keys = mx.zeros(member.keys.shape, member.keys.dtype)
                member.values = mx.zeros(member.values.shape, member.values.dtype)
