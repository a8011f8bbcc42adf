"""Remembers how a recurrent layer was called, so that its update can be run again on fewer positions.

A recurrent state cannot be trimmed. What can be done is to put the old state back and run mlx-lm's own update
on the positions that are kept. Nearly all of the layer's cost is in its projections, which treat positions
one by one: their outputs were computed in the first run and are given back from the record, so that no weight
is read twice. The result of the run is thrown away, and being lazy, what only leads to it is never computed.

    first run (n positions)    mixer(x)      → state n     x and the projections' outputs are recorded
    replay    (k positions)    mixer(x[:k])  → state k     the same code, projections answered from the record

Nothing of mlx-lm is patched. Instances of modules that take a cache, and of the projections inside them, get
a class of their own, derived from theirs; the last user of a model to close gives them their old one back.
Decoder layers are left alone (they are tapped). A module that keeps a state outside the cache object it is
given, or changes another cache as well, is not covered.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

PROJECTIONS = (nn.Linear, nn.QuantizedLinear)  # modules whose output at a position depends on it alone
# Modules that compile their own single step: an answer from the record would become a part of the graph.
SELF_COMPILING = ("mlx_lm.models.kimi_k3",)


class Call:
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
        """Run the module once more, for what it does to its cache."""
        bound = self.arguments.signature.bind_partial()
        bound.arguments.update(arguments)
        fresh = kept == 1 and self.plain.__module__ in SELF_COMPILING
        self._replay, self._kept = iter([] if fresh else self._answers), kept
        with wiring.attending(self):
            self.plain.__call__(*bound.args, **bound.kwargs)  # the module itself is the first of them
        self._replay = None


class Recorder:
    """The calls of one cache during one block. Call it `Wiring.recorder`'s result; not made by hand."""

    def __init__(self, wiring: "Wiring", cache: Any) -> None:
        self.cache = cache  # also keeps the object alive: it is known by its id
        self.positions = 0  # of the block being recorded; 0: not recording
        self.calls: list[Call] = []
        self.wiring = wiring

    def start(self, positions: int) -> None:
        """Record from now on what is run on this cache."""
        self.positions, self.calls = positions, []

    def clear(self) -> None:
        """Stop recording and forget the record."""
        self.positions, self.calls = 0, []

    def replay(self, kept: int) -> bool:
        """Run every recorded call again on its first ``kept`` positions; False where a call cannot be cut."""
        self.positions = 0
        cuts = [(call, call.cut(kept)) for call in self.calls]
        if not cuts or any(arguments is None for _, arguments in cuts):
            return False
        for call, arguments in cuts:
            call.run(self.wiring, arguments or {}, kept)
        return True

    def replay_rows(self, kept: Sequence[int]) -> bool:
        """Run every recorded call again, of sequence s of a batch its first ``kept[s]`` positions.

        Every position is run, but those behind are masked, and the cache's ``lengths`` say where each
        sequence ends: what mlx-lm does with prompts of different lengths.

        Returns:
            False where nothing was recorded, or a module takes no mask.
        """
        positions, self.positions = self.positions, 0
        if not self.calls or not all("mask" in call.arguments.signature.parameters for call in self.calls):
            return False
        ends = mx.array(list(kept), mx.int32)
        mask = mx.arange(positions) < ends[:, None]
        for call in self.calls:
            self.cache.lengths = mx.array(ends)  # the module counts it down
            call.run(self.wiring, {**call.arguments.arguments, "mask": mask}, positions)
        self.cache.lengths = None
        return True


class Wiring:
    """The modules of one model that have been given listening classes; shared by all its users."""

    def __init__(self) -> None:
        self.recorders: dict[int, Recorder] = {}
        self._wired: list[tuple[Any, type]] = []
        self._active: Call | None = None

    @classmethod
    def of(cls, model: Any) -> "Wiring":
        """The wiring of a model, installed if nobody uses it yet; empty if no module takes a cache."""
        mixers = []
        for mixer in _mixers(model):
            found = type(mixer).__dict__.get("cache_wiring")
            if isinstance(found, Wiring):
                return found
            mixers.append(mixer)
        wiring = cls()
        for mixer in mixers:
            wiring._wire(mixer, wiring._listening(type(mixer)))
        for module in {id(m): m for mixer in mixers for m in mixer.modules()}.values():
            if isinstance(module, PROJECTIONS):
                wiring._wire(module, wiring._answering(type(module)))
        return wiring

    def recorder(self, cache: Any) -> Recorder:
        """Listen to what is run on a cache object, until `release`."""
        return self.recorders.setdefault(id(cache), Recorder(self, cache))

    def release(self, caches: Sequence[Any]) -> None:
        """Stop listening to caches; the modules get their classes back when nobody listens any more."""
        for cache in caches:
            self.recorders.pop(id(cache), None)
        if not self.recorders:
            for module, plain in self._wired:
                object.__setattr__(module, "__class__", plain)
            self._wired = []

    def attending(self, call: Call | None) -> "_Attending":
        """Inside the block, projections answer to ``call``."""
        return _Attending(self, call)

    def _wire(self, module: Any, call: Any) -> None:
        plain = type(module)
        body = {"__call__": call, "__module__": plain.__module__, "cache_wiring": self}
        self._wired.append((module, plain))
        object.__setattr__(module, "__class__", type(plain.__name__, (plain,), body))

    def _listening(self, plain: type) -> Any:
        """The call of a module that takes a cache."""
        signature = inspect.signature(plain.__call__)
        place = list(signature.parameters).index("cache") - 1

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            cache = args[place] if len(args) > place else kwargs.get("cache")
            recorder = self.recorders.get(id(cache))
            if recorder is None or not recorder.positions:
                return plain.__call__(module, *args, **kwargs)
            bound = signature.bind(module, *args, **kwargs)
            recorded, outer = Call(module, plain, bound, recorder.positions), self._active
            with self.attending(recorded):
                output = plain.__call__(module, *args, **kwargs)
            if not recorded.is_outer:
                recorder.calls.append(recorded)
            if outer is not None and outer.arguments.arguments.get("cache") is cache:
                outer.is_outer = True
            return output

        call.__signature__ = signature  # type: ignore[attr-defined]  # what `_mixers` looks at
        return call

    def _answering(self, plain: type) -> Any:
        """The call of a projection."""

        def call(module: Any, x: mx.array) -> Any:
            if self._active is None:
                return plain.__call__(module, x)
            return self._active.project(module, plain, x)

        return call


class _Attending:
    """A context: which call projections answer to."""

    def __init__(self, wiring: Wiring, call: Call | None) -> None:
        self._wiring, self._call, self._before = wiring, call, wiring._active

    def __enter__(self) -> None:
        self._wiring._active = self._call

    def __exit__(self, *_: object) -> None:
        self._wiring._active = self._before


def _mixers(model: Any) -> Iterator[Any]:
    """Modules below the decoder layers, or beside them, that are called with a cache."""
    layers = {id(layer) for layer in model.layers}
    for _, module in model.named_modules():
        if id(module) in layers or any(id(inner) in layers for inner in module.modules()):
            continue
        if "cache" in inspect.signature(type(module).__call__).parameters:
            yield module
