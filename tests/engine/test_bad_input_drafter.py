"""Drafters that cannot be used, through the command line: one line that names what is wrong, and no work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.engine import tiny
from tests.engine.refusals import Bench, reweigh, rewrite

DRAFTER_NEEDS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"),
    *("rms_norm_eps", "rope_theta", "block_size", "dflash_config"),
)
SECOND = {"conv_kernel_size": 3, "conv_group_size": 16, "selector_rank": 8}


def test_a_drafter_of_another_target_names_both_sides(bench: Bench, tmp_path: Path):
    cases = {
        "hidden size 64 in the drafter, 32 in the target": {"hidden_size": 64},
        "vocabulary 400 in the drafter, 300 in the target": {"vocab_size": 400},
        "number of target layers 9 in the drafter, 6 in the target": {"num_target_layers": 9},
    }
    for number, (message, changes) in enumerate(cases.items()):
        bench.drafter = tiny.save_drafter(tmp_path / str(number), **changes)
        assert message in bench.refused()


@pytest.mark.parametrize("name", DRAFTER_NEEDS)
def test_a_missing_field_of_the_drafter_is_named(bench: Bench, name: str):
    rewrite(bench.drafter, **{name: None})
    needed = "target_layer_ids" if name == "dflash_config" else name
    message = bench.refused()
    assert f"{needed} is missing" in message or (name == "dflash_config" and "mask_token_id" in message)


@pytest.mark.sampled(3, 1)
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
        ({"block_size": 513}, "block_size must be at most 512, not 513"),
        ({"block_size": 10**12}, f"block_size must be less than {2**31}, not {10**12}"),
        ({"head_dim": 10**7}, "head_dim must be at most 4096, not 10000000"),
        ({"rope_theta": 1e308}, "rope_theta must be at most 1e+18, not 1e+308"),
        ({"architectures": 5}, "not a DFlash drafter: architectures is 5"),
        ({"architectures": "DFlashDraftModel"}, "not a DFlash drafter: architectures is DFlashDraftModel"),
        ({"architectures": [5]}, "not a DFlash drafter: architectures is [5]"),
        ({"architectures": 5, "dflash_config": None, "model_type": None}, "names neither architectures"),
        ({"num_hidden_layers": 1e7, "layer_types": None}, "is 10000000.0, the weights hold 2 layers"),
        ({"num_hidden_layers": 10**7, "layer_types": None}, "is 10000000, the weights hold 2 layers"),
    ],
)
def test_a_drafter_config_that_makes_no_sense_is_refused(bench: Bench, changes: dict[str, Any], message: str):
    rewrite(bench.drafter, **changes)
    assert message in bench.refused()


def test_the_longest_block_is_accepted(bench: Bench):
    rewrite(bench.drafter, block_size=512)
    bench.assert_accepted("--block", "1024")


def test_more_candidates_than_can_be_scored_are_refused(bench: Bench):
    nested = tiny.drafter_config()["dflash_config"] | SECOND
    for count, message in {
        4097: "selector_top_k must be at most 4096, not 4097",
        4096: "the weights lack candidate_selector",
    }.items():
        rewrite(
            bench.drafter,
            architectures=["DFlash2DraftModel"],
            vocab_size=5000,
            dflash_config=nested | {"selector_top_k": count},
        )
        assert message in bench.refused()


def test_drafter_weights_of_another_kind_of_number_are_refused(bench: Bench):
    reweigh(bench.drafter, lambda weights: weights | {"norm.weight": mx.zeros((32,), mx.uint8)})
    assert "norm.weight is stored as mlx.core.uint8" in bench.refused()
    reweigh(bench.drafter, lambda weights: weights | {"fc.scales": mx.zeros((32, 3))})
    assert "fc.scales" in bench.refused()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("prompt-lookup+", "prompt-lookup+ lacks the drafter behind it; give prompt-lookup+FOLDER"),
        ("prompt-lookup+prompt-lookup+", "prompt-lookup+ lacks the drafter behind it"),
        ("prompt-lookup+none", "'none' is neither a model here nor one of"),
        ("prompt-lookup:٣", "the shortest match must be a number of tokens"),
        pytest.param("prompt-lookup:" + "9" * 5000, "the shortest match must be a number", id="5000 digits"),
    ],
)
def test_a_text_that_names_no_drafter_is_refused(bench: Bench, spec: str, message: str):
    assert message in bench.refused("--drafter", spec)


@pytest.mark.parametrize(
    "block",
    ["٣", "8٣", "", "0", "-3", "+3", "3.0", " 3", "1025", pytest.param("9" * 5000, id="5000 digits")],
)
def test_a_block_that_is_no_number_in_plain_digits_is_refused(bench: Bench, block: str):
    message = bench.refused("--block", block)
    assert message == f"--block must be auto or a number from 1 to 1024, not {block!r}"
