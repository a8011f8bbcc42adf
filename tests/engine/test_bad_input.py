"""Bad input, through the command line: one line that names what is wrong, code 2, and no model has run.

Here is what targets and drafters have in common, and prompts; `test_bad_input_target` and
`test_bad_input_drafter` have the rest.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.evaluation.test_prompts import FACT, needle_row, write
from tests.engine.refusals import Bench, reweigh, rewrite, spoil


def test_good_input_gets_as_far_as_a_model(bench: Bench):
    bench.assert_accepted()


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


@pytest.mark.parametrize("side", ["target", "drafter"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_is_not_waited_for(bench: Bench, side: str, name: str):
    path = getattr(bench, side if name != "tokenizer.json" else "target") / name
    path.unlink()
    os.mkfifo(path)
    assert bench.refused() == f"{path} is not a file"


def test_a_file_without_end_is_not_read_to_its_end(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.cli.generate.LARGEST_PROMPT", 1000)
    message = bench.refused(command=("generate", "--file", "/dev/zero"))
    assert message == "/dev/zero holds more than 1000 characters"


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
    for template in ("{% if %}", 5, "{% for i in range(10**12) %}{% endfor %}", "{{ 1 / 0 }}"):
        path.write_text(json.dumps(config | {"chat_template": template}))
        assert "chat template" in bench.refused("--chat")
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "chat_template"}))
    assert "chat template" in bench.refused("--chat")


def test_a_tokenizer_that_fails_at_a_prompt_is_refused(bench: Bench):
    """Its library ends with something that is no `Exception`."""
    path = bench.target / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps(tokenizer | {"pre_tokenizer": split}))
    assert bench.refused(prompt="a" * 40 + "b").startswith("prompt prompt cannot be tokenized: ")


@pytest.mark.parametrize("value", ["nan", "inf", "1e400", "0.5"])
def test_a_speedup_that_is_no_number_is_refused_before_anything_is_measured(bench: Bench, value: str):
    message = bench.refused(command=("eval", "throughput", "--claim", "speedup", "--min-speedup", value))
    assert "--min-speedup must be a finite number of at least 1" in message


@pytest.mark.parametrize("command", ["throughput", "recall"])
def test_measurements_check_every_prompt_before_the_first_runs(bench: Bench, tmp_path: Path, command: str):
    rows = [needle_row(), needle_row(id="long", prompt=FACT + " long" * 200)]
    prompts = str(write(tmp_path / "own.jsonl", *rows))
    assert "prompt long has" in bench.refused(command=("eval", command, "--prompts", prompts))
