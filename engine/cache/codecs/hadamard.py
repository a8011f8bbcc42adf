"""Hadamard rotation of the rows of a key or value: what a few large coordinates hold is spread over all.

    y = x · H^T / sqrt(D)        H: ±1, D × D, H · H^T = D · I

A dimension is m · 2^k: H is a Hadamard matrix of order m times Sylvester's of order 2^k, as in
`mx.hadamard_transform`. For m = 1 and 12 the matrix is symmetric and the rotation its own inverse; for 20 and
28 it is neither. Other dimensions are refused here: on a CPU mlx 0.32 either returns something that is no
rotation (36) or writes past its memory (120). A matrix product would be quicker on some CPUs, but on a GPU
mlx may round the factors of float32 products to ten bits.
"""

from math import sqrt

import mlx.core as mx

from engine.errors import ConfigurationError

ORDERS = (1, 12, 20, 28)
SYMMETRIC = (1, 12)
LARGEST = 4096


class Hadamard:
    """The orthonormal rotation of one dimension.

    Args:
        dim: D, 4 … 4096.

    Raises:
        ConfigurationError: the dimension is not m · 2^k with m in 1, 12, 20, 28.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.order = _order(dim)
        self._scale = 1 / sqrt(dim)

    def rotate(self, rows: mx.array) -> mx.array:
        """Rotate rows [..., D], in their own type; lengths are kept."""
        return self._transform(rows)

    def unrotate(self, rows: mx.array) -> mx.array:
        """Take a rotation of rows [..., D] back."""
        if self.order in SYMMETRIC:
            return self._transform(rows)
        inner = self._transform(rows.reshape(*rows.shape[:-1], self.order, self.dim // self.order))
        # The transform of the identity holds the columns of H as rows: H^T, here over the factor of order m.
        transposed = mx.hadamard_transform(mx.eye(self.order, dtype=rows.dtype), scale=1.0)
        return (transposed @ inner).reshape(rows.shape)

    def _transform(self, rows: mx.array) -> mx.array:
        if rows.size == 0:  # which mlx refuses
            return rows
        return mx.hadamard_transform(rows, scale=self._scale)


def _order(dim: int) -> int:
    """The m of dim = m · 2^k."""
    for order in ORDERS:
        factor, rest = divmod(dim, order)
        if rest == 0 and 4 <= dim <= LARGEST and factor & (factor - 1) == 0:
            return order
    raise ConfigurationError(
        f"a dimension of {dim} cannot be rotated: only m * 2^k up to {LARGEST}, m one of "
        f"{', '.join(map(str, ORDERS))} (such as 64, 80, 96, 112, 128, 160, 192, 256)"
    )
