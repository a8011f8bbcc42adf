"""KV channels are whole policies under names for ids, and are refused for heads that they cannot code."""

from __future__ import annotations

import re
from typing import Any

import pytest

from engine.cache.policy import parse_policy
from engine.errors import ConfigurationError, ModelError, UnknownModel
from engine.registry.channels import CHANNELS, find_channel, fitting, refuse_channel
from engine.target.attention import refuse_policy
from engine.target.folder import build_unloaded
from evidence_format.policies import KINDS
from tests.engine import tiny


def model_with(head_dim: int) -> Any:
    """A model whose heads have that many values; nothing of it is computed."""
    config = tiny.FAMILIES["qwen3"][1] | {"head_dim": head_dim, "num_hidden_layers": 6}
    return build_unloaded(config)


@pytest.mark.parametrize("name", CHANNELS)
def test_a_channel_is_a_whole_policy_under_a_name_for_ids(name: str):
    channel = CHANNELS[name]
    assert channel.name == name
    assert re.fullmatch("[a-z0-9-]+", name)
    assert parse_policy(channel.policy.spec) == channel.policy
    assert channel.help
    assert "\n" not in channel.help


def test_no_two_channels_are_the_same():
    assert len({channel.policy for channel in CHANNELS.values()}) == len(CHANNELS)


def test_every_kind_of_policy_has_a_channel_but_those_that_need_a_projector():
    assert {channel.policy.kind for channel in CHANNELS.values()} == KINDS.keys() - {"restored"}


@pytest.mark.parametrize("name", ["", "Native", "affine", "native@native", "ü" * 200])
def test_an_unknown_channel_is_refused_with_those_there_are(name: str):
    with pytest.raises(UnknownModel, match=r"there is no KV channel .*; there are native, ") as caught:
        find_channel(name)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("name", "head_dims", "needs"),
    [
        ("affine4", [80], "80 cannot be quantized in groups of 64: none of 32, 64 divides it"),
        ("affine8", [128, 16], "16 cannot be quantized"),
        ("rotated4", [288], r"288 cannot be rotated: only m \* 2\^k"),
        ("lattice-e8", [120], r"120 cannot be rotated: only m \* 2\^k up to 4096, m one of 1, 12, 20, 28"),
        ("lattice-e8", [20], "20 has no whole number of e8 blocks of 8"),
        ("lattice-packed", [12], "12 has no whole number of e8 blocks of 8"),
        ("lattice-d4", [256, 72], "72 cannot be rotated"),
    ],
)
def test_a_head_dimension_that_a_code_cannot_take_is_refused(name: str, head_dims: list[int], needs: str):
    with pytest.raises(ConfigurationError, match=needs) as caught:
        refuse_channel(CHANNELS[name], head_dims)
    assert str(caught.value).startswith(f"the KV channel {name} ({CHANNELS[name].policy.spec}) does not fit")
    assert "channels that fit: native, " in str(caught.value)


@pytest.mark.parametrize("name", ["native", "sink-window-1024", "sliding-bounded-512"])
def test_what_is_not_coded_fits_any_head(name: str):
    refuse_channel(CHANNELS[name], [1, 7, 120])


def test_the_heads_of_published_models_take_every_channel():
    for dims in ([64], [80, 96], [128], [256], [256, 512]):
        codes = [name for name in CHANNELS if name not in ("affine8", "affine4", "rotated8", "rotated4")]
        expected = codes if 80 in dims else list(CHANNELS)
        assert set(fitting(dims)) == set(expected)


@pytest.mark.parametrize("head_dim", [8, 12, 20, 36, 40, 48, 64, 72, 80, 96, 112, 120, 128, 144, 160, 256])
def test_the_guard_says_what_a_model_of_such_heads_says(head_dim: int):
    """The codec of the guard is the one that a cache would make: both take a dimension, or neither does."""
    model = model_with(head_dim)
    for name, channel in CHANNELS.items():
        if channel.policy.kind == "sliding-bounded":
            continue  # the model has no sliding layers
        try:
            refuse_policy(model, channel.policy)
            taken = True
        except (ConfigurationError, ModelError):
            taken = False
        assert taken == (name in fitting([head_dim])), name
