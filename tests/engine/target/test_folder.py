"""Configurations as they are published pass; what mlx-lm would have to guess does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from engine.target.folder import check_config
from tests.engine.registry.published import TARGETS

ATTENTION = {"num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-6}
PUBLISHED = {  # sizes as large published checkpoints state them, or leave them out
    "llama": ATTENTION
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
    "gemma3": {
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        }
    },
    "gemma3_text": ATTENTION  # as newer files do, with layer_types and nested rotary parameters
    | {
        "hidden_size": 640,
        "num_hidden_layers": 18,
        "vocab_size": 262144,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "layer_types": ["sliding_attention"] * 18,
    },
    "gpt_oss": ATTENTION
    | {"hidden_size": 2880, "num_hidden_layers": 24, "vocab_size": 201088, "sliding_window": 128},
    "qwen3_5": {"text_config": ATTENTION | {"hidden_size": 2560, "num_hidden_layers": 32}},
    "gemma4_unified": {"text_config": {"hidden_size": 1536, "num_hidden_layers": 35}},
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_configurations_as_they_are_published_are_accepted(kind: str):
    check_config(Path("config.json"), {"model_type": kind, **PUBLISHED[kind]})


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers"])
@pytest.mark.parametrize("kind", PUBLISHED)
def test_none_of_them_may_leave_its_width_or_depth_out(kind: str, field: str):
    config: dict[str, Any] = json.loads(json.dumps({"model_type": kind, **PUBLISHED[kind]}))
    del config.get("text_config", config)[field]
    with pytest.raises(ModelError, match=f"^config.json: {field} is missing$"):
        check_config(Path("config.json"), config)


def test_a_field_that_may_be_null_is_not_missing_where_it_is():
    check_config(Path("config.json"), TARGETS["glm-4.5-air"])
    without = {name: value for name, value in TARGETS["glm-4.5-air"].items() if name != "rope_scaling"}
    with pytest.raises(ModelError, match="rope_scaling is missing"):
        check_config(Path("config.json"), without)
