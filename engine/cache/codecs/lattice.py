"""Lattice codes: a row is turned by a Hadamard matrix, and its blocks become points of D4 or E8.

    n = |x|,  y = R x / n,  s = max|y| / q,  c = closest point to y / s,     x ≈ n · s · R^T c

n and max|y| are kept in float16. There are two codes. `LatticeCompat` gives what the published codec
(kakeyalattice 1.5.0) gives, to the last bits where the products sum in the same order: points are cut off at
±q after they are found, and coordinates are kept in whole bytes. `LatticePacked` finds the closest point
within bounds, and of a few ranges, max|y| the widest, the one with the least error; it keeps exactly b bits a
coordinate. With few bits cutting off the tails costs less than a coarse grid.

All is computed in float32. A row of zeros is decoded to zeros; rows beyond the range of the two numbers are
made as long as the numbers can say.
"""

from functools import cache
from math import sqrt

import mlx.core as mx

from engine.cache.codecs.base import Parts
from engine.cache.codecs.hadamard import Hadamard
from engine.cache.codecs.lattice_packing import WORD, pack, unpack
from engine.cache.codecs.lattice_points import BLOCK, closest, closest_within
from engine.errors import ConfigurationError

BITS = range(2, 9)
LARGEST_Q = 1023  # float32 rows resolve its steps a hundred times over
SHORTEST = 2.0**-23  # a shorter row is divided by this instead of its length, as in the published codec
LARGEST = 65504.0  # of float16
WHOLE = (1.0,)
SHARES = {2: (1, 0.5, 0.42, 0.35), 3: (1, 0.85, 0.74, 0.64), 4: (1, 0.93, 0.86, 0.8), 5: (1, 0.97, 0.94, 0.9)}
"""Parts of max|y| that are tried as the range, by bits; with more bits none is better than the whole."""
SIDE_BITS = 32  # the two float16 numbers of a row


class LatticeCompat:
    """The published codec's round trip, its coordinates kept in 8 or 16 bits."""

    parts = 2  # coordinates, (n, max|y|)

    def __init__(self, lattice: str, q: int, dim: int) -> None:
        """A code for rows of ``dim`` values.

        Args:
            lattice: ``d4`` or ``e8``.
            q: steps from zero to the largest coordinate of a row, 1 … 1023.
            dim: the head dimension.

        Raises:
            ConfigurationError: no such lattice, q out of range, or a dimension that it cannot turn or cut.
        """
        self.block = _block(lattice, dim)
        if not 1 <= q <= LARGEST_Q:
            raise ConfigurationError(f"the Q of a lattice must lie in 1 to {LARGEST_Q}, not {q}")
        self.lattice, self.q, self.dim = lattice, q, dim
        self._turn = Hadamard(dim)
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
        """See `Codec.decode`."""
        codes, side = parts
        return _restore(self._turn, codes.astype(mx.float32) * self._unit, side, self.q, dtype)

    def bits_per_value(self) -> float:
        """See `Codec.bits_per_value`."""
        return 8 * self._dtype.size + SIDE_BITS / self.dim

    def _rotate(self, unit: mx.array) -> mx.array:
        """The turn in the order of sums of the published codec, where the device sums as it is told.

        That is a matrix product on a CPU, whose library takes up to 192 terms in one go. A last bit decides
        now and then which float16 the largest coordinate becomes, and so about all points of a row.
        """
        matrix = self._matrix
        if matrix is None:
            return self._turn.rotate(unit)
        width = 192 if self.dim > 256 else 128 if self.dim == 256 else self.dim
        turned = unit[..., :width] @ matrix[:width]
        for start in range(width, self.dim, width):
            turned = turned + unit[..., start : start + width] @ matrix[start : start + width]
        return turned


class LatticePacked:
    """Points within ±q, q = 2^(b-1) - 1, those of the half coset within ±(q + ½): b bits a coordinate."""

    parts = 2  # packed coordinates, two numbers whose product is n · max|y|

    def __init__(self, lattice: str, bits: int, dim: int) -> None:
        """A code for rows of ``dim`` values.

        Args:
            lattice: ``d4`` or ``e8``.
            bits: b, 2 … 8.
            dim: the head dimension, a multiple of 8.

        Raises:
            ConfigurationError: no such lattice, bits out of range, or a dimension it cannot turn or pack.
        """
        self.block = _block(lattice, dim)
        if bits not in BITS:
            raise ConfigurationError(f"the bits of a packed lattice must lie in 2 to 8, not {bits}")
        if dim % WORD:
            raise ConfigurationError(f"a head dimension of {dim} cannot be packed: no multiple of {WORD}")
        self.lattice, self.bits, self.dim = lattice, bits, dim
        self.q = 2 ** (bits - 1) - 1
        self._turn = Hadamard(dim)

    def encode(self, rows: mx.array) -> Parts:
        """See `Codec.encode`: uint8 [..., N, D·b/8], and numbers float16 [..., N, 2]."""
        unit, length = _normalise(rows)
        turned = self._turn.rotate(unit)
        # A power of two moves from n to max|y| where n alone would leave the range of float16.
        moved = mx.where(length > 2.0**15, 2.0**-15, mx.where(length < 2.0**-8, 2.0**8, 1.0))
        largest = _largest(turned / moved)
        kept = (largest.astype(mx.float32) * mx.array(SHARES.get(self.bits, WHOLE))).astype(mx.float16)
        codes, is_half, kept = self._best(turned, kept, moved)
        words = codes.reshape(*rows.shape[:-1], self.dim // WORD, WORD)
        return pack(words, self.bits, is_half if self.lattice == "e8" else None), _side(length * moved, kept)

    def _best(self, turned: mx.array, kept: mx.array, moved: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Of the ranges ±kept · moved [..., S] the one whose points are off least, the first if equal.

        Returns:
            Coordinates as by `closest_within` [..., W, n], cosets [..., W, 1], and the range's kept [..., 1].
        """
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
        """See `Codec.decode`."""
        packed, side = parts
        words, is_half = unpack(packed, self.bits, cosets=self.lattice == "e8")
        lowest = mx.array(float(self.q)) if is_half is None else self.q + 0.5 * is_half
        points = (words.astype(mx.float32) - lowest).reshape(*packed.shape[:-1], self.dim)
        return _restore(self._turn, points, side, self.q, dtype)

    def bits_per_value(self) -> float:
        """See `Codec.bits_per_value`."""
        return self.bits + SIDE_BITS / self.dim


def _block(lattice: str, dim: int) -> int:
    """Coordinates of a point of the lattice, which divide the dimension."""
    if lattice not in BLOCK:
        raise ConfigurationError(f"{lattice!r} is no lattice; there are {', '.join(BLOCK)}")
    if dim % BLOCK[lattice]:
        raise ConfigurationError(
            f"a head dimension of {dim} has no whole number of {lattice} blocks of {BLOCK[lattice]}"
        )
    return BLOCK[lattice]


@cache
def _matrix(dim: int) -> mx.array:
    """H / sqrt(D), computed once."""
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
    """The two numbers of a row, float16 [..., 2]."""
    return mx.concatenate([mx.minimum(length, LARGEST).astype(mx.float16), kept], -1)


def _restore(turn: Hadamard, points: mx.array, side: mx.array, q: int, dtype: mx.Dtype) -> mx.array:
    """Rows of their points [..., D] and numbers [..., 2]."""
    side = side.astype(mx.float32)
    rows = turn.unrotate(points * (side[..., 1:] / q)) * side[..., :1]
    if dtype == mx.float16:
        rows = mx.clip(rows, -LARGEST, LARGEST)
    return rows.astype(dtype)
