"""What codes for keys and values have in common. Which codes there are is in `engine.cache.policy`.

A code turns rows of D values into a few arrays of fewer bytes. Nothing in it may wait for the device or
depend on values read back from it: codes are written inside compiled graphs.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any, Protocol

import mlx.core as mx

from engine.errors import ConfigurationError

ORDERS = (1, 12, 20, 28)
SYMMETRIC = (1, 12)
LARGEST_DIM = 4096
LARGEST = 65504.0  # of float16

Parts = tuple[mx.array, ...]  # a code's arrays, each [..., N, own width]


class Codec(Protocol):
    """A code for rows of one dimension."""

    parts: int  # arrays a row is turned into
    dim: int  # D, the head dimension it is made for

    def encode(self, rows: mx.array) -> Parts:
        """Rows [..., N, D] to parts, each [..., N, w]."""

    def decode(self, parts: Parts, dtype: mx.Dtype) -> mx.array:
        """Parts back to rows [..., N, D], which differ from those encoded by the code's error."""

    def bits_per_value(self) -> float:
        """Stored bits for each of the D values, side information included."""


@dataclass(frozen=True)
class CodedRows:
    """Rows as a cache hands them to attention, which reads them as they are stored."""

    codec: Any  # one with `score` and `mix`, see `engine.cache.codecs.affine`
    parts: Parts

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parts[0].shape)  # batch, KV heads and rows are right, the last is the code's


class Hadamard:
    """The orthonormal rotation y = x · H^T / sqrt(D) of one dimension D = m · 2^k, 4 … 4096.

    H is a Hadamard matrix of order m times Sylvester's of order 2^k, as in `mx.hadamard_transform`. For m = 1
    and 12 it is symmetric and the rotation its own inverse. Other dimensions are refused: on a CPU mlx 0.32
    either returns something that is no rotation (36) or writes past its memory (120). A matrix product would
    be quicker on some CPUs, but on a GPU mlx may round the factors of float32 products to ten bits.
    """

    def __init__(self, dim: int) -> None:
        self.dim, self.order = dim, _order(dim)

    def rotate(self, rows: mx.array) -> mx.array:
        """Rotate rows [..., D], in their own type; lengths are kept."""
        if rows.size == 0:  # which mlx refuses
            return rows
        return mx.hadamard_transform(rows, scale=1 / sqrt(self.dim))

    def unrotate(self, rows: mx.array) -> mx.array:
        if self.order in SYMMETRIC:
            return self.rotate(rows)
        inner = self.rotate(rows.reshape(*rows.shape[:-1], self.order, self.dim // self.order))
        # The transform of the identity holds the columns of H as rows: H^T, here over the factor of order m.
        transposed = mx.hadamard_transform(mx.eye(self.order, dtype=rows.dtype), scale=1.0)
        return (transposed @ inner).reshape(rows.shape)


def _order(dim: int) -> int:
    for order in ORDERS:
        factor, rest = divmod(dim, order)
        if rest == 0 and 4 <= dim <= LARGEST_DIM and factor & (factor - 1) == 0:
            return order
    known = f"m one of {', '.join(map(str, ORDERS))} (such as 64, 80, 96, 112, 128, 160, 192, 256)"
    raise ConfigurationError(
        f"a dimension of {dim} cannot be rotated: only m * 2^k up to {LARGEST_DIM}, {known}"
    )


def within_range(rows: mx.array, dtype: mx.Dtype) -> mx.array:
    """Rows in a type; beyond the range of float16 they are cut off, not infinite."""
    return mx.clip(rows, -LARGEST, LARGEST).astype(dtype) if dtype == mx.float16 else rows.astype(dtype)
