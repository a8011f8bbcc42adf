"""How each kind of cache goes back to fewer positions: one rollback for each cache.

Recurrent states cannot be trimmed. The old state is put back, and mlx-lm's own update is run again on the
positions that are kept: mixer(x), recorded, then mixer(x[:k]). Projections, nearly all of the cost, treat
positions one by one: they are answered from the record, so that no weight is read twice.

Nothing of mlx-lm is patched: instances of modules that are given a cache, and projections inside them, get
a class derived from theirs, until the last user of the model closes. Decoder layers are left alone (hidden
states are read from them). A module that keeps a state outside its cache, or changes another, is not covered.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache

from engine.cache.policy import RestoredKV
from engine.cache.ring import SlidingRing, WindowedKV

PROJECTIONS = (nn.Linear, nn.QuantizedLinear)  # modules whose output at a position depends on it alone
# Modules that compile their own single step: an answer from the record would become a part of the graph.
SELF_COMPILING = ("mlx_lm.models.kimi_k3",)


class Rollback:
    """By a trim, which is exact for plain, quantized and chunked keys and values."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._start: int | None = None

    def begin(self, positions: int) -> None:  # noqa: ARG002 - such a cache grows without limit
        self._start = self._cache.offset

    def divide(self, kept: int) -> bool:  # noqa: ARG002 - rows are independent of each other
        """Prepare to commit ``kept`` of the announced rows, fewer than all; False where it cannot."""
        return True

    def commit(self, dropped: int) -> None:
        if dropped:
            self._cache.trim(dropped)
        self._start = None

    def abort(self) -> None:
        if self._start is not None:
            self._cache.trim(self._cache.offset - self._start)
            self._start = None

    def rewindable(self, count: int) -> bool:
        left, first = self._cache.offset - count, 0
        if type(self._cache) is ChunkedKVCache and self._cache.start_position:  # part of older chunks is gone
            first, left = self._cache.start_position, left - left % self._cache.chunk_size
        return bool(left >= first)

    def rewind(self, count: int) -> None:
        self._cache.trim(count)


class SnapshotRollback(Rollback):
    """Any other cache is put back as it was. A round costs the size of the cache, not of the block: the first
    write after `begin` copies an array.
    """

    _snapshot: "Snapshot | None" = None

    def begin(self, positions: int) -> None:  # noqa: ARG002 - such a cache grows as it likes
        self._snapshot = Snapshot(self._cache)

    def divide(self, kept: int) -> bool:  # noqa: ARG002 - whatever the number
        return False

    def commit(self, dropped: int) -> None:  # noqa: ARG002 - nothing, or what `divide` has dropped
        self._snapshot = None

    def abort(self) -> None:
        if self._snapshot is not None:
            self._snapshot.restore()
            self._snapshot = None

    def rewindable(self, count: int) -> bool:
        return count == 0

    def rewind(self, count: int) -> None:
        """Do nothing for 0, the only count that is rewindable."""


class RecurrentRollback(SnapshotRollback):
    """An `ArraysCache`, whose arrays are replaced as a whole by every forward; its calls are recorded."""

    def __init__(self, cache: Any, wiring: "Wiring") -> None:
        super().__init__(cache)
        self._wiring = wiring
        self._record(0)
        wiring.recording[id(cache)] = self  # the cache lives as long: it is known by its id

    def _record(self, positions: int, before: Sequence[Any] = ()) -> None:
        self.positions = positions  # of the block being recorded; 0: not recording
        self.calls: list[_Call] = []
        self._before = before  # the arrays at `begin`, to see which ones are replaced

    def begin(self, positions: int) -> None:
        super().begin(positions)
        self._record(positions if positions > 1 else 0, list(self._cache.cache))

    def divide(self, kept: int) -> bool:
        """Run the recorded calls on ``kept`` positions; False, to be followed by `abort`, where a call
        cannot be cut or something else changed the state.
        """
        return self._replayed([call.cut(kept) for call in self.calls], kept)

    def divide_rows(self, kept: Sequence[int]) -> bool:
        """Run all positions, those behind ``kept[s]`` masked, as mlx-lm does with ragged prompts; False for a
        module that takes no mask.
        """
        if self._snapshot is None:
            return False
        if not self.positions:  # of a single position: the new state or the old one
            after = list(self._cache.cache)
            self._snapshot.restore()
            pairs = zip(self._cache.cache, after, strict=True)
            self._cache.cache = [_chosen(kept, new, old) for old, new in pairs]
            return True
        ends = mx.array(list(kept), mx.int32)
        mask = mx.arange(self.positions) < ends[:, None]
        masked = [
            {**bound.arguments, "mask": mask} if "mask" in bound.signature.parameters else None
            for bound in (call.arguments for call in self.calls)
        ]
        done = self._replayed(masked, self.positions, ends)
        self._cache.lengths = None
        return done

    def _replayed(
        self, arguments: Sequence[dict[str, Any] | None], kept: int, ends: mx.array | None = None
    ) -> bool:
        """Whether the calls, run again from the old state, have replaced all that they replaced before."""
        self.positions = 0
        if self._snapshot is None or not self.calls or None in arguments:
            return False
        after = list(self._cache.cache)
        self._snapshot.restore()
        restored = list(self._cache.cache)
        for call, given in zip(self.calls, arguments, strict=True):
            if ends is not None:
                self._cache.lengths = mx.array(ends)  # the module counts it down
            call.run(self._wiring, given or {}, kept)
        slots = zip(self._before, after, restored, self._cache.cache, strict=True)
        return all(then is before or now is not old for before, then, old, now in slots)

    def commit(self, dropped: int) -> None:
        self._record(0)
        super().commit(dropped)

    def abort(self) -> None:
        self._record(0)
        super().abort()


def _chosen(kept: Sequence[int], new: mx.array | None, old: mx.array | None) -> mx.array | None:
    """The new state of sequences that keep something, [S, …], the old one of the others."""
    if new is None or old is None:
        return new
    return mx.where(mx.array(list(kept)).reshape(-1, *[1] * (new.ndim - 1)) > 0, new, old)


class Snapshot:
    """What a cache held, to put back any number of times.

    Copies of arrays are handles of their own, which writing into an array does not change.
    """

    def __init__(self, cache: Any) -> None:
        self._cache, self._held = cache, deepcopy(vars(cache))

    def restore(self) -> None:
        vars(self._cache).clear()
        vars(self._cache).update(deepcopy(self._held))


TRIMMED = {KVCache, RestoredKV, WindowedKV, QuantizedKVCache, ChunkedKVCache}


def rollback_of(cache: Any) -> Any:
    """The rollback of a cache without recurrent state; our ring is its own."""
    if type(cache) is SlidingRing:
        return cache
    return (Rollback if type(cache) in TRIMMED else SnapshotRollback)(cache)


class _Call:
    """One run of a module with a cache: its arguments, and what its projections answered, in order."""

    def __init__(self, module: Any, plain: type, arguments: inspect.BoundArguments, positions: int) -> None:
        self.module, self.plain, self.arguments = module, plain, arguments
        self.positions = positions
        self.is_outer = False  # a module inside was given the same cache, and does the update
        self._answers: list[tuple[Any, tuple[int, ...], mx.array]] = []
        self._replay: Iterator[tuple[Any, tuple[int, ...], mx.array]] | None = None
        self._kept = 0

    def project(self, module: Any, plain: type, x: mx.array) -> mx.array:
        """A projection inside the module was called with x [1, N, in]."""
        if self._replay is None:
            output: mx.array = plain.__call__(module, x)
            self._answers.append((module, x.shape, output))
            return output
        recorded, shape, answer = next(self._replay, (None, (), x))
        same = recorded is module and len(shape) == x.ndim and shape[1:2] == (self.positions,)
        if same and x.shape[1] == self._kept:
            return answer[:, : self._kept]
        again: mx.array = plain.__call__(module, x)
        return again

    def cut(self, kept: int) -> dict[str, Any] | None:
        """The arguments for the first ``kept`` positions; None if there is one that cannot be cut."""
        arguments = dict(self.arguments.arguments)
        for name, value in arguments.items():
            if not isinstance(value, mx.array):
                continue
            if value.ndim > 1 and value.shape[:2] == (1, self.positions):
                arguments[name] = value[:, :kept]
            elif name == "mask" and value.ndim > 1 and value.shape[-2] == self.positions:
                arguments[name] = value[..., :kept, :]  # one for attention, handed to every layer alike
            else:
                return None
        return arguments

    def run(self, wiring: "Wiring", arguments: dict[str, Any], kept: int) -> None:
        bound = self.arguments.signature.bind_partial()
        bound.arguments.update(arguments)
        fresh = kept == 1 and self.plain.__module__ in SELF_COMPILING
        self._replay, self._kept = iter([] if fresh else self._answers), kept
        with wiring.answering(self):
            self.plain.__call__(*bound.args, **bound.kwargs)  # the module itself is the first of them
        self._replay = None


class Wiring:
    """The modules of one model that listen; shared by all its users."""

    def __init__(self) -> None:
        self.recording: dict[int, RecurrentRollback] = {}  # by the id of the cache
        self._wired: list[tuple[Any, type]] = []
        self._active: _Call | None = None

    @classmethod
    def of(cls, model: Any) -> "Wiring":
        """The wiring of a model, installed at its first use; empty if no module is called with a cache."""
        mixers = list(_mixers(model))
        for mixer in mixers:
            if isinstance(found := type(mixer).__dict__.get("cache_wiring"), Wiring):
                return found
        wiring = cls()
        for mixer in mixers:
            wiring._wire(mixer, wiring._listening(type(mixer)))
        for module in {id(m): m for mixer in mixers for m in mixer.modules()}.values():
            if isinstance(module, PROJECTIONS):
                wiring._wire(module, wiring._projection(type(module)))
        return wiring

    def release(self, caches: Sequence[Any]) -> None:
        for cache in caches:
            self.recording.pop(id(cache), None)
        if not self.recording:
            for module, plain in self._wired:
                object.__setattr__(module, "__class__", plain)
            self._wired = []

    @contextmanager
    def answering(self, call: _Call | None) -> Iterator[None]:
        before, self._active = self._active, call
        try:
            yield
        finally:
            self._active = before

    def _wire(self, module: Any, call: Any) -> None:
        plain = type(module)
        body = {"__call__": call, "__module__": plain.__module__, "cache_wiring": self}
        self._wired.append((module, plain))
        object.__setattr__(module, "__class__", type(plain.__name__, (plain,), body))

    def _listening(self, plain: type) -> Any:
        signature = inspect.signature(plain.__call__)
        place = list(signature.parameters).index("cache") - 1

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            cache = args[place] if len(args) > place else kwargs.get("cache")
            recorder = self.recording.get(id(cache))
            if recorder is None or not recorder.positions:
                return plain.__call__(module, *args, **kwargs)
            bound = signature.bind(module, *args, **kwargs)
            recorded, outer = _Call(module, plain, bound, recorder.positions), self._active
            with self.answering(recorded):
                output = plain.__call__(module, *args, **kwargs)
            if not recorded.is_outer:
                recorder.calls.append(recorded)
            if outer is not None and outer.arguments.arguments.get("cache") is cache:
                outer.is_outer = True
            return output

        call.__signature__ = signature  # type: ignore[attr-defined]  # what `_mixers` looks at
        return call

    def _projection(self, plain: type) -> Any:
        def call(module: Any, x: mx.array) -> Any:
            if self._active is None:
                return plain.__call__(module, x)
            return self._active.project(module, plain, x)

        return call


def _mixers(model: Any) -> Iterator[Any]:
    """Modules below the decoder layers, or next to them, that are called with a cache."""
    layers = {id(layer) for layer in model.layers}
    for _, module in model.named_modules():
        if id(module) in layers or any(id(inner) in layers for inner in module.modules()):
            continue
        if "cache" in inspect.signature(type(module).__call__).parameters:
            yield module
