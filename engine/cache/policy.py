"""The caches that a KV policy makes of a model's own; `evidence_format.policies` has the grammar of `--kv`.

A layer whose own window is not wider than W keeps that window alone: pinned positions would be more than it
sees. Recurrent layers keep their state under every policy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from engine.cache.codecs.affine import Affine, Rotated
from engine.cache.codecs.base import Codec
from engine.cache.codecs.lattice import LatticeCompat, LatticePacked
from engine.cache.coded import CodedKV
from engine.cache.ring import SlidingRing, WindowedKV, layout
from engine.errors import ConfigurationError
from evidence_format import policies


@dataclass(frozen=True)
class Code:
    """A kind that codes: from the values and a head dimension to the code; whether attention reads codes."""

    codec: Callable[[Sequence[str], int], Codec]
    parts: int
    attended: bool = False


CODES = {
    "affine": Code(lambda v, dim: Affine(int(v[0]), int(v[1]), dim), Affine.parts, attended=True),
    "rotated": Code(lambda v, dim: Rotated(int(v[0]), int(v[1]), dim), Rotated.parts, attended=True),
    "lattice": Code(lambda v, dim: LatticeCompat(v[0], int(v[1]), dim), LatticeCompat.parts),
    "lattice-packed": Code(lambda v, dim: LatticePacked(v[0], int(v[1]), dim), LatticePacked.parts),
    "auto": Code(lambda v, dim: Rotated(int(v[0]), policies.AUTO_GROUP, dim), Rotated.parts, attended=True),
}


class RestoredKV(KVCache):
    """A full attention layer whose old rows are supplied afterwards by `engine.restoration`."""

    replaced = 0  # positions, so far

    def overwrite(self, start: int, keys: mx.array, values: mx.array) -> None:
        """Replace the rows from position ``start`` on by others [1, KV heads, N, head dim], keys rotated."""
        stop = start + keys.shape[2]
        if start < 0 or stop > self.offset:
            raise ValueError(f"positions {start} to {stop - 1} cannot be replaced: {self.offset} are held")
        buffers: tuple[Any, Any] = (self.keys, self.values)
        for buffer, rows in zip(buffers, (keys, values), strict=True):
            buffer[..., start:stop, :] = rows.astype(buffer.dtype)
        self.replaced += stop - start


@dataclass(frozen=True)
class KVPolicy(policies.PolicySpec):
    """A policy that makes caches; `parse_policy` makes it.

    ``layer_bits`` of ``auto``: layer, bits of its keys, of its values, from `engine.cache.auto`. Where
    nothing was measured, as for a model without weights, all layers have BITS, which are as many bytes.
    """

    layer_bits: tuple[tuple[int, int, int], ...] = field(default=(), compare=False)

    @property
    def bits_text(self) -> str:
        """``layer_bits`` as reports and JSON lines have them: LAYER:K/V for each layer."""
        return " ".join(f"{layer}:{keys}/{values}" for layer, keys, values in self.layer_bits)

    @property
    def codecs(self) -> tuple[Callable[[int], Codec], ...]:
        """What makes the codes of keys and of values from a head dimension; none where nothing is coded."""
        code = CODES.get(self.kind)
        return tuple(partial(code.codec, values) for values in self.sides) if code else ()

    @property
    def attended(self) -> bool:
        return self.coded and CODES[self.kind].attended

    def new_caches(self, model: Any, headroom: int) -> list[Any]:
        """See `engine.cache.transaction.new_caches`; ConfigurationError where it applies to no such layer."""
        caches = _native(model, headroom)
        own = {layer: _rotated(keys, values) for layer, keys, values in self.layer_bits}
        for layer in self._chosen(caches):
            caches[layer] = own.get(layer, self)._kept(caches[layer], headroom)
        return caches

    def chosen_layers(self, model: Any) -> list[int]:
        """The layers it applies to, counted as the model's caches are; none for the native policy."""
        return self._chosen(_native(model, 1))

    def _chosen(self, caches: Sequence[Any]) -> list[int]:
        if self.kind == "native":
            return []
        full = [layer for layer, cache in enumerate(caches) if type(cache) is KVCache]
        sliding = [layer for layer, cache in enumerate(caches) if type(cache) is SlidingRing]
        attending = sorted(full + sliding)
        if self.layers.startswith("inner:"):
            outer = min(int(self.layers.removeprefix("inner:")), max(len(attending) - 1, 0) // 2)
            chosen = attending[outer : len(attending) - outer]
        elif self.numbers is None:
            chosen = {"all": attending, "full": full, "sliding": sliding}[self.layers]
        else:
            chosen = sorted(self.numbers)
            if odd := [layer for layer in chosen if layer not in attending]:
                text = f"--kv {self.spec}: layer {odd[0]} is no attention layer with a cache of its own"
                raise ConfigurationError(f"{text}; those of this model are {', '.join(map(str, attending))}")
        if self.source is not None and (odd := [layer for layer in chosen if layer in sliding]):
            text = f"layer {odd[0]} slides and evicts nothing that could be restored; use @full"
            raise ConfigurationError(f"--kv {self.spec}: {text}")
        if not chosen:
            raise ConfigurationError(f"--kv {self.spec} applies to no layer of this model; use --kv native")
        return chosen

    def _kept(self, cache: Any, headroom: int) -> Any:
        if code := CODES.get(self.kind):
            stores = [_like(cache) for _ in range(code.parts)]
            return CodedKV(self.spec, self.codecs, stores, attended=code.attended)
        if self.kind == policies.FULL_KV:
            return WindowedKV(cache.window, cache.sink)
        if self.source is not None:
            return RestoredKV()  # type: ignore[no-untyped-call]
        if type(cache) is SlidingRing and cache.window <= self.window:
            return cache
        return SlidingRing(self.window, headroom, self.sink)


def _rotated(keys: int, values: int) -> KVPolicy:
    return parse_policy(f"rotated:{keys}/{values},{policies.AUTO_GROUP}")


NATIVE = KVPolicy()


def parse_policy(text: str, option: str = "--kv") -> KVPolicy:
    """What the text of an option says; ConfigurationError where it is no policy."""
    try:
        read = policies.parse_policy(text)
    except policies.PolicyFault as fault:
        raise ConfigurationError(f"{option} {text!r}: {fault}") from None
    return KVPolicy(read.kind, read.values, read.layers, read.source)


def _native(model: Any, headroom: int) -> list[Any]:
    return [_with_rings(cache, headroom) for cache in make_prompt_cache(model)]


def _with_rings(cache: Any, headroom: int) -> Any:
    """Our rings in place of mlx-lm's rotating caches, which cannot be rolled back."""
    if type(cache) is RotatingKVCache:
        return SlidingRing(cache.max_size - cache.keep, headroom, cache.keep)
    if type(cache) is CacheList:
        cache.caches = tuple(_with_rings(inner, headroom) for inner in cache.caches)
    return cache


def _like(cache: Any) -> Any:
    return SlidingRing(*layout(cache)) if type(cache) is SlidingRing else KVCache()  # type: ignore[no-untyped-call]
