"""Which keys and values a cache keeps, and how: one text chooses for all layers.

    native                      all the model can see, as it is
    sliding-bounded[:S,W]       sliding layers keep S pinned positions and the last W; full layers everything
    sink-window[:S,W]           every attention layer does, with the true positions
    affine[:BITS,GROUP]         in mlx's affine code, attention on the codes
    rotated[:BITS,GROUP]        likewise, turned by a Hadamard matrix before
    lattice[:d4|e8,Q]           points of a lattice, equal to the published codec; decoded at every read
    lattice-packed[:d4|e8,BITS] points of a lattice in BITS bits a value; decoded at every read
    restored:SOURCE[:S,W]       positions older than the last W are supplied from SOURCE at prefill

    … @LAYERS                   all, full, sliding, inner:N (not the first and last N), or numbers: 2,5 or 2-6

Layers of one kind share a mask in most models, so bounds hold for all layers of a kind or for none.
A layer whose own window is not wider than W keeps that window alone: pinned positions would be more than it
sees. Recurrent layers keep their state under every policy.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from engine.cache.codecs.affine import BITS, GROUPS, Affine, Rotated
from engine.cache.codecs.base import Codec
from engine.cache.codecs.lattice import LatticeCompat, LatticePacked
from engine.cache.coded import CodedKV
from engine.cache.restored import RestoredKV
from engine.cache.ring import SlidingRing
from engine.errors import ConfigurationError

LATTICES = ("d4", "e8")
PACKED_BITS = range(2, 9)
LARGEST_Q = 1023
LARGEST_WINDOW = 2**20
SOURCES = ("exact", "learned", "zeros", "noise")
MEANINGFUL = ("exact", "learned")  # sources of which restoration can be claimed; the others are controls
LAYERS = re.compile(r"all|full|sliding|inner:[0-9]{1,4}|[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*")


@dataclass(frozen=True)
class Kind:
    """One kind of policy.

    Attributes:
        defaults: what its text says where it is left out, after the colon.
        layers: those it applies to by default.
        codec: from the values and a head dimension to the code, for kinds that code.
        attended: attention reads the codes.
    """

    defaults: str
    layers: str
    codec: Callable[[Sequence[str], int], Codec] | None = None
    parts: int = 0
    attended: bool = False


KINDS: dict[str, Kind] = {
    "native": Kind("", "all"),
    "sliding-bounded": Kind("4,64", "sliding"),
    "sink-window": Kind("4,64", "all"),
    "affine": Kind(
        "4,64", "all", lambda v, dim: Affine(int(v[0]), int(v[1]), dim), Affine.parts, attended=True
    ),
    "rotated": Kind(
        "4,64", "all", lambda v, dim: Rotated(int(v[0]), int(v[1]), dim), Rotated.parts, attended=True
    ),
    "lattice": Kind(
        "e8,38", "inner:2", lambda v, dim: LatticeCompat(v[0], int(v[1]), dim), LatticeCompat.parts
    ),
    "lattice-packed": Kind(
        "e8,5", "inner:2", lambda v, dim: LatticePacked(v[0], int(v[1]), dim), LatticePacked.parts
    ),
    "restored": Kind("4,64", "full"),
}
BOUNDED = {"sliding-bounded": ("sliding",), "sink-window": ("all", "full", "sliding")}  # and their layers
BOUNDING = (*BOUNDED, "restored")


@dataclass(frozen=True)
class KVPolicy:
    """A policy as chosen; `parse_policy` makes it.

    Attributes:
        kind: a key of `KINDS`.
        values: what follows the kind, apart: sink and window, bits and group, lattice and its number.
        layers: which attention layers it applies to, as in the text.
        source: what restores evicted positions; None for other kinds.
    """

    kind: str = "native"
    values: tuple[str, ...] = ()
    layers: str = "all"
    source: str | None = None

    @property
    def spec(self) -> str:
        """The whole text, defaults written out."""
        if self.kind == "native":
            return self.kind
        source = f"{self.source}:" if self.source else ""
        return f"{self.kind}:{source}{','.join(self.values)}@{self.layers}"

    @property
    def coded(self) -> bool:
        """Whether keys and values are kept in a code."""
        return KINDS[self.kind].codec is not None

    @property
    def attended(self) -> bool:
        """Whether attention reads codes."""
        return KINDS[self.kind].attended

    @property
    def sink(self) -> int:
        """Pinned positions of a bounding policy."""
        return int(self.values[0])

    @property
    def window(self) -> int:
        """Positions a query sees besides the pinned ones, of a bounding policy."""
        return int(self.values[1])

    def new_caches(self, model: Any, headroom: int) -> list[Any]:
        """Empty caches for one sequence.

        Args:
            model: an mlx-lm language model.
            headroom: the largest block that will be verified.

        Raises:
            ConfigurationError: it names layers the model does not have, or applies to none.
        """
        caches = _native(model, headroom)
        for layer in self._chosen(caches):
            caches[layer] = self._kept(caches[layer], headroom)
        return caches

    def chosen_layers(self, model: Any) -> list[int]:
        """The layers it applies to, counted as the model's caches are; none for the native policy."""
        return self._chosen(_native(model, 1))

    def _chosen(self, caches: Sequence[Any]) -> list[int]:
        """The layers it applies to among native caches.

        Raises:
            ConfigurationError: there are none, or one that is named is no attention layer.
        """
        if self.kind == "native":
            return []
        full = [layer for layer, cache in enumerate(caches) if type(cache) is KVCache]
        sliding = [layer for layer, cache in enumerate(caches) if type(cache) is SlidingRing]
        attending = sorted(full + sliding)
        if self.layers == "all":
            chosen = attending
        elif self.layers == "full":
            chosen = full
        elif self.layers == "sliding":
            chosen = sliding
        elif self.layers.startswith("inner:"):
            outer = min(int(self.layers.removeprefix("inner:")), max(len(attending) - 1, 0) // 2)
            chosen = attending[outer : len(attending) - outer]
        else:
            chosen = _numbers(self.layers)
            if odd := [layer for layer in chosen if layer not in attending]:
                raise ConfigurationError(
                    f"--kv {self.spec}: layer {odd[0]} is no attention layer with a cache of its own; "
                    f"those of this model are {', '.join(map(str, attending))}"
                )
        if self.source is not None and (odd := [layer for layer in chosen if layer in sliding]):
            raise ConfigurationError(
                f"--kv {self.spec}: layer {odd[0]} slides and evicts nothing that could be restored; "
                "use @full"
            )
        if not chosen:
            raise ConfigurationError(f"--kv {self.spec} applies to no layer of this model; use --kv native")
        return chosen

    def _kept(self, cache: Any, headroom: int) -> Any:
        kind = KINDS[self.kind]
        if kind.codec is not None:
            stores = [_like(cache) for _ in range(kind.parts)]
            return CodedKV(self.spec, partial(kind.codec, self.values), stores, attended=kind.attended)
        if self.source is not None:
            return RestoredKV()  # type: ignore[no-untyped-call]
        if type(cache) is SlidingRing and cache.window <= self.window:
            return cache
        return SlidingRing(self.window, headroom, self.sink)


NATIVE = KVPolicy()


def parse_policy(text: str) -> KVPolicy:
    """What a ``--kv`` text says; see the top of this file.

    Raises:
        ConfigurationError: it is no policy; the message says which part, and what it may be.
    """
    body, at, layers = text.partition("@")
    name, colon, rest = body.partition(":")
    if name not in KINDS:
        raise ConfigurationError(f"--kv {text!r}: {name!r} is none of {', '.join(KINDS)}")
    kind, source = KINDS[name], None
    if name == "native":
        if colon or at:
            raise ConfigurationError(f"--kv {text!r}: native takes nothing behind it")
        return NATIVE
    if name == "restored":
        source, colon, rest = rest.partition(":")
        if source not in SOURCES:
            raise ConfigurationError(
                f"--kv {text!r}: {source!r} is no source; restored: takes {', '.join(SOURCES)}"
            )
    values = tuple((rest if colon else kind.defaults).split(","))
    if problem := _problem(name, values):
        raise ConfigurationError(f"--kv {text!r}: {problem}, as in {name}:{_example(name, source)}")
    if at and name in BOUNDED and layers not in BOUNDED[name]:
        raise ConfigurationError(
            f"--kv {text!r}: a model's layers of one kind share a mask, so all of them are bounded or none; "
            f"{name} takes {', '.join('@' + word for word in BOUNDED[name])}, not @{layers}"
        )
    if at and not LAYERS.fullmatch(layers):
        raise ConfigurationError(
            f"--kv {text!r}: {layers!r} names no layers; give all, full, sliding, inner:N, "
            "or numbers such as 2,5 or 2-6"
        )
    return KVPolicy(name, _plain(values), layers if at else kind.layers, source)


def _plain(values: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(int(value)) if value.isdigit() else value for value in values)


def _example(name: str, source: str | None) -> str:
    return f"{source}:{KINDS[name].defaults}" if source else KINDS[name].defaults


def _problem(name: str, values: Sequence[str]) -> str | None:
    """What is wrong with the values of a kind, or None."""
    if len(values) != 2:
        return f"{name} takes two values"
    first, second = values
    lattice = name.startswith("lattice")
    if lattice and first not in LATTICES:
        return f"{first!r} is no lattice; there are {', '.join(LATTICES)}"
    if odd := [value for value in values[lattice:] if not re.fullmatch("[0-9]{1,7}", value)]:
        return f"{odd[0]!r} is no whole number"
    number = int(second)
    if name == "lattice":
        return None if 1 <= number <= LARGEST_Q else f"Q must lie in 1 to {LARGEST_Q}, not {number}"
    if name == "lattice-packed":
        return None if number in PACKED_BITS else f"BITS must lie in 2 to 8, not {number}"
    if name in BOUNDING:
        if not 1 <= number <= LARGEST_WINDOW or int(first) > LARGEST_WINDOW:
            return f"W must lie in 1 to {LARGEST_WINDOW} and S in 0 to that, not {number} and {first}"
        return None
    if int(first) not in BITS:
        return f"BITS must be one of {', '.join(map(str, BITS))}, not {first}"
    return None if number in GROUPS else f"GROUP must be one of {', '.join(map(str, GROUPS))}, not {number}"


def _numbers(text: str) -> list[int]:
    """Layer numbers of a list such as 2,5 or 2-6."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return sorted(found)


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
    """An empty store of the same geometry."""
    if type(cache) is SlidingRing:
        return SlidingRing(cache.window, cache.headroom, cache.sink)
    return KVCache()  # type: ignore[no-untyped-call]
