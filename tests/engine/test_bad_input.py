"""Bad input, through the command line: one line that names what is wrong, code 2, and no model has run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.cli import run
from engine.loading import load_target
from engine.networks.dflash import DFlash
from engine.target import Target
from tests.engine import families, tiny
from tests.engine.evaluation.test_prompts import FACT, needle_row, write

FLAT = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps")
GEMMA_NEEDS = (*FLAT, "sliding_window", "sliding_window_pattern", "query_pre_attn_scalar")
DRAFTER_NEEDS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"),
    *("rms_norm_eps", "rope_theta", "block_size", "dflash_config"),
)


class Bench:
    """Copies of a target and a drafter to spoil, and the command line that is given them."""

    def __init__(self, target: Path, drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.target, self.drafter, self._capsys = target, drafter, capsys

    def refused(self, *arguments: str, prompt: str = "hello", command: Sequence[str] = ()) -> str:
        """The one line of a refusal, by ``generate`` with the prompt or by another command."""
        models = ["--model", str(self.target), "--drafter", str(self.drafter)]
        code = run([*(command or ("generate", prompt)), "--json", *models, *arguments])
        out, err = self._capsys.readouterr()
        assert (code, out) == (2, ""), err
        lines = err.splitlines()
        assert len(lines) == 1, err
        assert lines[0].startswith("kakeya_engine: ")
        return lines[0].removeprefix("kakeya_engine: ")


@pytest.fixture
def bench(
    folders: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Bench:
    def ran(self: Any, *_: Any, **__: Any) -> None:
        raise AssertionError(f"{type(self).__name__} ran before the input was checked")

    monkeypatch.setattr(Target, "forward", ran)
    monkeypatch.setattr(DFlash, "__call__", ran)
    monkeypatch.setenv("KAKEYA_STATE", str(tmp_path / "state"))
    target = Path(shutil.copytree(folders[0], tmp_path / "target"))
    return Bench(target, Path(shutil.copytree(folders[1], tmp_path / "drafter")), capsys)


def rewrite(folder: Path, **changes: Any) -> None:
    """Change fields of a config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def reweigh(folder: Path, change: Callable[[dict[str, mx.array]], dict[str, mx.array]]) -> None:
    """Rewrite the weights."""
    path = str(folder / "model.safetensors")
    weights = change({name: mx.array(value) for name, value in dict(mx.load(path)).items()})
    mx.eval(*weights.values())
    mx.save_safetensors(path, weights, {"format": "mlx"})


def spoil(name: str, value: float) -> Callable[[dict[str, mx.array]], dict[str, mx.array]]:
    def change(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        weights[name][0] = value
        return weights

    return change


def test_good_input_gets_as_far_as_a_model(bench: Bench, capsys: pytest.CaptureFixture[str]):
    models = ["--model", str(bench.target), "--drafter", str(bench.drafter)]
    assert run(["generate", "hello", *models]) == 70
    assert "Target ran before the input was checked" in capsys.readouterr().err


def test_a_drafter_of_another_target_names_both_sides(bench: Bench, tmp_path: Path):
    cases = {
        "hidden size 64 in the drafter, 32 in the target": {"hidden_size": 64},
        "vocabulary 400 in the drafter, 300 in the target": {"vocab_size": 400},
        "number of target layers 9 in the drafter, 6 in the target": {"num_target_layers": 9},
    }
    for number, (message, changes) in enumerate(cases.items()):
        bench.drafter = tiny.save_drafter(tmp_path / str(number), **changes)
        assert message in bench.refused()


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


@pytest.mark.parametrize("name", DRAFTER_NEEDS)
def test_a_missing_field_of_the_drafter_is_named(bench: Bench, name: str):
    rewrite(bench.drafter, **{name: None})
    needed = "target_layer_ids" if name == "dflash_config" else name
    message = bench.refused()
    assert f"{needed} is missing" in message or (name == "dflash_config" and "mask_token_id" in message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "32"}, "hidden_size must be a positive whole number, not '32'"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be a positive whole number, not -1"),
        ({"vocab_size": 3e2}, "vocab_size must be a positive whole number, not 300.0"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000, the weights hold 6 layers"),
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "wide"}, "'wide'"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"dflash_config": "yes"}, "dflash_config"),
        ({"dflash_config": {"target_layer_ids": 3, "mask_token_id": 4}}, "drafter"),
        ({"rope_parameters": "yes"}, "drafter"),
        ({"quantization": 4}, "quantization is 4, not an object"),
        ({"quantization": {"bits": 4}}, "quantization: group_size is missing"),
        ({"quantization": {"bits": 4, "group_size": 0}}, "quantization: group_size 0 is not one of 16, 32"),
        ({"quantization": {"bits": 4, "group_size": 32, "fc": {"bits": 64}}}, "bits 64 is not one of"),
        (
            {"quantization": {"bits": 4, "group_size": 32, "mode": "magic"}},
            "mode 'magic' is not one of affine",
        ),
        ({"num_hidden_layers": 10**7, "layer_types": None}, "is 10000000, the weights hold 2 layers"),
    ],
)
def test_a_drafter_config_that_makes_no_sense_is_refused(bench: Bench, changes: dict[str, Any], message: str):
    rewrite(bench.drafter, **changes)
    assert message in bench.refused()


@pytest.mark.parametrize("side", ["target", "drafter"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "config.json is not JSON"),
        (b"[]", "config.json does not hold a JSON object"),
        (b"\xff\xfe\x00", "config.json is not JSON"),
        (b"[" * 100_000, "config.json is not JSON"),
        (b"version https://git-lfs.github.com/spec/v1\n", "config.json is a git-lfs pointer"),
    ],
)
def test_a_config_that_is_no_json_object_is_refused(bench: Bench, side: str, content: bytes, message: str):
    (getattr(bench, side) / "config.json").write_bytes(content)
    assert message in bench.refused()


@pytest.mark.parametrize(("side", "layer"), [("target", "model.layers.1"), ("drafter", "layers.1")])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(bench: Bench, side: str, layer: str, value: float):
    name = f"{layer}.mlp.up_proj.weight"
    reweigh(getattr(bench, side), spoil(name, value))
    assert f"{name} holds NaN or infinite weights" in bench.refused()


def test_weights_that_overflow_in_the_dtype_asked_for_are_named(bench: Bench):
    reweigh(bench.target, spoil("model.norm.weight", 1e6))
    assert "model.norm.weight holds NaN or infinite" in bench.refused("--dtype", "float16")


@pytest.mark.parametrize("side", ["target", "drafter"])
@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-100],
        lambda data: data + b"\0",
        lambda data: data[:20],
        lambda data: b"",
        lambda data: b"\xff" * 64,
        lambda data: data.replace(b'"F32"', b'"F99"', 1),
        lambda data: data.replace(b'"data_offsets":[0,', b'"data_offsets":[4,', 1),
        lambda data: data.replace(b'"shape":[', b'"shape":[9,', 1),
        lambda data: data.replace(b'"shape"', b'"shope"', 1),
        lambda data: data.replace(b'"F32"', b'"F16"', 1),
    ],
)
def test_corrupt_weights_are_refused(bench: Bench, side: str, change: Callable[[bytes], bytes]):
    path = getattr(bench, side) / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    assert f"{path} is corrupt" in bench.refused()


@pytest.mark.parametrize("side", ["target", "drafter"])
def test_tensors_of_another_shape_name_or_number_are_named(bench: Bench, side: str):
    folder = getattr(bench, side)
    name = "norm.weight" if side == "drafter" else "model.norm.weight"
    whole = (folder / "model.safetensors").read_bytes()
    for change in (
        lambda weights: weights | {name: mx.zeros((33,))},
        lambda weights: {key: value for key, value in weights.items() if key != name},
        lambda weights: weights | {f"{name}.more": mx.zeros((2,))},
    ):
        (folder / "model.safetensors").write_bytes(whole)
        reweigh(folder, change)
        assert name in bench.refused()


def test_drafter_weights_of_another_kind_of_number_are_refused(bench: Bench):
    reweigh(bench.drafter, lambda weights: weights | {"norm.weight": mx.zeros((32,), mx.uint8)})
    assert "norm.weight is stored as mlx.core.uint8" in bench.refused()
    reweigh(bench.drafter, lambda weights: weights | {"fc.scales": mx.zeros((32, 3))})
    assert "fc.scales" in bench.refused()


def test_packed_weights_that_cannot_have_the_columns_of_the_config_are_refused(bench: Bench, tmp_path: Path):
    bench.target = families.save(tmp_path / "packed", "gpt_oss", quantized=True)
    rewrite(bench.target, intermediate_size=1)
    assert "which is no packing of the 1 columns the config calls for" in bench.refused()


@pytest.mark.parametrize("side", ["target", "drafter"])
@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "model-00002-of-00002.safetensors"}}, "lacks model-00002-of-00002.safetensors"),
        ({"weight_map": ["a"]}, "has no weight_map"),
        ({"weight_map": {"a": ["b"]}}, "has no weight_map"),
        ({}, "has no weight_map"),
        ([], "does not hold a JSON object"),
    ],
)
def test_an_index_that_does_not_match_the_folder_is_refused(
    bench: Bench, side: str, index: Any, message: str
):
    (getattr(bench, side) / "model.safetensors.index.json").write_text(json.dumps(index))
    assert message in bench.refused()


@pytest.mark.parametrize("side", ["target", "drafter"])
def test_paths_that_cannot_be_used_are_named(bench: Bench, side: str, tmp_path: Path):
    folder = getattr(bench, side)
    weights, config = folder / "model.safetensors", folder / "config.json"
    setattr(bench, side, weights)
    assert "is a file, not a folder" in bench.refused()
    setattr(bench, side, tmp_path / ("x" * 5000))
    assert "cannot be read: File name too long" in bench.refused()
    setattr(bench, side, folder)
    weights.unlink()
    weights.symlink_to(weights)
    assert f"{weights} cannot be read" in bench.refused()
    weights.unlink()
    weights.mkdir()
    assert f"{weights} cannot be read: Is a directory" in bench.refused()
    weights.rmdir()
    assert "holds no model*.safetensors" in bench.refused()
    shutil.copy(bench.target / "tokenizer.json", weights)
    assert "is corrupt" in bench.refused()
    config.unlink()
    weights.unlink()
    mx.save_safetensors(str(weights), {"a": mx.zeros((2,))})
    assert f"{config} is missing" in bench.refused()
    config.mkdir()
    assert f"{config} cannot be read: Is a directory" in bench.refused()


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


@pytest.mark.parametrize("prompt", ["", " ", "\n\t ", "\u3000"])
def test_an_empty_prompt_is_refused(bench: Bench, prompt: str):
    assert bench.refused(prompt=prompt) == "prompt prompt is empty"
    assert bench.refused("--chat", prompt=prompt) == "prompt prompt is empty"


def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths(bench: Bench):
    assert "has 600 tokens; the model's context is 512" in bench.refused(prompt="x" * 600)
    rewrite(bench.target, max_position_embeddings=20)
    assert "has 20 tokens; the model's context is 20" in bench.refused(prompt="x" * 20)


def test_a_prompt_that_is_no_text_or_does_not_go_through_the_template_is_refused(bench: Bench):
    assert "not valid Unicode" in bench.refused(prompt="a\udcff")
    path = bench.target / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"chat_template": "{{ raise_exception('no user here') }}"}))
    assert "no user here" in bench.refused("--chat")
    path.write_text(json.dumps(config | {"chat_template": "{% if %}"}))
    assert "chat template" in bench.refused("--chat")
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "chat_template"}))
    assert "chat template" in bench.refused("--chat")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(bench: Bench):
    def shorten(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        small = {name: w[:50] for name, w in weights.items() if w.shape[0] == tiny.VOCAB}
        assert small
        return weights | small

    reweigh(bench.target, shorten)
    rewrite(bench.target, vocab_size=50)
    assert "the tokenizer gives token" in bench.refused("--drafter", "none")


@pytest.mark.parametrize("command", ["throughput", "recall"])
def test_measurements_check_every_prompt_before_the_first_runs(bench: Bench, tmp_path: Path, command: str):
    rows = [needle_row(), needle_row(id="long", prompt=FACT + " long" * 200)]
    prompts = str(write(tmp_path / "own.jsonl", *rows))
    assert "prompt long has" in bench.refused(command=("eval", command, "--prompts", prompts))
