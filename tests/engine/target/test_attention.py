"""Attention over codes is attention over the rows they stand for, for every shape a model may ask."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import base, llama, qwen3

from engine.cache.codecs.affine import Affine, Rotated
from engine.cache.codecs.base import LARGEST, CodedRows
from engine.cache.policy import parse_policy
from engine.errors import ConfigurationError, ModelError
from engine.target.attention import NAME, CodedAttention, attention, refuse_policy
from tests.engine import families, tiny
from tests.engine.cache import models

HEADS, KV_HEADS, SEEN, DIM = 6, 2, 11, 64
MASKS: dict[str, Any] = {
    "none": lambda length: None,
    "causal": lambda length: "causal",
    "shared": lambda length: mx.random.uniform(shape=(length, SEEN)) > 0.3,
    "batch": lambda length: mx.random.uniform(shape=(2, 1, length, SEEN)) > 0.3,
    "heads": lambda length: mx.random.uniform(shape=(2, HEADS, length, SEEN)) > 0.3,
    "additive": lambda length: mx.random.normal((length, SEEN)),
}


def rows(*shape: int) -> mx.array:
    return mx.random.normal(shape)


CODECS = {"affine-8": Affine(8, 64, DIM), "affine-4": Affine(4, 32, DIM), "rotated": Rotated(4, 64, DIM)}


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("sinks", [False, True])
def test_codes_are_attended_to_as_their_decoded_rows_are(codec, mask, length, sinks):
    mx.random.seed(length)
    queries, keys, values = rows(2, HEADS, length, DIM), *(rows(2, KV_HEADS, SEEN, DIM) for _ in range(2))
    coded_k, coded_v = codec.encode(keys), codec.encode(values)
    hidden = MASKS[mask](length)
    if isinstance(hidden, mx.array) and hidden.dtype == mx.bool_:
        hidden[..., 0] = True  # no query sees nothing
    extra = rows(HEADS) if sinks else None
    ours = attention(
        queries, CodedRows(codec, coded_k), CodedRows(codec, coded_v), None, 0.3, hidden, sinks=extra
    )
    decoded = [codec.decode(parts, mx.float32) for parts in (coded_k, coded_v)]
    theirs = base.scaled_dot_product_attention(
        queries, *decoded, cache=None, scale=0.3, mask=hidden, sinks=extra
    )
    assert np.abs(np.array(ours) - np.array(theirs)).max() < 2e-5


def test_plain_rows_go_to_mlx_lm_unchanged():
    queries, keys, values = rows(1, HEADS, 3, DIM), *(rows(1, KV_HEADS, SEEN, DIM) for _ in range(2))
    arguments = (queries, keys, values, None, 0.2, "causal")
    assert mx.array_equal(attention(*arguments), base.scaled_dot_product_attention(*arguments))


def test_codes_differ_from_the_rows_by_no_more_than_half_a_step():
    for bits in (2, 4, 8):
        for codec in (Affine(bits, 32, DIM), Rotated(bits, 32, DIM)):
            given = rows(3, 7, DIM)
            error = mx.abs(codec.decode(codec.encode(given), mx.float32) - given).max().item()
            assert 0 < error < 12 / 2**bits


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_zero_tiny_and_huge_rows_stay_finite(scale):
    for codec in (Affine(4, 64, DIM), Rotated(4, 64, DIM)):
        decoded = codec.decode(codec.encode(scale * rows(2, 3, DIM)), mx.float32)
        assert mx.all(mx.isfinite(decoded)).item()


@pytest.mark.parametrize("scale", [3000.0, 60000.0])
def test_large_half_precision_rows_stay_finite_and_near(scale):
    given = mx.clip(scale * rows(3, 256), -60000, 60000).astype(mx.float16)
    given[0, 0], given[0, 1] = 10 * scale // 16, -10 * scale // 16
    for codec in (Affine(8, 64, 256), Rotated(8, 64, 256)):
        decoded = codec.decode(codec.encode(given), mx.float16).astype(mx.float32)
        exact = given.astype(mx.float32)
        assert mx.all(mx.isfinite(decoded)).item()
        if scale < LARGEST / 16:  # a turned row may hold sixteen times as much in one place
            assert (mx.square(decoded - exact).sum() / mx.square(exact).sum()).item() < 2e-3


def test_groups_are_the_largest_that_fit_the_head():
    assert [Affine(4, 64, dim).group for dim in (32, 64, 96, 128, 160)] == [32, 64, 32, 64, 32]
    assert Affine(4, 128, 256).bits_per_value() == 4.25
    with pytest.raises(ConfigurationError, match="head dimension of 80 cannot be quantized in groups of 64"):
        Affine(4, 64, 80)


def test_the_name_is_taken_once_a_module_and_given_back_by_the_last_user():
    assert getattr(llama, NAME) is base.scaled_dot_product_attention
    first, second = (CodedAttention(families.build("llama")) for _ in range(2))
    assert getattr(llama, NAME) is attention
    assert getattr(qwen3, NAME) is base.scaled_dot_product_attention  # not of this model
    first.close()
    first.close()
    assert getattr(llama, NAME) is attention
    second.close()
    assert getattr(llama, NAME) is base.scaled_dot_product_attention


def test_every_layer_reads_codes_at_every_forward(monkeypatch):
    """Counted where codes are multiplied: two products a layer and forward."""
    read: list[str] = []

    def counted(name: str, plain: Any) -> Any:
        return lambda self, *rest: read.append(name) or plain(self, *rest)

    for name in ("score", "mix"):
        monkeypatch.setattr(Affine, name, counted(name, getattr(Affine, name)))
    model = families.build("gemma4_text", head_dim=32)
    caches = parse_policy("affine").new_caches(model, 4)
    users = CodedAttention(model)
    try:
        for count in (5, 1, 1):
            model(mx.array([list(range(7, 7 + count))]), cache=caches)
    finally:
        users.close()
    assert len(caches) < len(model.layers)  # the last layers share keys and values
    assert read.count("score") == read.count("mix") == 3 * len(model.layers)


@pytest.mark.parametrize("family", ["kimi_linear", "mamba2", "baichuan_m1"])
def test_families_that_cannot_read_codes_are_refused(family):
    model = models.model(family)
    with pytest.raises((ModelError, ConfigurationError), match=r"--kv|no attention"):
        refuse_policy(model, parse_policy("affine:4,32"))
    assert getattr(llama, NAME) is base.scaled_dot_product_attention


def test_head_dimensions_without_a_code_are_refused_with_their_size():
    with pytest.raises(ConfigurationError, match="head dimension of 8 "):
        refuse_policy(tiny.build("llama"), parse_policy("affine"))
