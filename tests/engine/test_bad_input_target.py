"""Targets that cannot be used, through the command line: one line that names what is wrong, and no work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.target.loading import load_target
from tests.engine import families, tiny
from tests.engine.refusals import Bench, reweigh, rewrite, spoil

FLAT = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps")
GEMMA_NEEDS = (*FLAT, "sliding_window", "sliding_window_pattern", "query_pre_attn_scalar")


@pytest.mark.parametrize("name", GEMMA_NEEDS)
def test_a_missing_field_of_the_target_is_named(bench: Bench, name: str):
    rewrite(bench.target, **{name: None})
    assert bench.refused() == f"{bench.target / 'config.json'}: {name} is missing"


def test_all_missing_fields_of_a_target_are_named_also_nested_ones(bench: Bench, tmp_path: Path):
    rewrite(bench.target, hidden_size=None, vocab_size=None)
    assert bench.refused().endswith(": hidden_size, vocab_size are missing")
    bench.target = families.save(tmp_path / "qwen", "qwen3")
    rewrite(bench.target, head_dim=None, rms_norm_eps=None, tie_word_embeddings=None)
    assert set(bench.refused().split(": ")[1].removesuffix(" are missing").split(", ")) == {
        *("head_dim", "rms_norm_eps", "tie_word_embeddings")
    }
    bench.target = families.save(tmp_path / "gemma", "gemma3")
    text = dict(families.FAMILIES["gemma3"].config["text_config"])
    rewrite(bench.target, text_config={key: value for key, value in text.items() if key != "hidden_size"})
    assert bench.refused().endswith(": hidden_size is missing")
    rewrite(bench.target, text_config=None)
    assert "text_config" in bench.refused()
    rewrite(bench.target, text_config=[1])
    assert "text_config is [1], not an object" in bench.refused()


@pytest.mark.parametrize("name", ["intermediate_size", "num_key_value_heads", "head_dim"])
def test_a_size_mlx_lm_guessed_wrongly_is_named_with_the_weights_that_do_not_fit(bench: Bench, name: str):
    rewrite(bench.target, **{name: None})
    message = bench.refused()
    assert "shape" in message
    assert f"config.json does not say {name}" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "32"}, "hidden_size must be a positive whole number, not '32'"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be a positive whole number, not -1"),
        ({"vocab_size": 3e2}, "vocab_size must be a positive whole number, not 300.0"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000, the weights hold 6 layers"),
        ({"sliding_window": 0}, "sliding_window must be a positive whole number, not 0"),
        ({"sliding_window": -3}, "sliding_window must be a positive whole number, not -3"),
        ({"sliding_window": 10**15}, f"sliding_window must be a positive whole number, not {10**15}"),
        ({"sliding_window": 8.0}, "sliding_window must be a positive whole number, not 8.0"),
        ({"hidden_size": 2**31}, "hidden_size must be a positive whole number, not 2147483648"),
        ({"quantization": {"bits": 0, "group_size": 32}}, "quantization: bits 0 is not one of 2, 3"),
        ({"quantization": "4bit"}, "quantization is '4bit', not an object"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings must be a positive whole number"),
        ({"num_key_value_heads": 0}, "cannot be loaded"),
        ({"rope_scaling": "yes"}, "cannot be loaded"),
        ({"model_type": "perceptron"}, "model_type 'perceptron' is not supported: mlx-lm 0.32.2 has no such"),
        ({"model_type": "cache"}, "model_type 'cache' is not supported"),
        ({"model_type": "../weights"}, "model_type '../weights' is not supported"),
        ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
        ({"model_type": "mamba"}, "state_size, conv_kernel, use_bias"),
        ({"model_file": "model.py"}, "model.py"),
    ],
)
def test_a_target_config_that_makes_no_sense_is_refused(bench: Bench, changes: dict[str, Any], message: str):
    rewrite(bench.target, **changes)
    assert message in bench.refused()


def test_a_window_is_needed_where_layers_slide(bench: Bench, tmp_path: Path):
    bench.target = families.save(tmp_path / "sliding", "mistral")
    rewrite(bench.target, sliding_window=None)
    assert bench.refused().endswith("config.json: sliding_window is missing")


@pytest.mark.parametrize("stops", ["x", {"a": 1}, -1, 2**70, [[1]], 1.5, [True]], ids=str)
def test_what_is_no_token_ends_no_text(bench: Bench, stops: Any):
    (bench.target / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    assert "eos_token_id must be a token id or a list of them" in bench.refused()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma3_text", {"sliding_window_pattern": 100}),
        ("gemma3_text", {"sliding_window_pattern": 1.5}),
        ("gemma3_text", {"query_pre_attn_scalar": -1}),
        ("qwen3_moe", {"num_experts_per_tok": 10**6}),
        ("qwen3_next", {"partial_rotary_factor": 0}),
        ("qwen3_next", {"partial_rotary_factor": 7}),
    ],
)
def test_what_no_weight_has_the_shape_of_is_refused_when_it_does_not_fit(
    bench: Bench, tmp_path: Path, family: str, changes: dict[str, Any]
):
    bench.target = families.save(tmp_path / "spoiled", family)
    rewrite(bench.target, **changes)
    message = bench.refused("--drafter", "none")
    assert message.startswith(f"{bench.target}: ")
    assert "cannot be run: " in message or "cannot be loaded: " in message


@pytest.mark.parametrize("window", [0, -3, 10**15])
def test_a_window_that_makes_no_sense_is_refused_within_a_larger_model_too(
    bench: Bench, tmp_path: Path, window: int
):
    bench.target = families.save(tmp_path / "gemma", "gemma3")
    text = families.FAMILIES["gemma3"].config["text_config"]
    rewrite(bench.target, text_config=text | {"sliding_window": window})
    assert f"sliding_window must be a positive whole number, not {window}" in bench.refused()


def test_weights_that_overflow_in_the_dtype_asked_for_are_named(bench: Bench):
    reweigh(bench.target, spoil("model.norm.weight", 1e6))
    assert "model.norm.weight holds NaN or infinite" in bench.refused("--dtype", "float16")


@pytest.mark.skipif(mx.metal.is_available(), reason="Metal multiplies experts in 16 bits")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_in_16_bits_on_a_cpu_are_refused_with_what_to_do(
    bench: Bench, tmp_path: Path, family: str, dtype: str
):
    bench.target, bench.drafter = families.save(tmp_path / family, family), Path("none")
    assert bench.refused("--dtype", dtype).endswith(f"not in {dtype}; use --dtype float32")
    bench.assert_accepted("--dtype", "float32")
    bench.assert_accepted()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_packed_experts_are_accepted_in_16_bits(bench: Bench, tmp_path: Path, family: str):
    bench.target, bench.drafter = families.save(tmp_path / family, family, quantized=True), Path("none")
    bench.assert_accepted("--dtype", "bfloat16")


def test_packed_weights_that_cannot_have_the_columns_of_the_config_are_refused(bench: Bench, tmp_path: Path):
    bench.target = families.save(tmp_path / "packed", "gpt_oss", quantized=True)
    rewrite(bench.target, intermediate_size=1)
    assert "which is no packing of the 1 columns the config calls for" in bench.refused()


@pytest.mark.parametrize("content", [b"{", b"{}", b'{"model": {}}', b"version https://git-lfs.github.com\n"])
def test_a_tokenizer_that_cannot_be_read_is_refused(bench: Bench, content: bytes):
    (bench.target / "tokenizer.json").write_bytes(content)
    message = bench.refused()
    assert "tokenizer" in message
    (bench.target / "tokenizer.json").unlink()
    assert "holds no tokenizer" in bench.refused()


def test_a_generation_config_that_is_no_object_is_refused_and_a_good_one_says_where_texts_end(bench: Bench):
    path = bench.target / "generation_config.json"
    path.write_text("[]")
    assert "generation_config.json" in bench.refused()
    path.write_text(json.dumps({"eos_token_id": [7]}))
    assert load_target(bench.target).stops == {tiny.EOS, 7}  # the tokenizer adds its own


def test_a_tokenizer_configuration_that_is_no_json_is_refused(bench: Bench):
    (bench.target / "tokenizer_config.json").write_text("{")
    assert "tokenizer" in bench.refused()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(bench: Bench):
    def shorten(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        small = {name: w[:50] for name, w in weights.items() if w.shape[0] == tiny.VOCAB}
        assert small
        return weights | small

    reweigh(bench.target, shorten)
    rewrite(bench.target, vocab_size=50)
    assert "the tokenizer gives token" in bench.refused("--drafter", "none")


@pytest.mark.parametrize(
    ("switches", "says"),
    [
        (("--kv", "affine:4,64"), "--kv affine:4,64"),
        (("--drafter", "./nowhere"), "nowhere is not a folder"),
        (("--drafter-kv", "affine:4,64"), "--drafter-kv affine:4,64"),
        (("--quantize", "4"), "the model is packed already"),
    ],
)
def test_switches_are_refused_before_weights_are_read(
    bench: Bench, tmp_path: Path, switches: tuple[str, str], says: str
):
    if switches[0] == "--quantize":
        bench.target = families.save(tmp_path / "packed", "llama", quantized=True)
    reweigh(bench.target, spoil("model.norm.weight", float("nan")))  # reading them all would say so
    assert says in bench.refused(*switches)
