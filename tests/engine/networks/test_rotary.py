"""The rotary embedding: both ways of rotating agree, and the frequencies are those of Hugging Face."""

from __future__ import annotations

from threading import Thread
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.networks.rotary import Rotary, rotary_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "factor": 8.0,
    "short_factor": [1.0, 1.1, 1.3, 2.0],
    "long_factor": [1.0, 2.0, 5.0, 9.0],
    "original_max_position_embeddings": 50,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": YARN,
    "longrope": LONG,
    "llama3": LLAMA3,
}


def rotary(name: str, *, kernel: bool) -> Rotary:
    raw = {"rope_theta": 1e4, "max_position_embeddings": 64, "rope_scaling": SCALINGS[name]}
    return Rotary(rotary_config(raw, 8), 8, kernel=kernel)


@pytest.mark.parametrize("first", [0, 45, 1500])
@pytest.mark.parametrize("name", SCALINGS)
def test_stored_angles_rotate_as_the_kernel_does(name: str, first: int):
    rows, weight = mx.random.normal((1, 11, 3, 8), key=mx.random.key(1)), mx.random.normal((8,))
    results = []
    for kernel in (True, False):
        embedding = rotary(name, kernel=kernel)
        angles = embedding.angles(first, 15, first + 15).part(4)
        results.append(np.array(embedding.rotate(mx.fast.rms_norm(rows, weight, 1e-6), angles)))
    assert results[0].shape == (1, 3, 11, 8)
    assert np.abs(results[0] - results[1]).max() < 1e-3 * np.abs(results[0]).max()


@pytest.mark.parametrize(
    ("name", "length", "frequencies", "factor"),
    [  # as transformers 5.23.0 computes them
        ("linear", 40, [0.3333333, 0.03333334, 0.003333333, 0.0003333334], 1),
        ("linear", 130, [0.3333333, 0.03333334, 0.003333333, 0.0003333334], 1),
        ("dynamic", 40, [1.0, 0.1, 0.01, 0.001], 1),
        ("dynamic", 130, [1.0, 0.05800098, 0.003364114, 0.0001951219], 1),
        ("yarn", 40, [1.0, 0.0625, 0.0025, 0.00025], 1.138629),
        ("yarn", 130, [1.0, 0.0625, 0.0025, 0.00025], 1.138629),
        ("longrope", 40, [1.0, 0.09090909, 0.007692308, 0.0005], 1.237559),
        ("longrope", 130, [1.0, 0.05, 0.002, 0.0001111111], 1.237559),
        ("llama3", 40, [1.0, 0.01304226, 0.00125, 0.000125], 1),
        ("llama3", 130, [1.0, 0.01304226, 0.00125, 0.000125], 1),
    ],
)
def test_frequencies_and_factor_are_those_of_transformers(
    name: str, length: int, frequencies: list[float], factor: float
):
    config = rotary(name, kernel=True).config
    assert config.frequencies(8, length) == pytest.approx(frequencies, rel=1e-5)
    assert config.attention_factor == pytest.approx(factor)


def test_the_table_follows_the_sequence_and_goes_back():
    embedding = rotary("default", kernel=False)
    for first in (0, 5000, 1020, 3):
        angles = embedding.angles(first, 6, first + 6)
        assert angles.turns is not None
        expected = np.cos(np.arange(first, first + 6)[:, None] * 1e4 ** (-np.arange(0, 8, 2) / 8))
        assert np.abs(np.array(angles.turns[0])[:, 0] - expected).max() < 1e-3


@pytest.mark.parametrize("kernel", [True, False])
def test_turned_pairs_keep_their_length_but_for_the_attention_factor(kernel: bool):
    embedding = rotary("yarn", kernel=kernel)
    rows = mx.random.normal((1, 4, 2, 8), key=mx.random.key(2))
    angles = embedding.angles(30, 4, 34)
    turned = np.array(embedding.rotate(mx.fast.rms_norm(rows, mx.ones((8,)), 0.0), angles))
    lengths = np.linalg.norm(turned, axis=-1)
    assert np.allclose(lengths, 8**0.5 * (0.1 * np.log(4.0) + 1), rtol=1e-4)


def test_angles_that_were_not_used_outlive_the_thread_that_asked_for_them():
    """As where a server ends and another goes on with its model."""
    ours, theirs = rotary("default", kernel=False), rotary("default", kernel=False)

    def ask_and_leave() -> None:
        ours.angles(0, 5, 5)
        mx.clear_streams()

    thread = Thread(target=ask_and_leave)
    thread.start()
    thread.join()
    for found, wanted in zip(ours.angles(0, 5, 5).turns, theirs.angles(0, 5, 5).turns, strict=True):
        np.testing.assert_array_equal(np.array(found), np.array(wanted))
