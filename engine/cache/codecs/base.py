"""What a code for keys and values has to offer. Which codes there are is in `engine.cache.policy`.

A code turns rows of D values into a few arrays of fewer bytes. It is made for one head dimension. Nothing in
it may wait for the device or depend on values on the host: codes are written inside compiled graphs.
"""

from typing import Protocol

import mlx.core as mx

Parts = tuple[mx.array, ...]
"""A code's arrays, each [..., N, own width], as many for every row."""


class Codec(Protocol):
    """A code for rows of one dimension."""

    parts: int
    """Arrays a row is turned into."""
    dim: int
    """D, the head dimension it is made for."""

    def encode(self, rows: mx.array) -> Parts:
        """Rows [..., N, D] to parts, each [..., N, w]."""

    def decode(self, parts: Parts, dtype: mx.Dtype) -> mx.array:
        """Parts back to rows [..., N, D], which differ from those encoded by the code's error."""

    def bits_per_value(self) -> float:
        """Stored bits for each of the D values, side information included."""


class AttendedCodec(Codec, Protocol):
    """A code whose rows attention reads as they are stored: no decoded copy is made of them."""

    def score(self, queries: mx.array, keys: Parts) -> mx.array:
        """Products of queries [B, KV heads, M, D] and coded keys [B, KV heads, S, D], [B, KV heads, M, S]."""

    def mix(self, weights: mx.array, values: Parts) -> mx.array:
        """Coded values [B, KV heads, S, D] summed with weights [B, KV heads, M, S], [B, KV heads, M, D]."""


class CodedRows:
    """Rows as a cache hands them to attention, still in code; see `engine.target.attention`."""

    def __init__(self, codec: AttendedCodec, parts: Parts) -> None:
        self.codec, self.parts = codec, parts

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first part: batch, KV heads and rows are those of the rows, the last one is the code's."""
        return tuple(self.parts[0].shape)
