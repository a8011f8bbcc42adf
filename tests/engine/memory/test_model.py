"""Models built without their weights: what they would take, at no cost."""

from __future__ import annotations

import json
from pathlib import Path
from time import process_time

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from engine.errors import InputError
from engine.memory import open_unloaded, predict
from engine.target.loading import SHIPPED_TARGET, load_target
from tests.engine import families, tiny
from tests.engine.families import FULL, SLIDING

# As published: 26 B parameters, 4 B of them active. No weights are needed to say what its caches would take.
GEMMA4_26B = {
    "model_type": "gemma4",
    "vocab_size": 262144,
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "hidden_size": 2816,
        "num_hidden_layers": 30,
        "intermediate_size": 2112,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "rms_norm_eps": 1e-6,
        "sliding_window": 1024,
        "layer_types": [*[SLIDING] * 5, FULL] * 5,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2**21,  # more than published, so that a round follows a million tokens
        "final_logit_softcapping": 30.0,
    },
}


def written(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def held(target: object) -> int:
    return sum(value.nbytes for _, value in tree_flatten(target.model.parameters()))  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_million_tokens_of_a_large_model_are_predicted_in_seconds_and_megabytes(tmp_path):
    folder = written(tmp_path / "large", **GEMMA4_26B)
    mx.clear_cache()
    before, started = mx.get_active_memory(), process_time()
    mx.reset_peak_memory()
    model = open_unloaded(folder, "bfloat16")
    prediction = predict(model, ["all"], [2**20], batch=8)
    assert process_time() - started < 30
    assert mx.get_peak_memory() - before < 2**24
    assert not prediction["refused"]
    rows = {row["kv"].partition(":")[0]: row for row in prediction["rows"]}
    nbytes = {kind: row["cache_bytes"] for kind, row in rows.items()}
    # five full layers, keys and values of 2 heads of 512, 2 bytes; the round grows the buffers by a step
    full = 5 * 2 * 2 * 512 * 2 * (2**20 + 256)
    sliding = 25 * 2 * 8 * 256 * 2 * (1024 + 1)
    assert nbytes["native"] == 8 * (full + sliding)
    assert rows["native"]["layers"][0]["bytes"] == 8 * sliding
    assert nbytes["restored"] == nbytes["native"]
    bits = 4 + 32 / 64
    assert nbytes["affine"] == nbytes["rotated"] == nbytes["native"] * bits / 16
    slots = 5 * 2 * 2 * 512 * 2 + 25 * 2 * 8 * 256 * 2
    assert nbytes["sink-window"] == 8 * slots * (4 + 64 + 1)
    assert 20e9 < model.weights / 2 < 30e9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_those_a_load_would_hold(tmp_path, dtype):
    for name, folder in (
        ("shipped", SHIPPED_TARGET),
        ("tied", families.save(tmp_path / "tied", "qwen3")),
        ("packed", families.save(tmp_path / "packed", "llama", quantized=True)),
        ("hybrid", families.save(tmp_path / "hybrid", "qwen3_5")),
    ):
        model = open_unloaded(folder, dtype)
        assert model.weights == held(load_target(folder, dtype).target), name
        assert (model.dtype, model.weights_from) == (dtype, "the headers of its files")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_5"])
def test_a_configuration_alone_tells_the_same_weights(tmp_path, family):
    for quantized in (False, True):
        if quantized and family not in families.QUANTIZED:
            continue
        folder = families.save(tmp_path / f"{family}-{quantized}", family, quantized)
        from_files = open_unloaded(folder, "float16").weights
        (folder / "model.safetensors").unlink()
        model = open_unloaded(folder, "float16")
        assert model.weights == from_files
        assert model.weights_from == "config.json"


def test_weights_packed_on_loading_are_counted_packed(tmp_path):
    folder = families.save(tmp_path / "plain", "llama")
    loaded = load_target(folder, quantize="4,32").target
    assert open_unloaded(folder, quantize="4,32").weights == held(loaded)


def test_nothing_said_is_what_the_engine_would_do(tmp_path):
    folder = families.save(tmp_path / "plain", "llama")
    model = open_unloaded(folder)
    card = load_target(folder).card
    assert model.dtype == card.dtype
    assert model.context == tiny.PLAIN["max_position_embeddings"]


def test_on_metal_the_type_is_the_stored_one(tmp_path, monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    model = open_unloaded(SHIPPED_TARGET)
    stored = sum(value.nbytes for value in dict(mx.load(str(SHIPPED_TARGET / "model.safetensors"))).values())
    assert (model.dtype, model.dtype_from, model.weights) == ("float16", "as stored", stored)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_text((SHIPPED_TARGET / "config.json").read_text())
    model = open_unloaded(alone)
    assert (model.dtype, model.dtype_from, model.weights) == ("float16", "config.json", stored)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"model_type": "abacus"}, "abacus"),
        ({"quantization": {"group_size": 0, "bits": 4}}, "group_size 0"),
        ({"num_hidden_layers": 10**6}, "more than 4096"),
        ({"num_key_value_heads": 0}, "cannot be run"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused(tmp_path, change, says):
    config = {**families.FAMILIES["llama"].config, **change}
    folder = written(tmp_path / "odd", **{key: value for key, value in config.items() if value is not None})
    with pytest.raises(InputError, match=says):
        open_unloaded(folder)
