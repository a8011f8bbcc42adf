"""Affine codes: groups of neighbouring values share a scale and a bias, each value is a small integer.

    value ≈ scale · code + bias,   0 ≤ code < 2^bits        (mlx's own layout and products, in 16 bits)

`Rotated` turns the rows by an orthonormal Hadamard matrix R first. Products survive the turn: (R q)·(R k) =
q·k, and what is mixed from turned values is turned back once. Attention therefore reads the codes themselves.
"""

from collections.abc import Callable

import mlx.core as mx

from engine.cache.codecs.base import Hadamard, Parts, within_range
from engine.errors import ConfigurationError

GROUPS = (32, 64, 128)


class Affine:
    """mlx's affine code over the values as they are."""

    parts = 3  # codes, scales, biases

    def __init__(self, bits: int, group: int, dim: int) -> None:
        """Code rows of ``dim`` values in 2, 3, 4, 5, 6 or 8 bits, in the largest of `GROUPS` to ``group``."""
        sizes = [size for size in GROUPS if size <= group]
        fitting = [size for size in sizes if dim % size == 0]
        if not fitting:
            none = f"none of {', '.join(map(str, sizes))} divides it"
            text = f"a head dimension of {dim} cannot be quantized in groups of {group}: {none}"
            raise ConfigurationError(text)
        self.bits, self.group, self.dim = bits, max(fitting), dim

    def encode(self, rows: mx.array) -> Parts:
        wide = rows.astype(mx.float32) if rows.dtype == mx.float16 else rows  # a group's range may not fit
        codes, scales, biases = mx.quantize(wide, group_size=self.group, bits=self.bits)
        return codes, _short(scales), _short(biases)

    def decode(self, parts: Parts, dtype: mx.Dtype) -> mx.array:
        codes, *sides = parts
        wide = mx.float32 if dtype == mx.float16 else dtype
        scales, biases = (side.astype(wide) for side in sides)
        rows = mx.dequantize(codes, scales, biases, group_size=self.group, bits=self.bits)
        return within_range(rows, dtype)

    def bits_per_value(self) -> float:
        return self.bits + 32 / self.group

    def score(self, queries: mx.array, keys: Parts) -> mx.array:
        """Products of queries [B, KV heads, M, D] and coded keys [B, KV heads, S, D], [B, KV heads, M, S]."""
        return self._product(queries, keys, transpose=True)

    def mix(self, weights: mx.array, values: Parts) -> mx.array:
        """Coded values [B, KV heads, S, D] summed with weights [B, KV heads, M, S], [B, KV heads, M, D]."""
        return self._product(weights, values, transpose=False)

    def _product(self, left: mx.array, parts: Parts, *, transpose: bool) -> mx.array:
        codes, *sides = parts
        scales, biases = (side.astype(left.dtype) for side in sides)
        return mx.quantized_matmul(
            left, codes, scales, biases, transpose=transpose, group_size=self.group, bits=self.bits
        )


class Rotated(Affine):
    """The affine code over rows turned by a Hadamard matrix."""

    def __init__(self, bits: int, group: int, dim: int) -> None:
        super().__init__(bits, group, dim)
        self._turn = Hadamard(dim)

    def encode(self, rows: mx.array) -> Parts:
        turned = self._turn.rotate(rows.astype(mx.float32))
        return super().encode(turned if rows.dtype == mx.float16 else turned.astype(rows.dtype))

    def decode(self, parts: Parts, dtype: mx.Dtype) -> mx.array:
        return _turned(super().decode(parts, dtype), self._turn.unrotate)

    def score(self, queries: mx.array, keys: Parts) -> mx.array:
        return super().score(_turned(queries, self._turn.rotate), keys)

    def mix(self, weights: mx.array, values: Parts) -> mx.array:
        return _turned(super().mix(weights, values), self._turn.unrotate)


def _turned(rows: mx.array, turn: Callable[[mx.array], mx.array]) -> mx.array:
    """Turn rows in float32: the sums on the way would leave the range of float16."""
    return within_range(turn(rows.astype(mx.float32)), rows.dtype)


def _short(side: mx.array) -> mx.array:
    return side if side.dtype == mx.bfloat16 else within_range(side, mx.float16)
