"""The Hadamard rotation: orthonormal, undone exactly, and refused where there is none."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine.cache.codecs.base import Hadamard
from engine.errors import ConfigurationError

DIMS = (4, 8, 12, 16, 24, 32, 40, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 1024)


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("dim", DIMS)
def test_a_rotation_is_a_hadamard_matrix_and_is_taken_back(dim: int):
    turn = Hadamard(dim)
    matrix = np.array(turn.rotate(mx.eye(dim)))
    assert np.allclose(np.abs(matrix), dim**-0.5, atol=1e-6)
    assert np.allclose(matrix @ matrix.T, np.eye(dim), atol=1e-5)
    rows = mx.random.normal((2, 3, 5, dim), key=mx.random.key(dim))
    turned = turn.rotate(rows)
    assert np.allclose(np.array(turned), np.array(rows) @ matrix, atol=1e-5)
    assert np.allclose(np.array(turn.unrotate(turned)), np.array(rows), atol=1e-5)
    assert np.allclose(np.array(turn.rotate(turn.unrotate(rows))), np.array(rows), atol=1e-5)


def test_a_power_of_two_has_sylvesters_matrix():
    signs = np.ones((1, 1))
    while len(signs) < 64:
        signs = np.block([[signs, signs], [signs, -signs]])
    assert np.allclose(np.array(Hadamard(64).rotate(mx.eye(64))), signs / 8)


@pytest.mark.parametrize("dim", [64, 80])
def test_what_one_coordinate_holds_is_spread_over_all(dim: int):
    row = mx.zeros((1, dim))
    row[0, 3] = 1000.0
    assert np.allclose(np.abs(np.array(Hadamard(dim).rotate(row))), 1000 * dim**-0.5, rtol=1e-5)


@pytest.mark.parametrize("dim", [80, 96, 128])
def test_rows_may_lie_apart_in_memory(dim: int):
    turn = Hadamard(dim)
    rows = mx.random.normal((5, 2, dim, 3), key=mx.random.key(1))
    apart = rows.transpose(1, 3, 0, 2)[:, 1:, ::2]
    together = mx.array(np.array(apart))
    assert mx.array_equal(turn.rotate(apart), turn.rotate(together))
    assert mx.array_equal(turn.unrotate(apart), turn.unrotate(together))
    assert turn.unrotate(turn.rotate(rows[:0, :, :, 0])).shape == (0, 2, dim)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("dim", [80, 128])
def test_types_are_kept_also_in_compiled_graphs(dim: int, dtype: mx.Dtype):
    turn = Hadamard(dim)
    rows = mx.random.normal((3, dim), key=mx.random.key(0)).astype(dtype)
    back = mx.compile(lambda x: turn.unrotate(turn.rotate(x)))(rows)
    assert back.dtype == dtype
    assert mx.allclose(back.astype(mx.float32), rows.astype(mx.float32), atol=0.05).item()


@pytest.mark.parametrize("dim", [0, 1, 2, 3, 6, 10, 36, 60, 72, 88, 100, 104, 120, 144, 8192, -8])
def test_a_dimension_without_such_a_matrix_is_refused_by_name(dim: int):
    with pytest.raises(ConfigurationError, match=f"a dimension of {dim} cannot be rotated"):
        Hadamard(dim)
