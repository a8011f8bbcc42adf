"""Lattice codes: a row is turned by a Hadamard matrix, and its blocks become points of D4 or E8.

    n = |x|,  y = R x / n,  s = max|y| / q,  c = closest point to y / s,     x ≈ n · s · R^T c

n and max|y| are kept in float16; all is computed in float32.

    D_n = {x in Z^n: the sum of x is even}        E8 = D8 and D8 + ½ together

The closest point of D_n rounds every coordinate; where the sum comes out odd, the coordinate that was
rounded furthest goes the other way (Conway and Sloane, "Fast quantizing and decoding algorithms for lattice
quantizers and codes", 1982). The closest point of E8 is the nearer of those of its two cosets, on a tie the
integer one. Cutting such a point off at a bound afterwards leaves the lattice: `closest_within` cuts off
first and then turns the coordinate that costs least among those that may turn.
"""

from functools import cache
from math import sqrt

import mlx.core as mx

from engine.cache.codecs.base import LARGEST, Hadamard, Parts, within_range
from engine.errors import ConfigurationError

BLOCK = {"d4": 4, "e8": 8}  # coordinates of a point
WORD = 8  # coordinates of a word, and its bytes before it is cut
BITS = range(2, 9)
LARGEST_Q = 1023  # float32 rows resolve its steps a hundred times over
SHORTEST = 2.0**-23  # a shorter row is divided by this instead of its length, as in the published codec
# Parts of max|y| that are tried as the range, by bits; with more bits none is better than the whole.
SHARES = {2: (1, 0.5, 0.42, 0.35), 3: (1, 0.85, 0.74, 0.64), 4: (1, 0.93, 0.86, 0.8), 5: (1, 0.97, 0.94, 0.9)}
SIDE_BITS = 32  # the two float16 numbers of a row


class _Lattice:
    parts = 2  # coordinates, and two float16 numbers whose product is n · max|y|
    q: int

    def __init__(self, lattice: str, dim: int) -> None:
        if lattice not in BLOCK:
            raise ConfigurationError(f"{lattice!r} is no lattice; there are {', '.join(BLOCK)}")
        self.lattice, self.block, self.dim = lattice, BLOCK[lattice], dim
        if dim % self.block:
            text = f"a head dimension of {dim} has no whole number of {lattice} blocks of {self.block}"
            raise ConfigurationError(text)
        self._turn = Hadamard(dim)

    def _restored(self, points: mx.array, side: mx.array, dtype: mx.Dtype) -> mx.array:
        side = side.astype(mx.float32)
        rows = self._turn.unrotate(points * (side[..., 1:] / self.q)) * side[..., :1]
        return within_range(rows, dtype)


class LatticeCompat(_Lattice):
    """The round trip of the published codec (kakeyalattice 1.5.0), coordinates kept in 8 or 16 bits.

    It is that to the last bits where the products sum in the same order; points are cut off at ±q afterwards.
    """

    def __init__(self, lattice: str, q: int, dim: int) -> None:
        """Code rows of ``dim`` values, ``q`` steps from zero to the largest coordinate of a row."""
        super().__init__(lattice, dim)
        if not 1 <= q <= LARGEST_Q:
            raise ConfigurationError(f"the Q of a lattice must lie in 1 to {LARGEST_Q}, not {q}")
        self.q = q
        self._matrix = _matrix(dim) if mx.default_device() == mx.cpu else None
        self._unit = 0.5 if lattice == "e8" else 1.0  # coordinates are whole multiples of it
        self._dtype = mx.int8 if q / self._unit <= 127 else mx.int16

    def encode(self, rows: mx.array) -> Parts:
        """See `Codec.encode`: coordinates [..., N, D] in their unit, and numbers float16 [..., N, 2]."""
        unit, length = _normalise(rows)
        turned = self._rotate(unit)
        largest = _largest(turned)
        scale = largest.astype(mx.float32) / self.q
        blocks = (turned / scale).reshape(*rows.shape[:-1], self.dim // self.block, self.block)
        points = mx.clip(closest(self.lattice, blocks), -self.q, self.q)
        return (points / self._unit).reshape(rows.shape).astype(self._dtype), _side(length, largest)

    def decode(self, parts: Parts, dtype: mx.Dtype) -> mx.array:
        codes, side = parts
        return self._restored(codes.astype(mx.float32) * self._unit, side, dtype)

    def bits_per_value(self) -> float:
        return 8 * self._dtype.size + SIDE_BITS / self.dim

    def _rotate(self, unit: mx.array) -> mx.array:
        """On a CPU, a product that sums as the published codec does: its library, up to 192 terms in one go.

        A last bit now and then decides which float16 the largest coordinate becomes, so all points of a row.
        """
        matrix = self._matrix
        if matrix is None:
            return self._turn.rotate(unit)
        width = 192 if self.dim > 256 else 128 if self.dim == 256 else self.dim
        turned = unit[..., :width] @ matrix[:width]
        for start in range(width, self.dim, width):
            turned = turned + unit[..., start : start + width] @ matrix[start : start + width]
        return turned


class LatticePacked(_Lattice):
    """Points within ±q, q = 2^(b-1) - 1, those of the half coset within ±(q + ½): b bits a coordinate.

    Of a few ranges, max|y| the widest, that of the least error is kept: with few bits, cutting off the tails
    costs less than a coarse grid.
    """

    def __init__(self, lattice: str, bits: int, dim: int) -> None:
        super().__init__(lattice, dim)
        if bits not in BITS:
            raise ConfigurationError(f"the bits of a packed lattice must lie in 2 to 8, not {bits}")
        if dim % WORD:
            raise ConfigurationError(f"a head dimension of {dim} cannot be packed: no multiple of {WORD}")
        self.bits, self.q = bits, 2 ** (bits - 1) - 1

    def encode(self, rows: mx.array) -> Parts:
        """See `Codec.encode`: uint8 [..., N, D·b/8], and numbers float16 [..., N, 2]."""
        unit, length = _normalise(rows)
        turned = self._turn.rotate(unit)
        # A power of two moves from n to max|y| where n alone would leave the range of float16.
        moved = mx.where(length > 2.0**15, 2.0**-15, mx.where(length < 2.0**-8, 2.0**8, 1.0))
        largest = _largest(turned / moved)
        kept = (largest.astype(mx.float32) * mx.array(SHARES.get(self.bits, (1.0,)))).astype(mx.float16)
        codes, is_half, kept = self._best(turned, kept, moved)
        words = codes.reshape(*rows.shape[:-1], self.dim // WORD, WORD)
        return pack(words, self.bits, is_half if self.lattice == "e8" else None), _side(length * moved, kept)

    def _best(self, turned: mx.array, kept: mx.array, moved: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """The range ±kept · moved [..., S] of least error: coordinates [..., W, n], cosets, kept [..., 1]."""
        scale = (kept.astype(mx.float32) * moved / self.q)[..., None]
        ranges = kept.shape[-1]
        blocks = mx.expand_dims(turned, -2) / scale
        blocks = blocks.reshape(*turned.shape[:-1], ranges, self.dim // self.block, self.block)
        codes, is_half = closest_within(self.lattice, blocks, self.q)
        rest = mx.square(blocks - (codes - (self.q + 0.5 * is_half)))
        error = mx.sum(rest, (-2, -1)) * mx.square(scale.squeeze(-1))
        best = mx.argmin(error, -1, keepdims=True)
        codes = mx.take_along_axis(codes, best[..., None, None], -3).squeeze(-3)
        is_half = mx.take_along_axis(is_half, best[..., None, None], -3).squeeze(-3)
        return codes, is_half, mx.take_along_axis(kept, best, -1)

    def decode(self, parts: Parts, dtype: mx.Dtype) -> mx.array:
        packed, side = parts
        words, is_half = unpack(packed, self.bits, cosets=self.lattice == "e8")
        lowest = mx.array(float(self.q)) if is_half is None else self.q + 0.5 * is_half
        points = (words.astype(mx.float32) - lowest).reshape(*packed.shape[:-1], self.dim)
        return self._restored(points, side, dtype)

    def bits_per_value(self) -> float:
        return self.bits + SIDE_BITS / self.dim


@cache
def _matrix(dim: int) -> mx.array:
    matrix = mx.hadamard_transform(mx.eye(dim), scale=1.0) / mx.array(sqrt(dim))
    mx.eval(matrix)
    return matrix


def _normalise(rows: mx.array) -> tuple[mx.array, mx.array]:
    """Rows of length 1 and their lengths [..., 1], in float32.

    Squares are summed in eight lanes, and those from the first to the last: the published codec's order.
    """
    rows = rows.astype(mx.float32)
    # Beyond 2^60 squares would overflow; a power of two changes nothing else.
    shrink = mx.where(mx.max(mx.abs(rows), -1, keepdims=True) > 2.0**60, 2.0**-80, 1.0)
    rows = rows * shrink
    squares = mx.square(rows)
    lanes = 8 if rows.shape[-1] % 8 == 0 else 4
    sums = mx.sum(squares.reshape(*rows.shape[:-1], rows.shape[-1] // lanes, lanes), -2)
    total = sums[..., :1]
    for lane in range(1, lanes):
        total = total + sums[..., lane : lane + 1]
    length = mx.maximum(mx.sqrt(total), SHORTEST)
    return rows / length, length / shrink


def _largest(turned: mx.array) -> mx.array:
    """max|y| of rows as it is kept, float16 [..., 1]."""
    return mx.maximum(mx.max(mx.abs(turned), -1, keepdims=True), SHORTEST).astype(mx.float16)


def _side(length: mx.array, kept: mx.array) -> mx.array:
    return mx.concatenate([mx.minimum(length, LARGEST).astype(mx.float16), kept], -1)


def closest(lattice: str, values: mx.array) -> mx.array:
    """Closest points of a lattice to float32 values [..., n], n its block."""
    if lattice == "d4":
        return _closest_even(values)
    whole = _closest_even(values)
    half = _closest_even(values - 0.5) + 0.5
    nearer = _squared(values - whole) <= _squared(values - half)
    return mx.where(nearer, whole, half)


def closest_within(lattice: str, values: mx.array, bound: int) -> tuple[mx.array, mx.array]:
    """Closest points to float32 values [..., n] with coordinates within ±q, in the half coset ±(q + ½):
    their coordinates less the lowest of their coset, float32 [..., n], and whether it is the half one.
    """
    whole = _even_within(values, -bound, bound)
    if lattice == "d4":
        return whole + bound, mx.zeros((*values.shape[:-1], 1), dtype=mx.bool_)
    shifted = values - 0.5
    half = _even_within(shifted, -bound - 1, bound)
    is_half = _squared(shifted - half) < _squared(values - whole)
    return mx.where(is_half, half + (bound + 1), whole + bound), is_half


def _closest_even(values: mx.array) -> mx.array:
    """Closest points of D_n, as far from the origin as need be."""
    near = mx.round(values)
    rest = values - near
    turned = near + mx.where(rest >= 0, 1.0, -1.0)
    return mx.where(_is_odd(near) & _first(mx.argmax(mx.abs(rest), -1, keepdims=True), rest), turned, near)


def _even_within(values: mx.array, low: int, high: int) -> mx.array:
    """Closest points of D_n with coordinates low … high, both in Z."""
    near = mx.clip(mx.round(values), low, high)
    rest = values - near
    # A step of ±1 away from the rounded coordinate makes its squared error 1 ∓ 2·rest larger.
    up = mx.where(near < high, 1 - 2 * rest, mx.inf)
    down = mx.where(near > low, 1 + 2 * rest, mx.inf)
    turned = near + mx.where(up <= down, 1.0, -1.0)
    cheapest = _first(mx.argmin(mx.minimum(up, down), -1, keepdims=True), rest)
    return mx.where(_is_odd(near) & cheapest, turned, near)


def _is_odd(points: mx.array) -> mx.array:
    total = mx.sum(points, -1, keepdims=True)
    return total != 2 * mx.round(total / 2)


def _first(index: mx.array, values: mx.array) -> mx.array:
    """An index [..., 1] along the last axis of values as bool [..., n]."""
    return mx.arange(values.shape[-1], dtype=index.dtype) == index


def _squared(difference: mx.array) -> mx.array:
    return mx.sum(mx.square(difference), -1, keepdims=True)


def pack(codes: mx.array, bits: int, is_half: mx.array | None = None) -> mx.array:
    """Pack coordinates 0 … 2^b - 1 [..., W, 8] to uint8 [..., W·b]; for E8, is_half is bool [..., W, 1].

    A word is u0 | u1 << b | … | u7 << 7b; of its 64 bits the b low bytes are kept.
    The coordinates of an E8 point, counted from the lowest of its coset, have an even sum: the lowest bit of
    the last one follows from those of the other seven, and the coset is kept in its place.
    """
    codes = codes.astype(mx.uint64)
    word = codes[..., :1]
    for place in range(1, WORD):
        word = word | (codes[..., place : place + 1] << _number(place * bits))
    if is_half is not None:
        spare = (WORD - 1) * bits
        word = (word & ~_number(1 << spare)) | (is_half.astype(mx.uint64) << _number(spare))
    kept = word.view(mx.uint8)[..., :bits]
    return kept.reshape(*kept.shape[:-2], kept.shape[-2] * bits)


def unpack(packed: mx.array, bits: int, *, cosets: bool) -> tuple[mx.array, mx.array | None]:
    """The coordinates uint64 [..., W, 8] and, with ``cosets``, `is_half`, of what `pack` gave."""
    kept = packed.reshape(*packed.shape[:-1], packed.shape[-1] // bits, bits)
    word = mx.pad(kept, [(0, 0)] * (kept.ndim - 1) + [(0, WORD - bits)]).view(mx.uint64)
    is_half = None
    if cosets:
        spare = (WORD - 1) * bits
        coset = word >> _number(spare) & _number(1)
        is_half = coset.astype(mx.bool_)
        parity = word & _number(sum(1 << place * bits for place in range(WORD - 1)))
        for step in (4, 2, 1):  # fold the seven lowest bits onto the first
            parity = parity ^ (parity >> _number(step * bits))
        word = word ^ (((parity ^ coset) & _number(1)) << _number(spare))
    shifts = mx.arange(0, WORD * bits, bits, dtype=mx.uint64)
    return word >> shifts & _number((1 << bits) - 1), is_half


def _number(value: int) -> mx.array:
    return mx.array(value, dtype=mx.uint64)
