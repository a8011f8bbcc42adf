"""Folders that cannot be used are refused with one clear error, before any work."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from engine.config import Options, open_engine
from engine.detokenize import text_of
from engine.draft_length import AdaptiveDraftLength, FixedDraftLength
from engine.errors import ConfigurationError, DrafterMismatchError, ModelError
from engine.networks.dflash import DFlash, DFlashConfig
from engine.networks.dflash2 import build_network
from engine.stops import Stops
from engine.target.folder import card_of
from engine.target.loading import LoadedDrafter, load_drafter, load_target
from tests.engine import families, tiny


@pytest.fixture
def target_folder(folders: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders[0], tmp_path / "target"))


@pytest.fixture
def drafter_folder(folders: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders[1], tmp_path / "drafter"))


def rewrite(folder: Path, **changes: Any) -> None:
    """Change fields of a config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def save(model: Any, folder: Path) -> None:
    """Put the weights of a model in place of a folder's."""
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def fits(module: Any, group: int) -> bool:
    """Whether a matrix can be packed in groups of this size."""
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % group == 0


def parameters_of(loaded: LoadedDrafter) -> dict[str, mx.array]:
    """The weights a drafter works with."""
    return dict(tree_flatten(loaded.drafter.network.parameters()))  # type: ignore[attr-defined]


def spoil(folder: Path, name: str, value: float) -> None:
    """Put a value into one weight."""
    path = str(folder / "model.safetensors")
    weights = dict(mx.load(path))
    spoiled = mx.array(weights[name])
    spoiled[0] = value
    mx.eval(spoiled, *weights.values())
    mx.save_safetensors(path, weights | {name: spoiled})


def test_a_target_says_what_it_is(folders: tuple[Path, Path]):
    loaded = load_target(folders[0])
    weights = (folders[0] / "model.safetensors").read_bytes()
    assert loaded.card.weights_sha256 == hashlib.sha256(weights).hexdigest()
    assert (loaded.card.id, loaded.card.quantization) == ("target", None)
    assert loaded.card.dtype == "float32"
    assert loaded.stops == {tiny.EOS, tiny.END}
    assert (loaded.context, loaded.target.vocab_size) == (512, tiny.VOCAB)


def test_an_id_that_stands_for_nothing_gives_no_text(folders: tuple[Path, Path], tmp_path: Path):
    folder = shutil.copytree(folders[0], tmp_path / "target")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    whole = {vocabulary[letter]: letter for letter in "abc"}
    del vocabulary["b"]
    path.write_text(json.dumps(tokenizer))
    loaded = load_target(folder).tokenizer
    tokens = list(whole)
    assert text_of(loaded, tokens, Stops()) == "ac"
    assert Stops((), ("ac",), loaded).find(tokens) == 3


def test_the_dtype_can_be_chosen(folders: tuple[Path, Path]):
    assert load_target(folders[0], "bfloat16").card.dtype == "bfloat16"
    with pytest.raises(ConfigurationError, match="'int8'"):
        load_target(folders[0], "int8")


def test_a_quantized_target_is_loaded_and_described(target_folder: Path):
    model = tiny.build(hidden_size=64, intermediate_size=64)
    nn.quantize(model, group_size=32, bits=4)
    save(model, target_folder)
    rewrite(target_folder, hidden_size=64, intermediate_size=64, quantization={"group_size": 32, "bits": 4})
    assert load_target(target_folder).card.quantization == "affine 4-bit group 32"


def test_what_a_file_says_of_its_packing_counts_not_what_the_config_says(target_folder: Path):
    rewrite(target_folder, quantization={"group_size": 64, "bits": 8})
    assert load_target(target_folder).card.quantization is None
    model = tiny.build(hidden_size=64, intermediate_size=64)
    nn.quantize(model, 32, 4, class_predicate=lambda name, m: hasattr(m, "to_quantized") and "mlp" in name)
    nn.quantize(model, 64, 8, class_predicate=lambda name, m: name.endswith("embed_tokens"))
    save(model, target_folder)
    rewrite(target_folder, hidden_size=64, intermediate_size=64, quantization={"group_size": 32, "bits": 4})
    card = load_target(target_folder).card
    assert card.quantization == "affine 4-bit group 32, affine 8-bit group 64"
    unpacked = tiny.build(hidden_size=64, intermediate_size=64)
    assert card.parameters == sum(value.size for _, value in tree_flatten(unpacked.parameters()))


@pytest.mark.parametrize(("group", "bits"), [(32, 2), (32, 3), (64, 5), (64, 6), (32, 8)])
def test_parameters_are_counted_as_if_nothing_were_packed(group: int, bits: int):
    model = tiny.build(hidden_size=64, intermediate_size=128)
    expected = sum(value.size for _, value in tree_flatten(model.parameters()))
    nn.quantize(model, group, bits, class_predicate=lambda _, m: fits(m, group))
    card = card_of(Path("model"), [Path(__file__)], model)
    assert card.parameters == expected
    assert card.quantization == f"affine {bits}-bit group {group}"


def test_decay_rates_of_recurrent_layers_keep_their_type(tmp_path: Path):
    model = load_target(families.save(tmp_path / "qwen", "qwen3_5"), "bfloat16").target.model
    dtypes = {name.split(".")[-1]: value.dtype for name, value in tree_flatten(model.parameters())}
    assert (dtypes.pop("A_log"), set(dtypes.values())) == (mx.float32, {mx.bfloat16})


def test_the_context_is_unknown_where_the_config_does_not_say(tmp_path: Path):
    folder = families.save(tmp_path / "llama", "llama")
    rewrite(folder, max_position_embeddings=None)
    assert load_target(folder).context is None


def shard(folder: Path) -> None:
    """Split the weights in two files, as large checkpoints are."""
    whole = folder / "model.safetensors"
    weights = {name: mx.array(value) for name, value in dict(mx.load(str(whole))).items()}
    mx.eval(*weights.values())
    names, index = sorted(weights), {}
    for part, chosen in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{part}-of-00002.safetensors"
        mx.save_safetensors(str(folder / file), {name: weights[name] for name in chosen}, {"format": "mlx"})
        index |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    whole.unlink()


def test_sharded_folders_are_loaded_and_have_one_digest(target_folder: Path, drafter_folder: Path):
    target, drafter = (
        load_target(target_folder),
        load_drafter(drafter_folder, load_target(target_folder).target),
    )
    shard(target_folder)
    shard(drafter_folder)
    again = load_target(target_folder)
    tokens = mx.array([[7, 8, 9]])
    assert mx.array_equal(again.target.model(tokens), target.target.model(tokens)).item()
    other = load_drafter(drafter_folder, again.target)
    assert parameters_of(other).keys() == parameters_of(drafter).keys()
    for name, value in parameters_of(other).items():
        assert mx.array_equal(value, parameters_of(drafter)[name]).item(), name
    lines = "".join(
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"
        for file in sorted(drafter_folder.glob("*.safetensors"))
    )
    assert other.card.weights_sha256 == hashlib.sha256(lines.encode()).hexdigest()
    (drafter_folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00002\.safetensors"):
        load_drafter(drafter_folder, again.target)


def test_a_second_generation_drafter_is_loaded_by_its_published_names(
    tmp_path: Path, folders: tuple[Path, Path]
):
    nested = {"mask_token_id": tiny.MASK, "target_layer_ids": [0, 2, 5], "conv_kernel_size": 3}
    nested |= {"conv_group_size": 8, "selector_rank": 4, "selector_top_k": 5}
    config = tiny.drafter_config(architectures=["DFlash2DraftModel"], dflash_config=nested)
    network = build_network(DFlashConfig.from_dict(config))
    weights = dict(tree_flatten(network.parameters()))
    published = {name.replace("codebook.weight", "codebook"): value for name, value in weights.items()}
    assert published.keys() != weights.keys()
    mx.save_safetensors(str(tmp_path / "model.safetensors"), published)
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_drafter(tmp_path, load_target(folders[0]).target)
    assert loaded.drafter.name == "dflash2"
    for name, value in parameters_of(loaded).items():
        assert mx.array_equal(value, weights[name]).item(), name


def test_a_packed_drafter_is_loaded_and_described(drafter_folder: Path, folders: tuple[Path, Path]):
    target = load_target(folders[0]).target
    whole = load_drafter(drafter_folder, target)
    config = json.loads((drafter_folder / "config.json").read_text())
    network = DFlash(DFlashConfig.from_dict(config))
    network.load_weights(str(drafter_folder / "model.safetensors"))
    nn.quantize(network, 32, 8, class_predicate=lambda _, m: fits(m, 32))
    save(network, drafter_folder)
    rewrite(drafter_folder, quantization={"group_size": 32, "bits": 8})
    packed = load_drafter(drafter_folder, target)
    assert packed.card.quantization == "affine 8-bit group 32"
    assert packed.card.parameters == whole.card.parameters
    for name, value in parameters_of(packed).items():
        assert mx.array_equal(value, dict(tree_flatten(network.parameters()))[name]).item(), name
    rewrite(drafter_folder, quantization=None)
    with pytest.raises(ModelError, match=r"the weights hold .*\.biases, which the config does not call for"):
        load_drafter(drafter_folder, target)


def test_a_missing_folder_file_or_tokenizer_is_named(target_folder: Path, tmp_path: Path):
    with pytest.raises(ModelError, match="is not a folder"):
        load_target(tmp_path / "nowhere")
    (target_folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="no tokenizer"):
        load_target(target_folder)
    (target_folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_target(target_folder)
    (target_folder / "model.safetensors").unlink()
    (target_folder / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no model\*\.safetensors"):
        load_target(target_folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
        (b"\x08\x00\x00\x00\x00\x00\x00\x00nonsense", "corrupt"),
        (b"", "corrupt"),
        (b"\xff" * 64, "corrupt"),
    ],
)
def test_broken_weights_are_told_apart(target_folder: Path, content: bytes, message: str):
    (target_folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_target(target_folder)


def test_weights_that_were_cut_off_are_corrupt(target_folder: Path, drafter_folder: Path):
    for folder in (target_folder, drafter_folder):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"corrupt: .* bytes where its header promises"):
        load_target(target_folder)


def test_a_shard_named_by_the_index_must_be_there(target_folder: Path):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (target_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00002\.safetensors"):
        load_target(target_folder)


def test_an_unknown_model_type_and_foreign_weights_are_refused(target_folder: Path):
    rewrite(target_folder, model_type="perceptron")
    with pytest.raises(ModelError, match="perceptron"):
        load_target(target_folder)
    rewrite(target_folder, model_type="gemma3_text", num_hidden_layers=3)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_target(target_folder)


def test_nan_weights_are_named(target_folder: Path, drafter_folder: Path, folders: tuple[Path, Path]):
    spoil(target_folder, "model.layers.1.mlp.up_proj.weight", float("nan"))
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN"):
        load_target(target_folder)
    spoil(drafter_folder, "layers.0.mlp.up_proj.weight", float("inf"))
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.up_proj\.weight holds NaN or infinite"):
        load_drafter(drafter_folder, load_target(folders[0]).target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 400}, "vocabulary 400 in the drafter, 300 in the target"),
        ({"hidden_size": 64, "head_dim": 8}, "hidden size 64 in the drafter, 32 in the target"),
        ({"num_target_layers": 9}, "number of target layers 9 in the drafter, 6 in the target"),
    ],
)
def test_a_drafter_of_another_target_is_refused_naming_both_sides(
    folders: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], message: str
):
    foreign = tiny.save_drafter(tmp_path / "foreign", **changes)
    with pytest.raises(DrafterMismatchError, match=message):
        load_drafter(foreign, load_target(folders[0]).target)


def test_taps_beyond_the_target_are_refused_where_the_drafter_does_not_say_its_depth(
    folders: tuple[Path, Path], tmp_path: Path
):
    nested = {"mask_token_id": 4, "target_layer_ids": [0, 7]}
    foreign = tiny.save_drafter(tmp_path / "foreign", dflash_config=nested, num_target_layers=None)
    with pytest.raises(DrafterMismatchError, match=r"layer 7 .* 6 layers"):
        load_drafter(foreign, load_target(folders[0]).target)


def test_drafter_weights_must_be_those_the_config_calls_for(drafter_folder: Path, folders: tuple[Path, Path]):
    target = load_target(folders[0]).target
    rewrite(drafter_folder, intermediate_size=50)
    with pytest.raises(ModelError, match=r"down_proj\.weight is \(32, 48\), config says \(32, 50\)"):
        load_drafter(drafter_folder, target)
    rewrite(drafter_folder, intermediate_size=48, num_hidden_layers=1, layer_types=["full_attention"])
    with pytest.raises(ModelError, match="does not call for"):
        load_drafter(drafter_folder, target)
    rewrite(drafter_folder, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(ModelError, match="num_hidden_layers is 3, the weights hold 2 layers"):
        load_drafter(drafter_folder, target)
    rewrite(drafter_folder, num_hidden_layers=2, layer_types=["full_attention"] * 2, attention_bias=True)
    with pytest.raises(ModelError, match=r"lack layers\.0\.self_attn\.k_proj\.bias"):
        load_drafter(drafter_folder, target)


def test_the_switches_decide_what_is_opened(folders: tuple[Path, Path]):
    target, drafter = folders[0], str(folders[1])
    assert isinstance(open_engine(Options(target, drafter)).new_draft_length(), AdaptiveDraftLength)
    fixed = open_engine(Options(target, drafter, block="6")).new_draft_length()
    assert isinstance(fixed, FixedDraftLength)
    assert fixed.largest == 6
    single = open_engine(Options(target, drafter, block="1"))
    assert (single.drafter, single.alone) == (None, False)
    assert not open_engine(Options(target)).alone, "look-ups draft"
    assert open_engine(Options(target, "none")).alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": "0"}, "from 1 to 1024"),
        ({"block": "many"}, "'many'"),
        ({"block": "17"}, "twice what this drafter was made for"),
        ({"block": "8", "drafter": "none"}, "needs a drafter"),
        ({"prefill_chunk": 0}, "--prefill-chunk"),
    ],
)
def test_switches_that_make_no_sense_are_refused(
    folders: tuple[Path, Path], options: dict[str, Any], message: str
):
    with pytest.raises(ConfigurationError, match=message):
        open_engine(Options(**{"model": folders[0], "drafter": str(folders[1])} | options))
