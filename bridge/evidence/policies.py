"""KV policies as arms declare them: the text, which caches it may hold, and how many bits a value can take.

The grammar is the engine's `--kv`, read here again so that a report cannot declare what no engine knows:

    native | sliding-bounded[:S,W] | sink-window[:S,W] | affine[:BITS,GROUP] | rotated[:BITS,GROUP]
    lattice[:d4|e8,Q] | lattice-packed[:d4|e8,BITS] | restored:exact|learned|zeros|noise[:S,W]

each but the first perhaps followed by @ and layers: all, full, sliding, inner:N, or numbers such as 2,5-7.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

# Cache classes of a native arm: mlx-lm's own, the engine's ring, which holds the same entries as mlx-lm's
# rotating cache but can be rolled back, and the engine's batch of either.
FULL, BATCHED = frozenset({"KVCache"}), frozenset({"RaggedKV"})
SLIDING = frozenset({"RotatingKVCache", "SlidingRing"})
NATIVE_CLASSES = FULL | SLIDING | BATCHED | {"ChunkedKVCache", "ArraysCache", "CacheList"}
CODED, RESTORED = "CodedKV", "RestoredKV"

SOURCES = ("exact", "learned", "zeros", "noise")
AFFINE_BITS, GROUPS, PACKED_BITS = (2, 3, 4, 5, 6, 8), (32, 64, 128), tuple(range(2, 9))
LARGEST_Q, LARGEST_WINDOW = 1023, 2**20
LONGEST_LAYERS = 400  # characters: every one of a hundred layers by its number fits
_NUMBER = "[0-9]{1,7}"
_RANGE = "[0-9]{1,4}(?:-[0-9]{1,4})?"
_LAYERS = re.compile(rf"all|full|sliding|inner:[0-9]{{1,4}}|{_RANGE}(?:,{_RANGE})*", re.ASCII)
_PAIR = re.compile(rf"({_NUMBER}),({_NUMBER})", re.ASCII)
_LATTICE = re.compile(rf"(d4|e8),({_NUMBER})", re.ASCII)

# kind -> (what is left out after the colon, the layers)
_DEFAULTS = {
    "sliding-bounded": ("4,64", "sliding"),
    "sink-window": ("4,64", "all"),
    "affine": ("4,64", "all"),
    "rotated": ("4,64", "all"),
    "lattice": ("e8,38", "inner:2"),
    "lattice-packed": ("e8,5", "inner:2"),
    "restored": ("4,64", "full"),
}
# Layers of one kind share a mask: these kinds take no others.
_BOUNDED = {"sliding-bounded": ("sliding",), "sink-window": ("all", "full", "sliding")}
_CODED_KINDS = frozenset({"affine", "rotated", "lattice", "lattice-packed"})


@dataclass(frozen=True)
class KVPolicy:
    """A KV policy, every default written out; `source` restores evicted positions."""

    kind: str
    values: tuple[str, ...] = ()
    layers: str = "all"
    source: str | None = None

    @property
    def coded(self) -> bool:
        """Whether keys and values are kept in a code."""
        return self.kind in _CODED_KINDS

    @property
    def span(self) -> int:
        """Positions of the sink and window that layers keep, restored ones left out; 0 where unbounded."""
        return sum(map(int, self.values)) if self.kind in _BOUNDED or self.source is not None else 0

    @property
    def bound(self) -> int | None:
        """The most positions that a query may see in a layer it applies to; None where nothing is bounded."""
        return self.span if self.kind in _BOUNDED else None

    def may_apply(self, index: int, kind: str) -> bool:
        """Whether it may apply to a layer, by its index and its kind: ``full``, ``sliding`` or ``other``."""
        if self.kind == "native" or kind == "other":
            return False
        if self.numbers is not None:
            return index in self.numbers
        # Which layers are the inner ones depends on those that attend.
        return self.layers.startswith("inner:") or self.layers in ("all", kind)

    @property
    def classes(self) -> frozenset[str]:
        """The cache classes an arm of this policy may hold."""
        return NATIVE_CLASSES | ({CODED} if self.coded else {RESTORED} if self.source else set())

    @property
    def needed(self) -> frozenset[str]:
        """Classes; it must hold one of them, or the policy was not in use. Empty for ``native``."""
        if self.kind == "native" or self.coded:
            return frozenset({CODED} if self.coded else ())
        return BATCHED | {RESTORED if self.source else "SlidingRing"}

    @property
    def replaced(self) -> frozenset[str]:
        """The native classes that none of its layers can have left, by the layers it names."""
        if self.kind in ("native", "sliding-bounded"):
            return frozenset()
        named = {"all": FULL | SLIDING | BATCHED, "full": FULL, "sliding": SLIDING}.get(
            self.layers, frozenset()
        )
        return named if self.coded else named & FULL  # a narrow ring stays itself

    @cached_property
    def numbers(self) -> frozenset[int] | None:
        """The layers, where they are named by number."""
        if not self.layers[0].isdigit():
            return None
        spans = [part.partition("-") for part in self.layers.split(",")]
        return frozenset(n for first, _, last in spans for n in range(int(first), int(last or first) + 1))

    @property
    def stored_bits(self) -> tuple[float, float]:
        """The fewest and the most bits that a held value can take, side information included.

        affine, rotated: B for the value, and a scale and a bias of 16 bits for 32 values to a group.
        lattice-packed: B, and two scalars of 16 bits a vector of 8 to 4096 values.
        lattice: what tells 2 q + 1 levels of a lattice apart (D4 has half a point a unit, so a quarter of a
        bit less), up to 16 bits and the two scalars.
        Others hold plain numbers of 16 or 32 bits.
        """
        if not self.coded:
            return 16.0, 32.0
        first, number = self.values[0], int(self.values[1])
        if self.kind == "lattice":
            return math.log2(2 * number) - 0.25, 16 + 32 / 8
        if self.kind == "lattice-packed":
            return number + 32 / 4096, number + 32 / 8
        return int(first) + 32 / number, int(first) + 32 / GROUPS[0]


NATIVE = KVPolicy("native")


@lru_cache(maxsize=256)
def parse_policy(text: str) -> KVPolicy | None:
    """What a declared ``kv`` says, or None where it is no policy."""
    if text == "native":
        return NATIVE
    body, at, layers = text.partition("@")
    kind, colon, rest = body.partition(":")
    if kind not in _DEFAULTS or (at and layers not in _BOUNDED.get(kind, (layers,))):
        return None
    if at and (len(layers) > LONGEST_LAYERS or not _LAYERS.fullmatch(layers)):
        return None
    source: str | None = None
    if kind == "restored":
        source, colon, rest = rest.partition(":")
        if source not in SOURCES:
            return None
    values, everywhere = _DEFAULTS[kind]
    read = _values(kind, rest if colon else values)
    return None if read is None else KVPolicy(kind, read, layers if at else everywhere, source)


def _values(kind: str, text: str) -> tuple[str, str] | None:
    """The two values of a kind, numbers in their shortest form, or None where they are out of bounds."""
    lattice = kind.startswith("lattice")
    found = (_LATTICE if lattice else _PAIR).fullmatch(text)
    if found is None:
        return None
    first, number = found[1] if lattice else str(int(found[1])), int(found[2])
    if kind == "lattice":
        possible = 1 <= number <= LARGEST_Q
    elif kind == "lattice-packed":
        possible = number in PACKED_BITS
    elif kind in _CODED_KINDS:
        possible = int(first) in AFFINE_BITS and number in GROUPS
    else:
        possible = int(first) <= LARGEST_WINDOW and 1 <= number <= LARGEST_WINDOW
    return (first, str(number)) if possible else None
