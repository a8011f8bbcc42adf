"""Distortion: relative squared error of what the next query sees; lost positions and stored bits count."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from engine.cache.codecs.affine import Affine
from engine.cache.policy import parse_policy
from engine.cache.stats import VisibleRows
from engine.config import Engine, Options, open_engine
from engine.errors import GenerationError
from engine.evaluation.kv import distortion, examine, held_after

PROMPT = [5 + (7 * index) % 900 for index in range(90)]
TEXT = [11, 12, 13]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The shipped target alone: 9 layers of 2 KV heads and 32 dimensions, every third full, window 32."""
    return open_engine(Options(drafter="none"))


def rows(positions: list[int], keys: list[float], values: list[float]) -> VisibleRows:
    """One head of one dimension."""
    shaped = [mx.array(numbers)[None, None, :, None] for numbers in (keys, values)]
    return VisibleRows(positions, *shaped)


def test_a_position_that_is_no_longer_held_counts_as_lost():
    native = {4: rows([0, 1, 2], [1.0, 2.0, 2.0], [3.0, 0.0, 4.0])}
    ours = {4: rows([0, 2], [1.0, 1.0], [3.0, 4.0])}
    found = distortion(native, ours, [4])
    assert found.keys == pytest.approx((0 + 4 + 1) / 9)
    assert found.values == 0


def test_what_the_native_cache_does_not_see_is_not_compared():
    native = {0: rows([5, 6], [1.0, 1.0], [1.0, 1.0])}
    ours = {0: rows([0, 1, 5, 6], [9.0, 9.0, 1.0, 1.0], [9.0, 9.0, 1.0, 3.0])}
    found = distortion(native, ours, [0])
    assert (found.keys, found.values) == (0.0, pytest.approx(4 / 2))


def test_layers_are_weighed_by_what_they_hold():
    native = {0: rows([0], [1.0], [1.0]), 1: rows([0], [3.0], [1.0])}
    ours = {0: rows([0], [0.0], [1.0]), 1: rows([0], [3.0], [1.0])}
    assert distortion(native, ours, [0, 1]).keys == pytest.approx(1 / 10)
    assert distortion(native, ours, [0]).keys == pytest.approx(1)
    assert distortion(native, ours, []).keys == 0


def test_a_layer_without_keys_cannot_be_compared():
    with pytest.raises(GenerationError, match="layer 3"):
        distortion({}, {}, [3])


@pytest.mark.parametrize("spec", ["sliding-bounded:4,64", "sink-window:4,600"])
def test_a_policy_that_drops_nothing_distorts_nothing(engine: Engine, spec: str):
    ours = replace(engine, policy=parse_policy(spec))
    found, use = examine(ours, PROMPT, TEXT, held_after(engine, PROMPT))
    assert (found.keys, found.values) == (0.0, 0.0)
    assert 8 * use.nbytes == 32 * use.values


def test_the_distortion_of_a_first_layer_is_that_of_its_code(engine: Engine):
    """Nothing before it is changed, so its keys are native ones that went through the code once."""
    ours = replace(engine, policy=parse_policy("affine:4,64@0"))
    native = held_after(engine, PROMPT)
    found, _ = examine(ours, PROMPT, TEXT, native)
    codec = Affine(4, 32, 32)
    for rows, measured in (
        (native[0].keys, found.keys),
        (native[0].values, found.values),
    ):
        coded = codec.decode(codec.encode(rows), mx.float32)
        expected = mx.square(coded - rows).sum() / mx.square(rows).sum()
        assert measured == pytest.approx(float(expected.item()), rel=1e-3)
        assert measured > 1e-3


def test_evicted_share_of_a_first_layer_counts_as_lost(engine: Engine):
    native = held_after(engine, PROMPT)
    ours = replace(engine, policy=parse_policy("sink-window:2,8@sliding"))
    found = distortion(native, held_after(ours, PROMPT), [0])
    energy = mx.square(native[0].keys).sum(axis=(0, 1, 3))
    kept = mx.array([position < 2 or position > len(PROMPT) - 8 for position in native[0].positions])
    assert found.keys == pytest.approx(float(1 - (energy * kept).sum() / energy.sum()), rel=1e-4)
    _, use = examine(ours, PROMPT, TEXT, native)
    assert use.layers == (0, 1, 3, 4, 6, 7)
    assert use.values == 6 * 2 * 2 * (2 + 7) * 32  # layers, keys and values, heads, positions, dimensions


def test_codes_count_as_stored_after_the_whole_text(engine: Engine):
    ours = replace(engine, policy=parse_policy("rotated:4,64@full"))
    found, use = examine(ours, PROMPT, TEXT, held_after(engine, PROMPT))
    assert use.layers == (2, 5, 8)
    assert use.values == 3 * 2 * 2 * (len(PROMPT) + len(TEXT) - 1) * 32
    assert 8 * use.nbytes == 5 * use.values  # 4 bits and two float16 scalars a group of 32
    assert 0 < found.keys < 0.03
