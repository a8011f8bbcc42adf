"""KV policies as `--kv` and a report's arms write them, the caches each may hold, the bits a value may take.

native                      all the model can see, as it is
full-kv                     sliding layers keep all positions, out of their window hidden from the queries
sliding-bounded[:S,W]       sliding layers keep S pinned positions and the last W; full layers everything
sink-window[:S,W]           every attention layer does, with the true positions
affine[:BITS,GROUP]         in mlx's affine code, attention on the codes
rotated[:BITS,GROUP]        likewise, turned by a Hadamard matrix before
lattice[:d4|e8,Q]           points of a lattice, equal to the published codec; decoded at every read
lattice-packed[:d4|e8,BITS] points of a lattice in BITS bits a value; decoded at every read
auto[:BITS]                 rotated, each layer's keys and values with bits of their own, BITS on average
restored:SOURCE[:S,W]       positions older than the last W are supplied from SOURCE at prefill

BITS and Q of codes         one number, or K/V: K for keys, V for values, as in rotated:8/4,64
… @LAYERS                   all, full, sliding, inner:N (not the first and last N), or numbers: 2,5 or 2-6
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

# Cache classes of a native arm: mlx-lm's own, the engine's ring, which holds the same entries as mlx-lm's
# rotating cache but can be rolled back, and the engine's batch of either.
FULL, BATCHED = frozenset({"KVCache"}), frozenset({"RaggedKV"})
SLIDING = frozenset({"RotatingKVCache", "SlidingRing"})
NATIVE_CLASSES = FULL | SLIDING | BATCHED | {"ChunkedKVCache", "ArraysCache", "CacheList"}
CODED, RESTORED, WINDOWED = "CodedKV", "RestoredKV", "WindowedKV"
FULL_KV = "full-kv"

SOURCES = ("exact", "learned", "zeros", "noise")
MEANINGFUL = ("exact", "learned")  # sources whose restoration can be claimed; the others are controls
AFFINE_BITS, GROUPS, LATTICES = (2, 3, 4, 5, 6, 8), (32, 64, 128), ("d4", "e8")
AUTO_BITS, AUTO_GROUP = range(2, 9), 64
LARGEST_WINDOW = 2**20
LONGEST_LAYERS = 400  # characters: every one of a hundred layers by its number fits
_NUMBER = "(?:0|[1-9][0-9]{0,3})"  # no zeros in front: one way to write a policy
_RANGE = f"{_NUMBER}(?:-{_NUMBER})?"
LAYERS = re.compile(rf"all|full|sliding|inner:{_NUMBER}|{_RANGE}(?:,{_RANGE})*")
_BOUND = (("S", range(LARGEST_WINDOW + 1)), ("W", range(1, LARGEST_WINDOW + 1)))
_AFFINE = (("BITS", AFFINE_BITS), ("GROUP", GROUPS))
_LATTICE = ("LATTICE", LATTICES)

# kind -> (what is left out after the colon, the layers, what its values may be)
KINDS: dict[str, tuple[str, str, tuple[tuple[str, Sequence[object]], ...]]] = {
    "native": ("", "all", ()),
    FULL_KV: ("", "sliding", ()),
    "sliding-bounded": ("4,64", "sliding", _BOUND),
    "sink-window": ("4,64", "all", _BOUND),
    "affine": ("4,64", "all", _AFFINE),
    "rotated": ("4,64", "all", _AFFINE),
    "lattice": ("e8,38", "inner:2", (_LATTICE, ("Q", range(1, 1024)))),
    "lattice-packed": ("e8,5", "inner:2", (_LATTICE, ("BITS", range(2, 9)))),
    "auto": ("4", "inner:2", (("BITS", AUTO_BITS),)),
    "restored": ("4,64", "full", _BOUND),
}
# Layers of one kind share a mask in most models: bounds hold for all layers of a kind or for none.
BOUNDED = {"sliding-bounded": ("sliding",), "sink-window": ("all", "full", "sliding")}
CODES = frozenset({"affine", "rotated", "lattice", "lattice-packed", "auto"})
SIDED = frozenset({"BITS", "Q"})  # values of codes that keys and values may have of their own


class PolicyFault(ValueError):
    """A text is no KV policy; the message says which part, and what it may be."""


@dataclass(frozen=True)
class PolicySpec:
    """A KV policy, every default written out; `source` restores evicted positions."""

    kind: str = "native"
    values: tuple[str, ...] = ()
    layers: str = "all"
    source: str | None = None

    @property
    def spec(self) -> str:
        """The whole text, defaults written out."""
        if not self.values:
            return self.kind
        source = f"{self.source}:" if self.source else ""
        return f"{self.kind}:{source}{','.join(self.values)}@{self.layers}"

    @property
    def coded(self) -> bool:
        """Whether keys and values are kept in a code."""
        return self.kind in CODES

    @property
    def sink(self) -> int:
        """Pinned positions of a bounding policy."""
        return int(self.values[0])

    @property
    def window(self) -> int:
        """Positions that a query sees besides the pinned ones, of a bounding policy."""
        return int(self.values[1])

    @property
    def span(self) -> int:
        """Positions of the sink and window that layers keep, restored ones left out; 0 where unbounded."""
        return self.sink + self.window if self.kind in BOUNDED or self.source is not None else 0

    @property
    def bound(self) -> int | None:
        """The most positions that a query may see in a layer it applies to; None where nothing is bounded."""
        return self.span if self.kind in BOUNDED else None

    def fewest_positions(self, length: int, seen: int) -> int:
        """The fewest of ``length`` positions that a layer it applies to keeps; ``seen`` natively."""
        if self.kind == FULL_KV:
            return length
        return min(seen, self.span - 1) if self.span else seen

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
        return NATIVE_CLASSES | self._own

    @property
    def needed(self) -> frozenset[str]:
        """Classes; it must hold one of them, or the policy was not in use. Empty for ``native``."""
        if self.kind == "native" or self.coded:
            return self._own
        return BATCHED | (self._own or {"SlidingRing"})

    @property
    def _own(self) -> frozenset[str]:
        """The class that only caches of such a policy have."""
        if self.kind == FULL_KV:
            return frozenset({WINDOWED})
        return frozenset({CODED} if self.coded else {RESTORED} if self.source else ())

    @property
    def replaced(self) -> frozenset[str]:
        """The native classes that none of its layers can have left, by the layers it names."""
        if self.kind in ("native", "sliding-bounded"):
            return frozenset()
        named = {"all": FULL | SLIDING | BATCHED, "full": FULL, "sliding": SLIDING}.get(
            self.layers, frozenset()
        )
        return named if self.coded or self.kind == FULL_KV else named & FULL  # a narrow ring stays itself

    @cached_property
    def numbers(self) -> frozenset[int] | None:
        """The layers, where they are named by number."""
        if not self.layers[0].isdigit():
            return None
        spans = [part.partition("-") for part in self.layers.split(",")]
        return frozenset(n for first, _, last in spans for n in range(int(first), int(last or first) + 1))

    @property
    def sides(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The values that hold for keys, and those for values; they differ where one is written K/V."""
        pairs = [(each.partition("/")[0], each.rpartition("/")[2]) for each in self.values]
        return tuple(first for first, _ in pairs), tuple(last for _, last in pairs)

    @property
    def stored_bits(self) -> tuple[float, float]:
        """The fewest and the most bits that a held value can take, side information included.

        Keys and values with bits of their own are as many, so it is the mean.
        """
        (low, high), (other_low, other_high) = self.side_bits
        return (low + other_low) / 2, (high + other_high) / 2

    @property
    def most_exact(self) -> tuple[float, float]:
        """Bits a value of keys, and of values, at which a code of the policy errs least."""
        if self.kind == "auto":
            return (AFFINE_BITS[-1] + 32 / GROUPS[0],) * 2
        (keys, _), (values, _) = self.side_bits
        return keys, values

    @property
    def side_bits(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """The fewest and the most bits that a held key can take, and a held value.

        auto: BITS, or less by what no layer can use, with scales and biases as `rotated`.
        affine, rotated: B for the value, and a scale and a bias of 16 bits for 32 values to a group.
        lattice-packed: B, and two scalars of 16 bits a vector of 8 to 4096 values.
        lattice: what tells 2 q + 1 levels of a lattice apart (D4 has half a point a unit, so a quarter of a
        bit less), up to 16 bits and the two scalars.
        Others hold plain numbers of 16 or 32 bits.
        """
        keys, values = self.sides
        return self._bits(keys), self._bits(values)

    def _bits(self, values: Sequence[str]) -> tuple[float, float]:
        if not self.coded:
            return 16.0, 32.0
        if self.kind == "auto":
            bits = int(values[0])
            return max(each for each in AFFINE_BITS if each <= bits) + 32 / AUTO_GROUP, bits + 32 / GROUPS[0]
        first, number = values[0], int(values[1])
        if self.kind == "lattice":
            return math.log2(2 * number) - 0.25, 16 + 32 / 8
        if self.kind == "lattice-packed":
            return number + 32 / 4096, number + 32 / 8
        return int(first) + 32 / number, int(first) + 32 / GROUPS[0]


NATIVE = PolicySpec()


@lru_cache(maxsize=256)
def policy_of(text: str) -> PolicySpec | None:
    """What a declared ``kv`` says, or None where it is no policy."""
    try:
        return parse_policy(text)
    except PolicyFault:
        return None


def parse_policy(text: str) -> PolicySpec:
    """What a text says; PolicyFault where it is no policy."""
    body, at, layers = text.partition("@")
    kind, colon, rest = body.partition(":")
    if kind not in KINDS:
        raise PolicyFault(f"{kind!r} is none of {', '.join(KINDS)}")
    if not KINDS[kind][2]:
        if colon or at:
            raise PolicyFault(f"{kind} takes nothing behind it")
        return PolicySpec(kind, (), KINDS[kind][1])
    source: str | None = None
    if kind == "restored":
        source, colon, rest = rest.partition(":")
        if source not in SOURCES:
            raise PolicyFault(f"{source!r} is no source; restored: takes {', '.join(SOURCES)}")
    defaults, everywhere, allowed = KINDS[kind]
    values = (rest if colon else defaults).split(",")
    if problem := _problem(values, allowed):
        raise PolicyFault(f"{problem}, as in {kind}:{f'{source}:' if source else ''}{defaults}")
    if at and kind in BOUNDED and layers not in BOUNDED[kind]:
        words = ", ".join(f"@{word}" for word in BOUNDED[kind])
        raise PolicyFault(
            "a model's layers of one kind share a mask, so all of them are bounded or none;"
            f" {kind} takes {words}, not @{layers}"
        )
    if at and (len(layers) > LONGEST_LAYERS or not LAYERS.fullmatch(layers)):
        raise PolicyFault(
            f"{layers!r} names no layers; give all, full, sliding, inner:N, or numbers such as 2,5 or 2-6"
        )
    return PolicySpec(kind, tuple(map(_shortest, values)), layers if at else everywhere, source)


def _shortest(value: str) -> str:
    parts = [str(int(part)) if part.isdigit() else part for part in value.split("/")]
    return "/".join(dict.fromkeys(parts))


def _problem(values: Sequence[str], allowed: Sequence[tuple[str, Sequence[object]]]) -> str | None:
    """What is wrong with the values of a kind, or None."""
    if len(values) != len(allowed):
        return f"it takes {'two values' if len(allowed) == 2 else 'one value'}"
    for value, (name, among) in zip(values, allowed, strict=True):
        if among is LATTICES:
            if value not in LATTICES:
                return f"{value!r} is no lattice; there are {', '.join(LATTICES)}"
            continue
        parts = value.split("/") if name in SIDED and len(allowed) == 2 else [value]
        if len(parts) > 2:
            return f"{value!r} is neither a number nor two, of keys and of values"
        for part in parts:
            if not re.fullmatch("[0-9]{1,7}", part):
                return f"{part!r} is no whole number"
            if int(part) not in among:
                is_range = isinstance(among, range)
                choice = f"{among[0]} to {among[-1]}" if is_range else ", ".join(map(str, among))
                return f"{name} must be one of {choice}, not {int(part)}"
    return None
