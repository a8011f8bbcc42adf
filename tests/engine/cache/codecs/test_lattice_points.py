"""Closest points of D4 and E8: of the lattice, within their bounds, and none is nearer."""

from __future__ import annotations

from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.codecs.lattice import BLOCK, closest, closest_within

LATTICES = tuple(BLOCK)
SPREADS = (0.05, 0.6, 1.0, 3.0)


def is_of(lattice: str, points: np.ndarray) -> np.ndarray:
    """Whether each point [..., n] is one of the lattice."""
    whole = (points == np.round(points)).all(-1)
    half = (points - 0.5 == np.round(points - 0.5)).all(-1) & (lattice == "e8")
    return (whole & (points.sum(-1) % 2 == 0)) | (half & (points.sum(-1) % 2 == 0))


def blocks(lattice: str, seed: int, spread: float, count: int = 256) -> np.ndarray:
    """Values with heavy tails, some of them exactly between two points."""
    generator = np.random.default_rng(seed)
    values = spread * generator.standard_t(1.5, (count, BLOCK[lattice]))
    values[count // 2 :: 4] = np.round(values[count // 2 :: 4] * 4) / 4
    return np.clip(values, -1e5, 1e5).astype(np.float32)


def least(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Least squared distance [N] to points with coordinates low … high, whose whole parts have an even sum.

    Coordinate by coordinate: the least for an even and for an odd sum so far.
    """
    steps = np.arange(low, high + 1)
    odd = np.floor(steps).astype(int) % 2 == 1
    even_so_far, odd_so_far = np.zeros(len(values)), np.full(len(values), np.inf)
    for column in values.astype(np.float64).T:
        squared = (column[:, None] - steps) ** 2
        even, uneven = squared[:, ~odd].min(-1), squared[:, odd].min(-1)
        even_so_far, odd_so_far = (
            np.minimum(even_so_far + even, odd_so_far + uneven),
            np.minimum(even_so_far + uneven, odd_so_far + even),
        )
    return even_so_far


def least_of(lattice: str, values: np.ndarray, bound: int) -> np.ndarray:
    whole = least(values, -bound, bound)
    return whole if lattice == "d4" else np.minimum(whole, least(values, -bound - 0.5, bound + 0.5))


def within(lattice: str, values: np.ndarray, bound: int) -> tuple[np.ndarray, np.ndarray]:
    """Points and codes."""
    codes, is_half = (np.array(part) for part in closest_within(lattice, mx.array(values), bound))
    return codes - bound - 0.5 * is_half, codes


@pytest.mark.parametrize(("lattice", "bound"), [("d4", 1), ("d4", 3), ("e8", 1)])
def test_the_coordinatewise_least_distance_is_that_of_all_points_tried(lattice: str, bound: int):
    values = blocks(lattice, 3, 1.0, 24)
    axes = [np.arange(-bound, bound + 1)]
    if lattice == "e8":
        axes.append(np.arange(-bound - 0.5, bound + 1))
    best = np.full(len(values), np.inf)
    for axis in axes:
        points = np.array(list(product(axis, repeat=BLOCK[lattice])))
        points = points[is_of(lattice, points)]
        distances = ((values[:, None].astype(np.float64) - points) ** 2).sum(-1)
        best = np.minimum(best, distances.min(-1))
    assert np.allclose(least_of(lattice, values, bound), best)


@given(st.sampled_from(LATTICES), st.integers(1, 127), st.integers(0, 2**31), st.sampled_from(SPREADS))
def test_bounded_points_are_of_the_lattice_in_range_and_none_is_nearer(
    lattice: str, bound: int, seed: int, spread: float
):
    values = blocks(lattice, seed, spread * bound)
    points, codes = within(lattice, values, bound)
    assert is_of(lattice, points).all()
    half = points[:, 0] != np.round(points[:, 0])
    assert (np.abs(points).max(-1) <= bound + 0.5 * half).all()
    assert codes.min() >= 0
    assert codes.max() <= 2 * bound + 1
    distance = ((values.astype(np.float64) - points) ** 2).sum(-1)
    assert (distance <= least_of(lattice, values, bound) * (1 + 1e-5) + 1e-5).all()


def test_cutting_off_afterwards_leaves_the_lattice_on_heavy_tails():
    """What the bounded search is for."""
    values = blocks("e8", 0, 3.0)
    cut = np.clip(np.array(closest("e8", mx.array(values))), -3, 3)
    assert not is_of("e8", cut).all()
    assert is_of("e8", within("e8", values, 3)[0]).all()


@settings(max_examples=20)
@given(st.sampled_from(LATTICES), st.integers(0, 2**31), st.sampled_from(SPREADS))
def test_unbounded_points_are_of_the_lattice_and_none_is_nearer(lattice: str, seed: int, spread: float):
    values = np.clip(blocks(lattice, seed, spread), -40, 40)
    points = np.array(closest(lattice, mx.array(values)))
    assert is_of(lattice, points).all()
    distance = ((values.astype(np.float64) - points) ** 2).sum(-1)
    assert (distance <= least_of(lattice, values, 50) + 1e-4).all()


def test_between_the_cosets_the_integer_one_is_taken():
    values = mx.full((1, 8), 0.25)
    assert closest("e8", values).tolist() == [[0.0] * 8]
    codes, is_half = closest_within("e8", values, 3)
    assert (codes.tolist(), is_half.tolist()) == ([[3.0] * 8], [[False]])


@pytest.mark.parametrize("lattice", LATTICES)
def test_points_of_the_lattice_are_their_own_closest(lattice: str):
    values = blocks(lattice, 11, 4.0)
    points = within(lattice, values, 7)[0]
    assert np.array_equal(within(lattice, points.astype(np.float32), 7)[0], points)
    assert np.array_equal(np.array(closest(lattice, mx.array(points.astype(np.float32)))), points)
