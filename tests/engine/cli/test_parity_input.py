"""``parity`` with cases that cannot be used: exit code 2 and one clear error, before any work."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.cli import run
from tests.engine.cli.parity_cases import DATA, Arrays, copy, parity, reconfigure


def drop(name: str) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.__delitem__(name)


def put(name: str, index: Any, value: Any) -> Callable[[Arrays], None]:
    return lambda arrays: arrays[name].__setitem__(index, value)


def cut(name: str) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.update({name: arrays[name][..., :-1]})


def turn(name: str, kind: Any) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.update({name: arrays[name].astype(kind)})


NAMES = (
    "target_embedding",
    "target_lm_head",
    "target_hidden",
    "blocks",
    "spans",
    "round1_hidden",
    "round2_path",
)


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((drop(name), f"lacks {name}") for name in NAMES),
        *((cut(name), f"{name} is \\(") for name in NAMES if name != "blocks"),
        (cut("blocks"), r"round1_hidden is \(1, 8, 64\), should be \(1, 7, 64\)"),
        (put("target_hidden", (0, 0, 0), np.inf), "target_hidden holds NaN or infinity"),
        (turn("blocks", np.float32), "blocks is of type float32"),
        (turn("round1_logits", np.complex64), "round1_logits is of type complex64"),
        (turn("target_lm_head", str), "target_lm_head is of type"),
        (put("blocks", (0, 0), 512), "blocks holds tokens outside the vocabulary of 512"),
        (put("blocks", (1, 3), -1), "blocks holds tokens outside"),
        (put("round1_path", (0, 0), 4000), "round1_path holds tokens outside"),
        (put("spans", (1, 0), 20), "spans .* do not run on"),
        (put("spans", (1, 1), 30), "spans .* do not run on from 0 within 29 rows"),
        (put("spans", (0, 1), -3), "spans .* do not run on"),
    ],
)
def test_a_reference_that_cannot_be_used_is_exit_2(change: Any, message: str, capsys, tmp_path: Path):
    code, out, err = parity(capsys, copy("dflash2", tmp_path, change), "--json")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert re.search(message, err)


def cut_file(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100]) and None


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def set_weight(folder: Path) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    weights["fc.weight"] = mx.full(weights["fc.weight"].shape, mx.nan)
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def widen(folder: Path) -> None:
    reconfigure(folder, conv_kernel_size=4)


def flip_bytes(folder: Path) -> None:
    data = bytearray((folder / "golden.npz").read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    (folder / "golden.npz").write_bytes(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "golden.npz").unlink(), "golden.npz is missing"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no model"),
        (cut_file("golden.npz"), "golden.npz is corrupt"),
        (cut_file("model.safetensors"), "model.safetensors is corrupt"),
        (write("golden.npz", b"no zip"), "golden.npz is corrupt"),
        (write("golden.npz", b""), "golden.npz is corrupt"),
        (flip_bytes, "golden.npz is corrupt"),
        (write("config.json", b"[]"), "config.json does not hold a JSON object"),
        (set_weight, "fc.weight holds NaN"),
        (widen, "base_kernel"),
    ],
)
def test_files_that_cannot_be_used_are_exit_2(change: Any, message: str, capsys, tmp_path: Path):
    folder = copy("dflash2", tmp_path)
    change(folder)
    code, out, err = parity(capsys, folder, "--json")
    assert (code, out) == (2, "")
    assert message in err


LAYERS = "config.json: num_hidden_layers is {}, the weights hold 2 layers"
ROPE = {"rope_type": "dynamic", "rope_theta": 50000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("full", {"hidden_size": 10**12}, f"hidden_size must be less than {2**31}, not {10**12}"),
        ("full", {"hidden_size": 10**7}, "fc.weight is (64, 192), config says (10000000, 30000000)"),
        ("full", {"hidden_size": 0}, "hidden_size must be positive, not 0"),
        ("full", {"hidden_size": float("inf")}, "hidden_size must be a whole number, not inf"),
        ("full", {"num_attention_heads": 2**31}, f"num_attention_heads must be less than {2**31}"),
        ("full", {"num_attention_heads": 10**30}, f"num_attention_heads must be less than {2**31}"),
        ("full", {"num_attention_heads": 2**31 - 2}, "config.json cannot be loaded: Integer value"),
        ("full", {"num_key_value_heads": 10**9}, "4 heads are no multiple of 1000000000"),
        ("full", {"head_dim": 10**7}, "head_dim must be at most 4096, not 10000000"),
        ("full", {"intermediate_size": 2**31 - 1}, "mlp.down_proj.weight is"),
        ("full", {"vocab_size": 10**9}, "should be (1000000000, 64)"),
        ("full", {"num_hidden_layers": 10**7}, LAYERS.format(10**7)),
        ("full", {"num_hidden_layers": 10**7, "layer_types": None}, LAYERS.format(10**7)),
        ("full", {"num_hidden_layers": 1e7, "layer_types": None}, LAYERS.format(1e7)),
        ("full", {"num_hidden_layers": -1}, "num_hidden_layers must be positive, not -1"),
        ("full", {"layer_types": ["full_attention"] * 10**5}, "layer_types has 100000 entries for 2 layers"),
        ("full", {"block_size": 10**7}, "block_size must be at most 512, not 10000000"),
        ("full", {"target_layer_ids": [10**12]}, "do not fit 6 target layers"),
        ("full", {"architectures": 5}, "not a DFlash drafter: architectures is 5"),
        ("full", {"dflash_config": 5}, "dflash_config must be an object, not 5"),
        (
            "full",
            {"quantization": {"group_size": 10**12, "bits": 4}},
            "group_size 1000000000000 is not one of",
        ),
        ("dflash2", {"conv_kernel_size": 10**7}, "attention_conv.base_kernel is (2, 3, 64)"),
        ("dflash2", {"conv_kernel_size": 2**31}, "conv_kernel_size must be less than"),
        ("dflash2", {"conv_group_size": 10**9}, "no multiple of conv_group_size 1000000000"),
        ("dflash2", {"selector_rank": 10**9}, "is (8, 64), config says (1000000000, 64)"),
        ("dflash2", {"selector_top_k": 10**9}, "selector_top_k 1000000000 exceeds the vocabulary"),
        ("dflash2", {"selector_top_k": 4097, "vocab_size": 10**4}, "selector_top_k must be at most 4096"),
        ("dynamic", {"rope_parameters": ROPE | {"rope_theta": 1e308}}, "rope_theta must be at most 1e+18"),
        ("dynamic", {"rope_parameters": ROPE | {"factor": 10**30}}, "factor must be at most 1e+18"),
        (
            "dynamic",
            {"rope_parameters": ROPE | {"factor": float("nan")}},
            "must be a positive number, not nan",
        ),
    ],
)
def test_bad_config_is_exit_2_before_anything_is_built(
    case: str, changes: dict[str, Any], message: str, capsys, tmp_path: Path
):
    folder = copy(case, tmp_path)
    reconfigure(folder, **changes)
    mx.reset_peak_memory()
    memory, began = mx.get_active_memory(), process_time()
    code, out, err = parity(capsys, folder, "--json")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith(f"kakeya_engine: {folder}")
    assert message in err
    assert process_time() - began < 10, "seconds of a processor; it takes hundredths"
    assert mx.get_peak_memory() - memory < 2**24, "bytes; the case has less than one million"


def test_high_layer_number_is_not_a_layer_count(capsys, tmp_path: Path):
    folder = copy("full", tmp_path)
    weights = mx.load(str(folder / "model.safetensors"))
    weights["layers.9999999.mlp.up_proj.weight"] = mx.zeros((2,))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    reconfigure(folder, num_hidden_layers=10**7, layer_types=None)
    code, out, err = parity(capsys, folder)
    assert (code, out) == (2, "")
    assert "num_hidden_layers is 10000000, the weights hold 3 layers" in err


def test_bad_case_stops_all_before_any_work(capsys, tmp_path: Path):
    copy("full", tmp_path)
    (copy("dynamic", tmp_path) / "golden.npz").unlink()
    code, out, err = parity(capsys, tmp_path)
    assert (code, out) == (2, "")
    assert "dynamic/golden.npz is missing" in err


@pytest.mark.parametrize("arguments", [("nowhere",), (".", "--tolerance", "nan"), (".", "--tolerance", "-1")])
def test_arguments_that_make_no_sense_are_exit_2(
    arguments: tuple[str, ...], capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    copy("full", tmp_path)
    monkeypatch.chdir(tmp_path)
    code, out, err = parity(capsys, *arguments)
    assert (code, out) == (2, "")
    assert arguments[-1] in err


def test_a_folder_without_cases_is_exit_2(capsys, tmp_path: Path):
    code, _, err = parity(capsys, tmp_path)
    assert code == 2
    assert "holds no case" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either --golden DIR or --target"),
        (("--target", "--golden", "cases"), "give either --golden DIR or --target"),
        (("--target", "--reference", "torch"), "leave it out with --target"),
        (("--target", "--model", "nowhere"), "nowhere"),
        (("--golden", str(DATA), "--dtype", "int8"), "--dtype 'int8' is not one of"),
        (("--golden", str(DATA), "--workload-sha", "a" * 40), "--request-nonce"),
    ],
)
def test_what_is_to_be_compared_must_be_clear(arguments: tuple[str, ...], message: str, capsys):
    assert run(["parity", *arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_a_reference_name_that_is_no_text_is_exit_2(capsys, tmp_path: Path):
    code, _, err = parity(capsys, copy("full", tmp_path, lambda arrays: arrays.update(reference=np.zeros(3))))
    assert code == 2
    assert "reference is (3,), should be ()" in err


@pytest.mark.parametrize("name", ["torch\ud800", "tor\u202ech", "", "t" * 401])
def test_unprintable_reference_name_is_exit_2(name: str, capsys, tmp_path: Path):
    code, _, err = parity(
        capsys, copy("full", tmp_path, lambda arrays: arrays.update(reference=np.array(name)))
    )
    assert code == 2
    assert "reference must be 1 to 400 printable characters" in err
