"""What a --drafter text opens, and what it says when it cannot."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3 import ModelArgs

from engine.drafters.autoregressive import Autoregressive
from engine.drafters.masked_diffusion import MaskedDiffusion
from engine.drafters.prompt_lookup import PromptLookup
from engine.drafters.registry import ARCHITECTURES, KINDS, kind_of, open_drafter, refuse_other_tokens
from engine.errors import ConfigurationError, DrafterMismatchError, ModelError
from engine.networks.mdlm import MaskedDiffusionModel, mask_token
from engine.target.loading import LoadedTarget, load_target, tokenizer_of
from tests.engine import tiny

DIFFUSION = tiny.FAMILIES["qwen3"][1] | {
    "model_type": "a2d-qwen3",
    "architectures": ["A2DQwen3LMHeadModel"],
    "mask_token_id": tiny.MASK,
}


def save_diffusion(folder: Path, quantized: bool = False, **changes: Any) -> Path:
    """A folder as published; tied tables are stored twice, as some are."""
    config = DIFFUSION | changes
    folder.mkdir(parents=True)
    mx.random.seed(6)
    model = MaskedDiffusionModel(ModelArgs.from_dict(config))
    if quantized:
        config["quantization"] = {"group_size": 32, "bits": 4}
        nn.quantize(model, group_size=32, bits=4)
    weights = dict(tree_flatten(model.parameters()))
    if not quantized:
        weights["lm_head.weight"] = mx.array(weights["model.embed_tokens.weight"])
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    tiny.save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def target(folders: tuple[Path, Path]) -> LoadedTarget:
    return load_target(folders[0])


@pytest.fixture(scope="module")
def diffusion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_diffusion(tmp_path_factory.mktemp("models") / "diffusion")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_target(tmp_path_factory.mktemp("models") / "small", "qwen3")


def changed(folder: Path, copy: Path, **changes: Any) -> Path:
    """A copy whose config.json differs; a value of None takes the field out."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if value is not None}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_every_kind_has_a_name_of_its_own():
    assert list(KINDS) == ["dflash", "dflash2", "prompt-lookup", "autoregressive", "masked-diffusion", "mtp"]
    assert set(ARCHITECTURES.values()) == set(KINDS) - {"prompt-lookup", "autoregressive", "mtp"}


@pytest.mark.parametrize(("spec", "shortest"), [("prompt-lookup", 1), ("prompt-lookup:3", 3)])
def test_prompt_lookup_needs_no_folder(target: LoadedTarget, spec: str, shortest: int):
    loaded = open_drafter(spec, target)
    assert isinstance(loaded.drafter, PromptLookup)
    assert (loaded.drafter.shortest, loaded.drafter.name, loaded.card) == (shortest, "prompt-lookup", None)


@pytest.mark.parametrize("number", ["0", "33", "x", "", "-1", "1.5"])
def test_a_shortest_match_that_makes_no_sense_is_refused(target: LoadedTarget, number: str):
    with pytest.raises(ConfigurationError, match="the shortest match"):
        open_drafter(f"prompt-lookup:{number}", target)


def test_folders_say_which_kind_they_are(
    folders: tuple[Path, Path], target: LoadedTarget, small: Path, diffusion: Path
):
    expected = {folders[1]: "dflash", small: "autoregressive", diffusion: "masked-diffusion"}
    for folder, kind in expected.items():
        for spec in (str(folder), f"{kind}:{folder}"):
            loaded = open_drafter(spec, target)
            assert loaded.drafter.name == kind
            assert loaded.card is not None
            assert loaded.card.id == folder.name
            loaded.drafter.observe([5, 6], None if not loaded.drafter.target_layers else mx.zeros((1, 2, 96)))
            assert len(loaded.drafter.propose(7, 3)) == 3


def test_dflash2_is_told_from_dflash(folders: tuple[Path, Path], tmp_path: Path):
    other = changed(folders[1], tmp_path / "other", architectures=["DFlash2DraftModel"])
    assert (kind_of(folders[1]), kind_of(other)) == ("dflash", "dflash2")


def test_a_kind_that_is_not_the_folders_is_refused(target: LoadedTarget, small: Path):
    with pytest.raises(ConfigurationError, match="a drafter of the kind autoregressive"):
        open_drafter(f"masked-diffusion:{small}", target)
    with pytest.raises(ConfigurationError, match="lacks its folder; give dflash:FOLDER"):
        open_drafter("dflash:", target)


def test_what_is_no_drafter_is_answered_with_those_there_are(target: LoadedTarget, tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"'eagle:x' is neither.*dflash2, prompt-lookup, auto"):
        open_drafter("eagle:x", target)
    with pytest.raises(ModelError, match=r"missing is not a folder"):
        open_drafter(f"autoregressive:{tmp_path / 'missing'}", target)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="neither architectures nor a model_type"):
        open_drafter(str(tmp_path), target)
    with pytest.raises(ModelError, match=r"config\.json is a file, not a folder"):
        open_drafter(str(tmp_path / "config.json"), target)


def test_another_vocabulary_is_refused_naming_both_sides(target: LoadedTarget, tmp_path: Path):
    small = tiny.save_target(tmp_path / "small", "llama", vocab_size=310)
    diffusion = save_diffusion(tmp_path / "diffusion", vocab_size=310)
    for folder in (small, diffusion):
        with pytest.raises(DrafterMismatchError, match="vocabulary 310 in the drafter, 300 in the target"):
            open_drafter(str(folder), target)


def test_another_tokenizer_of_the_same_size_is_refused(
    target: LoadedTarget, small: Path, diffusion: Path, tmp_path: Path
):
    for folder in (small, diffusion):
        copy = changed(folder, tmp_path / folder.name)
        tokenizer = json.loads((copy / "tokenizer.json").read_text())
        letters = tokenizer["model"]["vocab"]
        letters["A"], letters["B"] = letters["B"], letters["A"]
        (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
        with pytest.raises(DrafterMismatchError, match=r"is 'B' in the drafter, 'A' in the target.*2 tokens"):
            open_drafter(str(copy), target)


class Words:
    def __init__(self, **ids: int) -> None:
        self._ids = ids

    def get_vocab(self) -> dict[str, int]:
        return self._ids


def test_a_tokenizer_may_know_more_tokens_than_the_other():
    refuse_other_tokens(Words(a=0, b=1, mask=2), Words(a=0, b=1))
    refuse_other_tokens(Words(a=0), Words(a=0, b=1))
    with pytest.raises(DrafterMismatchError, match="token 1 is 'c' in the drafter, 'b' in the target"):
        refuse_other_tokens(Words(a=0, c=1), Words(a=0, b=1))


def test_a_diffusion_folder_says_how_to_draft_and_the_spec_overrules_it(
    target: LoadedTarget, diffusion: Path, tmp_path: Path
):
    copy = changed(diffusion, tmp_path / "copy", draft_block_size=5, draft_steps=3)
    for spec, expected in (
        (str(diffusion), (8, 2, 256)),
        (str(copy), (5, 3, 256)),
        (f"masked-diffusion:{copy}", (5, 3, 256)),
        (f"masked-diffusion:{copy}?steps=1", (5, 1, 256)),
        (f"masked-diffusion:{copy}?context=64,block=16", (16, 3, 64)),
    ):
        drafter = open_drafter(spec, target).drafter
        assert isinstance(drafter, MaskedDiffusion)
        assert (drafter.block_size, drafter.steps, drafter.context) == expected


def test_a_folder_with_a_question_mark_in_its_name_is_a_folder(
    target: LoadedTarget, diffusion: Path, tmp_path: Path
):
    copy = changed(diffusion, tmp_path / "what?steps=9")
    drafter = open_drafter(f"masked-diffusion:{copy}", target).drafter
    assert isinstance(drafter, MaskedDiffusion)
    assert drafter.steps == 2


def test_a_layout_that_transformers_does_not_know_is_no_warning(target: LoadedTarget, diffusion: Path):
    heard: list[str] = []
    logger = logging.getLogger("transformers")
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        open_drafter(str(diffusion), target)
        assert heard == []
        tokenizer_of(diffusion, None)
        assert any("a2d-qwen3" in message for message in heard)  # or there was nothing to hold back
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "steps",
        "steps=",
        "steps=0",
        "steps=x",
        "block=1",
        "block=513",
        "context=0",
        "seed=1",
        "steps=1,steps=2",
    ],
)
def test_a_setting_of_the_spec_that_makes_no_sense_is_refused(
    target: LoadedTarget, diffusion: Path, text: str
):
    with pytest.raises(ConfigurationError, match=r"cannot be set; give each of block=2 to 512, steps=1"):
        open_drafter(f"masked-diffusion:{diffusion}?{text}", target)


@pytest.mark.parametrize(
    ("field", "value"),
    [("draft_steps", 0), ("draft_steps", True), ("draft_block_size", 1), ("draft_context", "256")],
)
def test_a_setting_of_the_folder_that_makes_no_sense_is_refused(
    target: LoadedTarget, diffusion: Path, tmp_path: Path, field: str, value: object
):
    copy = changed(diffusion, tmp_path / "copy", **{field: value})
    with pytest.raises(ModelError, match=rf"config\.json: {field} must be a number from .*, not {value!r}"):
        open_drafter(str(copy), target)


def test_a_quantized_diffusion_model_is_loaded_as_it_is(target: LoadedTarget, tmp_path: Path):
    loaded = open_drafter(str(save_diffusion(tmp_path / "packed", quantized=True)), target)
    assert loaded.card is not None
    assert loaded.card.quantization == "affine 4-bit group 32"
    loaded.drafter.observe([5, 6], None)
    assert len(loaded.drafter.propose(7, 4).tokens.tolist()) == 4


def test_a_dtype_is_taken_up(target: LoadedTarget, small: Path, diffusion: Path):
    for folder in (small, diffusion):
        loaded = open_drafter(str(folder), target, "bfloat16")
        assert loaded.card is not None
        assert loaded.card.dtype == "bfloat16"
    with pytest.raises(ConfigurationError, match="dtype 'int8'"):
        open_drafter(str(diffusion), target, "int8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 64}, "shape"),
        ({"num_hidden_layers": 4}, r"model\.layers\.3"),
        ({"attention_bias": True}, "attention_bias is not supported"),
    ],
)
def test_a_diffusion_folder_that_does_not_fit_itself_is_refused(
    target: LoadedTarget, diffusion: Path, tmp_path: Path, changes: dict[str, Any], message: str
):
    with pytest.raises(ModelError, match=message):
        open_drafter(str(changed(diffusion, tmp_path / "copy", **changes)), target)


def test_weights_that_are_not_numbers_are_refused(target: LoadedTarget, diffusion: Path, tmp_path: Path):
    copy = changed(diffusion, tmp_path / "copy")
    weights = dict(mx.load(str(copy / "model.safetensors")))
    weights["model.norm.weight"] = mx.full((32,), mx.nan)
    mx.save_safetensors(str(copy / "model.safetensors"), weights)
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds NaN"):
        open_drafter(str(copy), target)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"mask_token": "<m>", "added_tokens_decoder": {"9": {"content": "<m>"}}}},
        {"tokenizer_config.json": {"mask_token": {"content": "<m>"}}, "added_tokens.json": {"<m>": 9}},
        {
            "special_tokens_map.json": {"mask_token": {"content": "<m>"}},
            "tokenizer.json": {"added_tokens": [{"id": 8, "content": "<n>"}, {"id": 9, "content": "<m>"}]},
        },
    ],
)
def test_the_mask_is_found_in_the_tokenizers_files(tmp_path: Path, files: dict[str, Any]):
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    assert mask_token(tmp_path, {}) == 9
    assert mask_token(tmp_path, {"mask_token_id": 4}) == 4


def test_a_mask_nothing_names_is_an_error_with_the_remedy(
    target: LoadedTarget, diffusion: Path, tmp_path: Path
):
    copy = changed(diffusion, tmp_path / "copy", mask_token_id=None)
    with pytest.raises(ModelError, match="add mask_token_id to its"):
        open_drafter(str(copy), target)
    (copy / "added_tokens.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"added_tokens\.json does not hold a JSON object"):
        open_drafter(str(copy), target)


def test_twins_share_what_was_loaded(target: LoadedTarget, small: Path, diffusion: Path):
    first = open_drafter(str(small), target).drafter
    second = open_drafter(str(diffusion), target).drafter
    assert isinstance(first, Autoregressive)
    assert isinstance(second, MaskedDiffusion)
    one, two = first.twin(), second.twin()
    assert (one._model, two.network) == (first._model, second.network)
