"""A target is packed as asked, says so, decodes as itself, and what cannot be packed is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.errors import ConfigurationError, ModelError
from engine.target.loading import load_target
from engine.target.model import Target
from engine.target.quantize import parse_quantize, quantize_target
from tests.engine import tiny


def packed_modules(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if "scales" in module}


@pytest.mark.parametrize(("text", "expected"), [("4", (4, 64)), ("8,32", (8, 32)), ("3,128", (3, 128))])
def test_bits_may_stand_alone(text: str, expected: tuple[int, int]):
    assert parse_quantize(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not BITS or BITS,GROUP"),
        ("four", "'four' is not BITS"),
        ("4,", "'4,' is not BITS"),
        ("4,64,1", "'4,64,1' is not BITS"),
        ("-4", "'-4' is not BITS"),
        ("7", "7: bits 7 is not one of 2, 3, 4, 5, 6, 8"),
        ("0,64", "bits 0 is not one of"),
        ("4,16", "group 16 is not one of 32, 64, 128"),
        ("4,0", "group 0 is not one of"),
    ],
)
def test_other_texts_are_refused_with_the_value(text: str, message: str):
    with pytest.raises(ConfigurationError, match=message):
        parse_quantize(text)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_matrix_is_packed_as_mlx_would(bits: int):
    model, before = tiny.build("llama"), tiny.build("llama")
    quantize_target(model, f"{bits},32")
    packed = packed_modules(model)
    originals = {name: module for name, module in before.named_modules() if hasattr(module, "to_quantized")}
    assert set(packed) == set(originals)
    assert {"model.embed_tokens", "lm_head"} < set(packed)
    for name, module in packed.items():
        assert (module.bits, module.group_size, module.mode) == (bits, 32, "affine")
        parts = mx.quantize(originals[name].weight, 32, bits)
        for found, expected in zip((module.weight, module.scales, module.biases), parts, strict=True):
            assert mx.array_equal(found, expected).item()


def test_the_card_says_what_was_packed_and_counts_what_was_there(folders: tuple[Path, Path]):
    plain = load_target(folders[0])
    for text, name in (("4,32", "affine 4-bit group 32"), ("8,32", "affine 8-bit group 32")):
        card = load_target(folders[0], quantize=text).card
        assert card.quantization == name
        assert (card.parameters, card.dtype) == (plain.card.parameters, plain.card.dtype)
    assert plain.card.quantization is None


def test_groups_that_do_not_divide_are_refused_with_those_that_do(folders: tuple[Path, Path]):
    message = r"--quantize 4,64: .* has 32 columns, which groups of 64 do not divide; give a group of 32$"
    with pytest.raises(ConfigurationError, match=message):
        load_target(folders[0], quantize="4,64")
    odd = tiny.build("llama", intermediate_size=72)
    with pytest.raises(ConfigurationError, match=r"72 columns, .*; this model cannot be packed"):
        quantize_target(odd, "4,32")


def test_a_packed_model_is_refused():
    model = tiny.build("qwen3")
    quantize_target(model, "4,32")
    with pytest.raises(ModelError, match=r"--quantize 8,32: the model is packed already \(model"):
        quantize_target(model, "8,32")


def test_a_model_without_matrices_is_refused():
    with pytest.raises(ModelError, match="no matrix that can be packed"):
        quantize_target(nn.RMSNorm(32), "4")


class Choosy(nn.Module):
    """A model that wants one matrix finer and one not packed, as routers of experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.table, self.rest = nn.Linear(64, 8), nn.Linear(24, 8), nn.Linear(64, 64)

    @property
    def quant_predicate(self) -> Any:
        chosen: dict[str, Any] = {"router": {"group_size": 32, "bits": 8}, "table": False}
        return lambda name, _module: chosen.get(name, True)


def test_what_the_model_says_of_its_matrices_is_heard():
    model = Choosy()
    quantize_target(model, "4,64")
    packed = {name: (module.bits, module.group_size) for name, module in packed_modules(model).items()}
    assert packed == {"router": (8, 32), "rest": (4, 64)}


@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("text", ["8,32", "4,32"])
def test_drafting_gives_the_packed_models_own_tokens(family: str, text: str):
    model, prompt = tiny.build(family), [tiny.seeded(5).randrange(5, tiny.VOCAB) for _ in range(21)]
    quantize_target(model, text)
    truth = tiny.plain_tokens(model, prompt, 40)
    drafter = tiny.ScriptedDrafter(prompt + truth, wrong=0.3)
    steps = list(decode(Target(model), drafter, prompt, max_tokens=40, draft_length=FixedDraftLength(5)))
    assert [token for step in steps for token in step.tokens] == truth
