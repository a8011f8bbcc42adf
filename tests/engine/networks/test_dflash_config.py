"""Reading a drafter's config.json: every field that counts, and a refusal of what is not implemented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from engine.networks.dflash_config import DFlashConfig
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
    assert nested.rope_theta == 5e5
    scaled = read(rope_scaling={"type": "linear", "factor": 4.0})
    assert (scaled.rope_theta, scaled.rope_scaling["factor"]) == (10000.0, 4.0)


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
        ({"is_causal": "yes"}, "'yes'"),
        ({"num_key_value_heads": 3}, "no multiple of 3"),
        ({"num_target_layers": 5}, "do not fit 5"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": "yarn", "attention_factor": 2.0}}, "attention_factor"),
        ({"block_size": 0}, "block_size must be positive"),
        ({"dflash_config": {"mask_token_id": 900, "target_layer_ids": [1]}}, "900 is outside"),
        ({"dflash_config": {"mask_token_id": 4, "target_layer_ids": []}}, "is empty"),
        ({"dflash_config": {"mask_token_id": 4, "target_layer_ids": [1], "gating": 1}}, "gating"),
    ],
)
def test_an_architecture_that_is_not_implemented_is_refused_by_name(changes: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        read(**changes)


def test_a_dflash_2_drafter_is_refused_as_such():
    raw = json.loads((DATA / "dflash2" / "config.json").read_text())
    with pytest.raises(ModelError, match="DFlash 2"):
        DFlashConfig.from_dict(raw)
