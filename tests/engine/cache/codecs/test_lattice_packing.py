"""Packing: exactly b bytes to eight coordinates, and every point of the lattice comes back."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.codecs.lattice import pack, unpack


@given(st.integers(2, 8), st.booleans(), st.integers(0, 2**31), st.integers(1, 5))
def test_coordinates_and_cosets_come_back_from_b_bytes(bits: int, cosets: bool, seed: int, words: int):
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 2**bits, (2, 3, words, 8))
    codes[0, 0] = 2**bits - 1
    is_half = None
    if cosets:  # their sums are even
        codes[..., 2] ^= codes.sum(-1) & 1
        is_half = mx.array(generator.integers(0, 2, (2, 3, words, 1)).astype(bool))
    packed = pack(mx.array(codes.astype(np.float32)), bits, is_half)
    assert (packed.dtype, packed.shape) == (mx.uint8, (2, 3, words * bits))
    assert packed.nbytes * 8 == codes.size * bits
    found, coset = unpack(packed, bits, cosets=cosets)
    assert np.array_equal(np.array(found), codes)
    assert (coset is None) == (is_half is None)
    if coset is not None:
        assert np.array_equal(np.array(coset), np.array(is_half))


@pytest.mark.parametrize("bits", range(2, 9))
def test_coordinate_after_coordinate_from_the_lowest_bit(bits: int):
    codes = np.random.default_rng(bits).integers(0, 2**bits, 8)
    word = sum(int(code) << place * bits for place, code in enumerate(codes))
    packed = np.array(pack(mx.array(codes[None].astype(np.int32)), bits))
    assert packed.tobytes() == word.to_bytes(bits, "little")
