"""A run's cache updates, in the order `engine.session` and `engine.batch_decode` make them, on shapes alone.

    a sequence   the prompt in chunks, its last token by itself, then one round
    a batch      each prompt likewise; the caches are merged, then one round for all

Layers that are alike are replayed once. No weight, key or value is computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache

from engine.cache.batch import merge
from engine.cache.coded import CodedKV
from engine.cache.policy import KVPolicy, RestoredKV
from engine.cache.ring import SlidingRing, WindowedKV
from engine.cache.traced import appended, reserve, stores_of
from engine.cache.transaction import new_caches
from engine.memory.shapes import Written, feed, written_by
from engine.restoration.session import RestorationPlan
from engine.target.compiled import CompiledForward, graph_length, longest_graph
from engine.target.model import Target


@dataclass(frozen=True)
class Run:
    """What is to be held.

    Attributes:
        context: tokens of each prompt.
        batch: sequences; one is decoded alone, several are merged.
        block: tokens of the round; 0 for none, where the prompt leaves room for one token alone.
        headroom: the largest block that may be verified.
        prefill_chunk: prompt positions a forward.
    """

    context: int
    batch: int = 1
    block: int = 1
    headroom: int = 1
    prefill_chunk: int = 2048


@dataclass(frozen=True)
class LayerKind:
    """Layers whose caches are alike.

    Attributes:
        cache: class name of their caches at the end.
        holds: what they keep, for people.
        layers: their number.
        nbytes: bytes of all of them, all sequences together.
    """

    cache: str
    holds: str
    layers: int
    nbytes: int


def held_by(target: Target, policy: KVPolicy, run: Run) -> list[LayerKind]:
    """The caches' bytes after a run, by kinds of layers in the order of their first layers.

    Args:
        target: a model, loaded or not.
        policy: which keys and values are kept, and how.
        run: how much of them.

    Raises:
        ConfigurationError: the policy does not go together with the model.
        ModelError: nor do a batch and the model; or a cache is of a kind that cannot be predicted.
    """
    caches = new_caches(target.model, run.headroom, policy)
    compiled = CompiledForward.of(target, (), caches) is not None
    stage = _Stage(run.headroom, longest_graph(target.hidden_size)) if compiled else None
    alike: dict[tuple[str, Written], list[Any]] = {}
    for cache, written in zip(caches, written_by(target.model), strict=True):
        alike.setdefault((_holds(cache), written), []).append(cache)
    kinds = []
    for (holds, written), group in alike.items():
        cache = _held(target.model, group[0], written, policy=policy, run=run, stage=stage)
        kinds.append(LayerKind(type(cache).__name__, holds, len(group), len(group) * int(cache.nbytes)))
    return kinds


def _held(
    model: Any, cache: Any, written: Written, *, policy: KVPolicy, run: Run, stage: "_Stage | None"
) -> Any:
    """One layer's cache at the end of a run; for a batch, of all its sequences."""
    for count in chunks_of(policy, run):
        if _is_full(cache):
            break
        _forward(cache, written, count, stage if policy.source is None else None)
    _forward(cache, written, 1, stage)
    if run.batch > 1:
        if not any(written):
            return cache
        [cache] = merge(model, [[cache]] * run.batch)
        if run.block:
            feed(cache, written, run.block, run.batch)
    elif run.block:
        _forward(cache, written, run.block, stage)
    return cache


def _is_full(cache: Any) -> bool:
    """Whether nothing a layer takes in can change its size: its stores are rings with all their rows."""
    stores = stores_of([cache])
    return all(type(ring) is SlidingRing and not ring.empty() for ring in stores) and all(
        ring.keys.shape[2] == ring.capacity for ring in stores
    )


def chunks_of(policy: KVPolicy, run: Run) -> Iterator[int]:
    """Positions of each forward over the prompt, its last token left out."""
    longest = run.prefill_chunk
    if policy.source is not None:
        longest = RestorationPlan(policy.source, policy.sink, policy.window).chunk
    for done in range(0, run.context - 1, run.prefill_chunk):
        part = min(run.prefill_chunk, run.context - 1 - done)
        yield from (min(longest, part - at) for at in range(0, part, longest))


@dataclass(frozen=True)
class _Stage:
    """Which forwards are compiled: those of up to ``room`` tokens, and ``longest`` rows."""

    room: int
    longest: int | None

    def size(self, count: int) -> int | None:
        """The length of the graph that serves a forward; None: it is not compiled."""
        if count > self.room:
            return None
        size = graph_length(count, self.room)
        return None if self.longest is not None and size > self.longest else size


def _forward(cache: Any, written: Written, count: int, stage: _Stage | None) -> None:
    """One forward of one sequence, on one layer's cache."""
    size = stage.size(count) if stage else None
    stores = stores_of([cache])
    if size is not None and all(reserve(store, size) for store in stores):
        for store in stores:
            appended(store, count, size)
    else:
        feed(cache, written, count)


def _holds(cache: Any) -> str:
    """What a layer's cache keeps, in words; caches of different layouts differ in it."""
    if type(cache) is CacheList:
        return " + ".join(_holds(member) for member in cache.caches)
    if type(cache) is CodedKV:
        return f"{_holds(cache.stores[0])}, {cache.code.partition('@')[0]}"
    if type(cache) is SlidingRing:
        sink = f"first {cache.sink} and " if cache.sink else ""
        return f"{sink}last {cache.window}"
    if type(cache) is WindowedKV:
        return f"all positions, the last {cache.window} seen"
    if type(cache) is ArraysCache:
        return "recurrent state"
    if type(cache) is ChunkedKVCache:
        return f"chunks of {cache.chunk_size}"
    return "all positions, restored" if type(cache) is RestoredKV else "all positions"


def total(kinds: Sequence[LayerKind]) -> int:
    """Bytes of all layers."""
    return sum(kind.nbytes for kind in kinds)
