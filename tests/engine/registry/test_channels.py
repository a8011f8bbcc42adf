"""Built-in KV channels are whole policies under names for ids; their codes fit the heads that models have."""

from __future__ import annotations

import re

import pytest

from engine.cache.policy import parse_policy
from engine.errors import ConfigurationError, ModelError
from engine.registry import CHANNELS, _refuse_misfits
from engine.target.attention import refuse_policy
from engine.target.folder import build_unloaded
from evidence_format.policies import KINDS
from tests.engine import tiny
from tests.engine.registry.registries import at, model_of


@pytest.mark.parametrize("name", CHANNELS)
def test_a_channel_is_a_whole_policy_under_a_name_for_ids(name: str):
    channel = CHANNELS[name]
    assert channel.name == name
    assert re.fullmatch("[a-z0-9-]+", name)
    assert parse_policy(channel.policy.spec) == channel.policy
    assert channel.description
    assert "\n" not in channel.description


def test_no_two_channels_are_the_same():
    assert len({channel.policy for channel in CHANNELS.values()}) == len(CHANNELS)


def test_every_kind_of_policy_has_a_channel_but_those_that_need_a_projector():
    assert {channel.policy.kind for channel in CHANNELS.values()} == KINDS.keys() - {"restored"}


def misfit(name: str, dims: list[int]) -> str:
    """Why a channel does not fit heads of these dimensions; nothing where it does."""
    try:
        _refuse_misfits(model_of(at(""), channels=[name]), dims)
    except ConfigurationError as error:
        return str(error)
    return ""


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
def test_a_head_dimension_that_a_code_cannot_have_is_refused(name: str, head_dims: list[int], needs: str):
    said = misfit(name, head_dims)
    assert re.search(needs, said)
    assert said.startswith(
        f"the model one: the KV channel {name} ({CHANNELS[name].policy.spec}) does not fit"
    )


@pytest.mark.parametrize("name", ["native", "sink-window-1024", "sliding-bounded-512"])
def test_what_is_not_coded_fits_any_head(name: str):
    assert not misfit(name, [1, 7, 120])


def test_the_heads_of_published_models_fit_every_channel():
    for dims in ([64], [80, 96], [128], [256], [256, 512]):
        refused = {name for name in CHANNELS if misfit(name, dims)}
        assert refused == ({"affine8", "affine4", "rotated8", "rotated4", "auto4"} if 80 in dims else set())


@pytest.mark.parametrize("head_dim", [8, 12, 20, 36, 40, 48, 64, 72, 80, 96, 112, 120, 128, 144, 160, 256])
def test_facts_refuse_what_a_model_of_such_heads_refuses(head_dim: int):
    config = tiny.FAMILIES["qwen3"][1] | {"head_dim": head_dim, "num_hidden_layers": 6}
    model = build_unloaded(config)
    for name, channel in CHANNELS.items():
        if channel.policy.kind in ("sliding-bounded", "full-kv"):
            continue  # the model has no sliding layers
        try:
            refuse_policy(model, channel.policy)
            fits = True
        except (ConfigurationError, ModelError):
            fits = False
        assert fits == (not misfit(name, [head_dim])), name
