"""The lattice codes: what they keep, how far they are off, and rows of every kind."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from engine.cache.codecs.affine import Rotated
from engine.cache.codecs.base import Hadamard
from engine.cache.codecs.lattice import LatticeCompat, LatticePacked, unpack
from engine.errors import ConfigurationError

DATA = Path(__file__).parents[3] / "data" / "lattice"
LATTICES = ("d4", "e8")
Code = LatticeCompat | LatticePacked
CODES: dict[str, Callable[[int], Code]] = {
    "compat d4": lambda dim: LatticeCompat("d4", 38, dim),
    "compat e8": lambda dim: LatticeCompat("e8", 38, dim),
    "packed d4": lambda dim: LatticePacked("d4", 5, dim),
    "packed e8": lambda dim: LatticePacked("e8", 5, dim),
}
code = pytest.mark.parametrize("make", CODES.values(), ids=CODES.keys())


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def off(found: mx.array, rows: mx.array) -> float:
    """Relative squared error over all rows."""
    rows = rows.astype(mx.float32)
    return (mx.sum(mx.square(found.astype(mx.float32) - rows)) / mx.sum(mx.square(rows))).item()


def coded(codec: Code | Rotated, rows: mx.array, dtype: mx.Dtype = mx.float32) -> mx.array:
    return codec.decode(codec.encode(rows), dtype)


@code
@pytest.mark.parametrize("dim", [8, 64, 80, 96, 112, 128, 192, 256])
def test_what_is_kept_is_as_many_bits_as_are_said(make: Callable[[int], Code], dim: int):
    codec = make(dim)
    rows = normal(2, 3, 5, dim)
    parts = codec.encode(rows)
    assert len(parts) == codec.parts == 2
    assert all(part.shape[:-1] == rows.shape[:-1] for part in parts)
    assert (parts[1].dtype, parts[1].shape[-1]) == (mx.float16, 2)
    assert 8 * sum(part.nbytes for part in parts) == pytest.approx(codec.bits_per_value() * rows.size)
    found = codec.decode(parts, mx.float32)
    assert found.shape == rows.shape
    assert off(found, rows) < 0.01


@pytest.mark.parametrize("lattice", LATTICES)
@pytest.mark.parametrize("bits", range(2, 9))
def test_packed_points_take_exactly_b_bytes_for_eight_values(lattice: str, bits: int):
    codec = LatticePacked(lattice, bits, 128)
    packed, _ = codec.encode(normal(2, 7, 128))
    assert (packed.dtype, packed.shape) == (mx.uint8, (2, 7, 16 * bits))
    assert codec.bits_per_value() == bits + 32 / 128


@pytest.mark.parametrize(
    ("lattice", "q", "dtype"),
    [
        ("d4", 127, mx.int8),
        ("d4", 128, mx.int16),
        ("e8", 63, mx.int8),
        ("e8", 64, mx.int16),
        ("e8", 1023, mx.int16),
    ],
)
def test_published_points_take_a_byte_where_it_suffices(lattice: str, q: int, dtype: mx.Dtype):
    codec = LatticeCompat(lattice, q, 64)
    rows = normal(50, 64)
    points, _ = codec.encode(rows)
    assert points.dtype == dtype
    assert np.abs(np.array(points).astype(int)).max() == q * (2 if lattice == "e8" else 1)
    assert off(coded(codec, rows), rows) < 2e-4


@pytest.mark.parametrize("name", ["lattice_codec", "seed_1", "seed_2"])
def test_published_round_trips_to_the_last_bits(name: str):
    """Of a row's largest value, not of its own: sums differ in their last bits."""
    with np.load(DATA / f"{name}.npz") as stored:
        arrays = dict(stored)
    for entry, reference in arrays.items():
        if entry.startswith("x_"):
            continue
        lattice, q, dim = entry.split("_")
        found = np.array(coded(LatticeCompat(lattice, int(q[1:]), int(dim)), mx.array(arrays[f"x_{dim}"])))
        apart = np.abs(found - reference).max(-1) / np.maximum(np.abs(reference).max(-1), 1e-30)
        assert (apart < 4e-6).mean() > 0.99, entry


@pytest.mark.parametrize("name", ["compat e8", "packed e8"])
def test_compiled_and_one_by_one_the_code_is_the_same(name: str):
    codec = CODES[name](64)
    rows = normal(20, 64)
    parts = codec.encode(rows)
    for kept, compiled in zip(parts, mx.compile(codec.encode)(rows), strict=True):
        assert mx.array_equal(kept, compiled)
    decode = mx.compile(lambda *kept: codec.decode(kept, mx.float32))
    assert mx.allclose(decode(*parts), codec.decode(parts, mx.float32), atol=1e-5)


@code
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_every_type_is_coded_in_float32(make: Callable[[int], Code], dtype: mx.Dtype):
    codec = make(128)
    rows = normal(30, 128).astype(dtype)
    for kept, wide in zip(codec.encode(rows), codec.encode(rows.astype(mx.float32)), strict=True):
        assert mx.array_equal(kept, wide)
    found = coded(codec, rows, dtype)
    assert found.dtype == dtype
    assert off(found, rows) < 0.005


@pytest.mark.parametrize("dim", [64, 80])
@code
def test_no_rows_are_decoded_to_none(make: Callable[[int], Code], dim: int):
    codec = make(dim)
    parts = tuple(part[:, :, :0] for part in codec.encode(normal(1, 2, 3, dim)))
    assert codec.decode(parts, mx.float32).shape == (1, 2, 0, dim)


@code
def test_zero_stays_zero(make: Callable[[int], Code]):
    found = coded(make(64), mx.zeros((3, 64)))
    assert mx.array_equal(found, mx.zeros((3, 64)))


@code
@pytest.mark.parametrize("length", [1e-38, 1e-30, 1e-12, 1e-6, 1e-3, 1.0, 1e4, 6e4, 1e6, 1e12, 1e20, 3e38])
def test_rows_of_any_length_are_finite_and_none_grows(make: Callable[[int], Code], length: float):
    rows = normal(6, 64)
    rows = rows / mx.max(mx.abs(rows)) * length
    for dtype in (mx.float32, mx.float16):
        found = coded(make(64), rows, dtype).astype(mx.float32)
        assert mx.all(mx.isfinite(found)).item()
        size, ours = (np.sqrt(np.square(np.array(x).astype(np.float64)).sum(-1)) for x in (rows, found))
        assert (ours <= 1.3 * size).all()


@pytest.mark.parametrize("lattice", LATTICES)
@pytest.mark.parametrize("length", [1e-6, 1e-4, 0.01, 1.0, 3e4, 1e5, 1e7, 5e8])
def test_packed_rows_beyond_float16_keep_their_length(lattice: str, length: float):
    rows = normal(40, 128)
    rows = rows / mx.linalg.norm(rows, axis=-1, keepdims=True) * length
    assert off(coded(LatticePacked(lattice, 6, 128), rows), rows) < 0.002


def test_published_rows_beyond_float16_are_as_long_as_it_can_say():
    rows = mx.zeros((1, 64))
    rows[0, 0] = 1e6
    found = coded(LatticeCompat("e8", 38, 64), rows)
    assert mx.allclose(found[0, 0], mx.array(65504.0), rtol=1e-3)


@pytest.mark.parametrize("row", ["single", "constant", "alternating", "channels"])
@code
def test_rows_that_a_rotation_makes_extreme_are_coded_well(make: Callable[[int], Code], row: str):
    values = {
        "single": np.eye(128)[5] * 40,
        "constant": np.full(128, 3.0),
        "alternating": np.where(np.arange(128) % 2, 1.0, -1.0),
        "channels": np.random.default_rng(0).standard_normal(128) * np.where(np.arange(128) % 40, 1, 60),
    }[row]
    rows = mx.array(values[None].astype(np.float32))
    assert off(coded(make(128), rows), rows) < 0.01


@pytest.mark.parametrize("lattice", LATTICES)
@pytest.mark.parametrize("bits", range(2, 9))
def test_every_packed_point_is_of_the_lattice_also_with_heavy_tails(lattice: str, bits: int):
    codec = LatticePacked(lattice, bits, 64)
    rows = mx.array(np.random.default_rng(bits).standard_t(1, (200, 64)).astype(np.float32))
    # As if already turned, so that the tails stay heavy.
    packed, _ = codec.encode(Hadamard(64).unrotate(rows))
    words, is_half = unpack(packed, bits, cosets=lattice == "e8")
    points = np.array(words).astype(int) - codec.q
    doubled = 2 * points - (0 if is_half is None else np.array(is_half))
    blocks = doubled.reshape(-1, codec.block)
    assert (blocks.sum(-1) % 4 == 0).all()
    assert (blocks % 2 == blocks[:, :1] % 2).all()
    assert (np.abs(blocks).max(-1) <= 2 * codec.q + blocks[:, 0] % 2).all()


@pytest.mark.parametrize("bits", [6, 7, 8])
def test_what_was_decoded_is_coded_to_itself(bits: int):
    """But for a last place of its two numbers. The largest value of a row is a whole coordinate in D4."""
    codec = LatticePacked("d4", bits, 128)
    once = coded(codec, normal(100, 128))
    assert off(coded(codec, once), once) < 1e-6


@pytest.mark.parametrize("lattice", LATTICES)
@pytest.mark.parametrize("bits", range(2, 9))
def test_coding_again_loses_less_than_coding_once(lattice: str, bits: int):
    codec, rows = LatticePacked(lattice, bits, 128), normal(200, 128)
    once = coded(codec, rows)
    assert off(coded(codec, once), once) < off(once, rows)


@pytest.mark.parametrize("lattice", LATTICES)
def test_more_bits_are_nearer(lattice: str):
    rows = normal(200, 128)
    errors = [off(coded(LatticePacked(lattice, bits, 128), rows), rows) for bits in range(2, 9)]
    assert all(after < before / 3 for before, after in pairwise(errors))


@pytest.mark.parametrize(
    ("bits", "least", "most"), [(2, 0.6, 0.7), (3, 0.75, 0.85), (4, 0.88, 0.94), (5, 0.95, 1.0)]
)
def test_few_packed_e8_bits_beat_as_many_rotated_ones_on_normal_rows(bits: int, least: float, most: float):
    rows = normal(1500, 128)
    packed, rotated = LatticePacked("e8", bits, 128), Rotated(bits, 128, 128)
    assert packed.bits_per_value() == rotated.bits_per_value()
    assert least < off(coded(packed, rows), rows) / off(coded(rotated, rows), rows) < most


def test_six_packed_e8_bits_do_not_beat_six_rotated_ones():
    rows = normal(1500, 128)
    packed, rotated = (off(coded(c, rows), rows) for c in (LatticePacked("e8", 6, 128), Rotated(6, 128, 128)))
    assert rotated < packed < 1.1 * rotated


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LatticeCompat("e7", 38, 64), "'e7' is no lattice; there are d4, e8"),
        (lambda: LatticePacked("E8", 5, 64), "'E8' is no lattice"),
        (lambda: LatticeCompat("e8", 0, 64), "Q of a lattice must lie in 1 to 1023, not 0"),
        (lambda: LatticeCompat("d4", 1024, 64), "not 1024"),
        (lambda: LatticePacked("e8", 1, 64), "bits of a packed lattice must lie in 2 to 8, not 1"),
        (lambda: LatticePacked("d4", 9, 64), "not 9"),
        (lambda: LatticeCompat("e8", 38, 12), "dimension of 12 has no whole number of e8 blocks of 8"),
        (lambda: LatticePacked("d4", 5, 12), "dimension of 12 cannot be packed"),
        (lambda: LatticePacked("e8", 5, 72), "dimension of 72 cannot be rotated"),
        (lambda: LatticeCompat("d4", 38, 120), "dimension of 120 cannot be rotated"),
    ],
)
def test_what_there_is_no_code_for_is_refused(make: Callable[[], Code], message: str):
    with pytest.raises(ConfigurationError, match=message):
        make()
