"""Reading a drafter's config.json: every field that counts, and a refusal of what is not implemented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from engine.networks.dflash_config import DFlashConfig, Second
from tests.engine import tiny

DATA = Path(__file__).parents[2] / "data" / "dflash"


def read(**changes: Any) -> DFlashConfig:
    return DFlashConfig.from_dict(tiny.drafter_config(**changes))


def test_nested_fields_go_before_those_of_the_top_level():
    nested = {
        "mask_token_id": 4,
        "target_layer_ids": [1],
        "block_size": 16,
        "input_embedding_scale": 2.0,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 30.0,
    }
    config = read(dflash_config=nested, input_embedding_scale=9.0)
    assert (config.block_size, config.input_embedding_scale, config.output_multiplier) == (16, 2.0, 0.5)
    assert config.final_logit_softcapping == 30.0
    assert read(input_embedding_scale=8.0).input_embedding_scale == 8.0
    assert read(final_logit_softcapping=0).final_logit_softcapping is None


def test_rope_is_read_from_either_place():
    nested = read(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert nested.rotary.theta == 5e5
    scaled = read(rope_scaling={"type": "linear", "factor": 4.0}, rope_parameters={"rope_theta": 3.0})
    assert (scaled.rotary.theta, scaled.rotary.fields["factor"]) == (10000.0, 4.0)


def test_sliding_layers_are_causal_unless_the_config_says_otherwise():
    assert [read().causal(layer) for layer in (0, 1)] == [True, False]
    assert [read(is_causal=True).causal(layer) for layer in (0, 1)] == [True, True]
    assert [read(is_causal=False).causal(layer) for layer in (0, 1)] == [False, False]
    assert [read().window(layer) for layer in (0, 1)] == [12, None]


@pytest.mark.parametrize(
    "name",
    ["hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "rms_norm_eps", "block_size"],
)
def test_a_missing_field_is_named(name: str):
    with pytest.raises(ModelError, match=f"{name} is missing"):
        read(**{name: None})


@pytest.mark.parametrize("name", ["mask_token_id", "target_layer_ids"])
def test_a_missing_nested_field_is_named(name: str):
    nested = {key: value for key, value in tiny.drafter_config()["dflash_config"].items() if key != name}
    with pytest.raises(ModelError, match=f"{name} is missing"):
        read(dflash_config=nested)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "not a DFlash drafter"),
        ({"model_type": "mamba"}, "'mamba'"),
        ({"hidden_act": "relu2"}, "'relu2'"),
        ({"layer_types": ["sliding_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        ({"sliding_window": None}, "positive sliding_window"),
        ({"layer_types": None, "use_sliding_window": True, "sliding_window": 0}, "positive sliding_window"),
        ({"is_causal": "yes"}, "'yes'"),
        ({"num_key_value_heads": 3}, "no multiple of 3"),
        ({"num_target_layers": 5}, "do not fit 5"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor is missing for 'longrope'"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "4 numbers",
        ),
        ({"rope_scaling": {"rope_type": "proportional"}}, "'proportional'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor must be a positive number, not 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "beta_fast"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            },
            "low_freq_factor must be less",
        ),
        ({"hidden_size": "wide"}, "hidden_size must be a whole number, not 'wide'"),
        ({"hidden_size": True}, "hidden_size must be a whole number, not True"),
        ({"num_attention_heads": -4}, "num_attention_heads must be positive, not -4"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"layer_types": "full_attention"}, "layer_types must be a list"),
        ({"dflash_config": [1]}, "dflash_config must be an object"),
        (
            {"dflash_config": {"mask_token_id": 4, "target_layer_ids": [1.5]}},
            "ids.0. must be a whole number, not 1.5",
        ),
        ({"block_size": 0}, "block_size must be positive"),
        ({"dflash_config": {"mask_token_id": 900, "target_layer_ids": [1]}}, "900 is outside"),
        ({"dflash_config": {"mask_token_id": 4, "target_layer_ids": []}}, "is empty"),
        ({"dflash_config": {"mask_token_id": 4, "target_layer_ids": [1], "gating": 1}}, "gating"),
    ],
)
def test_an_architecture_that_is_not_implemented_is_refused_by_name(changes: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        read(**changes)


def test_layers_slide_from_the_numbered_one_on_where_types_are_not_given():
    config = read(layer_types=None, use_sliding_window=True, sliding_window=9, max_window_layers=1)
    assert [config.window(layer) for layer in (0, 1)] == [None, 9]
    assert read(layer_types=None, max_window_layers=1).window(1) is None  # windows are not in use


def second(**changes: Any) -> DFlashConfig:
    raw = json.loads((DATA / "dflash2" / "config.json").read_text())
    raw["dflash_config"] = raw["dflash_config"] | changes
    return DFlashConfig.from_dict(raw)


def test_what_dflash_2_adds_is_read():
    config = second()
    assert config.kind == "dflash2"
    assert config.second == Second(3, 16, 8, 8)
    assert read().kind == "dflash"


@pytest.mark.parametrize("name", ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"])
def test_a_field_of_dflash_2_is_needed_there_and_unknown_elsewhere(name: str):
    with pytest.raises(ModelError, match=f"{name} is missing"):
        second(**{name: None})
    with pytest.raises(ModelError, match=f"{name} must be positive"):
        second(**{name: 0})
    with pytest.raises(ModelError, match=f"unknown fields {name}"):
        read(dflash_config=tiny.drafter_config()["dflash_config"] | {name: 3})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_group_size": 24}, "hidden_size 64 is no multiple of conv_group_size 24"),
        ({"selector_top_k": 513}, "selector_top_k 513 exceeds the vocabulary of 512"),
        ({"selector_depth": 2}, "unknown fields selector_depth"),
    ],
)
def test_a_dflash_2_configuration_that_cannot_be_is_refused_by_name(changes: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        second(**changes)
