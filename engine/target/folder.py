"""A model's folder: its files and its ``config.json``, checked before mlx-lm builds anything from them.

mlx-lm fills in what a configuration does not say, so a missing size shows up late or not at all. What a
family needs is read from mlx-lm's own classes; what its published configurations always say besides is listed
here.
"""

import inspect
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Annotated, Any, get_args

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from pydantic import Field, Strict, TypeAdapter, ValidationError

from engine.errors import ModelError
from evidence_format import weights
from evidence_format.model import Model
from evidence_format.parse import faults_of

SHIPPED = Path(__file__).parents[1] / "models" / "demo"
SHIPPED_MODELS = {"demo": SHIPPED / "target", "demo-drafter": SHIPPED / "drafter"}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
SHAPES = (*SIZES, "intermediate_size", "num_key_value_heads", "head_dim")  # wrong ones misfit the weights
# Where mlx-lm would guess one of these for a configuration that is all of text, it must be said, under this
# name or another. Those within a larger model (``text_config``) leave out what equals the published default.
NEVER_GUESSED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(SIZES, ()),
    "rms_norm_eps": (),
    "query_pre_attn_scalar": (),
    "sliding_window": (),
    "sliding_window_pattern": ("layer_types", "_sliding_window_pattern"),
}
LARGEST_SIZE = 2**31  # positions and sizes are 32-bit numbers
# How `faults_of` puts it → how errors of a model's folder do.
FAULTS = {
    r"^report: |\b\w+\.(?=\w+:)": "",
    r"lacks '(\w+)'.*": r"\1 is missing",
    "has fewer than 1 entries": "is empty",
    "Input should be ": "must be ",
    "of type integer": "a whole number",
    "of type array": "a list",
    "of type boolean": "true, false or absent",
    "of type number": "a finite number",
    "second: ": "",
    "at least 1,": "positive,",
    ": (must|is) ": r" \1 ",
    ", got ": ", not ",
}
PACKED = ("weight", "scales", "biases", "global_scale")  # arrays a packed matrix is stored in

Size = Annotated[int, Strict(), Field(ge=1, lt=LARGEST_SIZE)]
Index = Annotated[int, Strict(), Field(ge=0, lt=LARGEST_SIZE)]


def validated(kind: Any, values: Any, where: str) -> Any:
    """Values of a config.json as a type; ModelError with the first wrong field and its value."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        fault = faults_of(error)[0].message
    for theirs, ours in FAULTS.items():
        fault = re.sub(theirs, ours, fault)
    raise ModelError(f"{where}: {fault}")


def models_folder() -> Path:
    """Where models with names are."""
    return Path.home() / "kakeya-models"


def named_folder(text: str) -> Path:
    """The folder that a path, or a name of the models' folder or of a shipped model, means."""
    named = SHIPPED_MODELS.get(text, models_folder() / text)
    return named if "/" not in text and not Path(text).exists() and named.is_dir() else Path(text)


def shown_name(folder: Path) -> str:
    """What a folder is to be called on the command line: by its name, where it has one, or its path."""
    shipped = [name for name, path in SHIPPED_MODELS.items() if path == folder]
    return folder.name if folder.parent == models_folder() else next(iter(shipped), str(folder))


def require_folder(folder: Path) -> None:
    """Raise ModelError for a path that is not a readable folder."""
    try:
        if not folder.is_dir():
            kind = "is a file, not a folder" if folder.is_file() else "is not a folder"
            raise ModelError(f"{folder} {kind}; give the path of a model's folder on this machine")
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror}") from None


def require_file(path: Path) -> None:
    """Raise ModelError for a pipe or a device, which might never end."""
    if weights.is_special(path):
        raise ModelError(f"{path} is not a file")


def weight_files(folder: Path) -> list[Path]:
    """The ``model*.safetensors`` files of a model folder; ModelError where any is missing or broken."""
    require_folder(folder)
    if found := weights.weight_faults(folder):
        raise ModelError(found[0])
    return weights.weight_files(folder)


def tensor_shapes(path: Path, config: Mapping[str, Any], files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in files that `weight_files` has checked, by name.

    ModelError for a ``config`` with more layers than these, before all are built.
    """
    shapes = {name: tuple(entry["shape"]) for name, entry in _stored_tensors(files)}
    found = {match[1] for name in shapes if (match := re.search(r"(?:^|\.)layers\.(\d+)\.", name))}
    layers = text_part(config).get("num_hidden_layers")
    if found and isinstance(layers, int | float) and layers > len(found):
        raise ModelError(f"{path}: num_hidden_layers is {layers}, the weights hold {len(found)} layers")
    return shapes


def stored_sizes(files: list[Path]) -> tuple[int, int]:
    """Floating values in files that `weight_files` has checked, and the bytes of all else."""
    values = others = 0
    for _, entry in _stored_tensors(files):
        if entry["dtype"] in ("F16", "BF16", "F32"):
            values += prod(entry["shape"])
        else:
            others += entry["data_offsets"][1] - entry["data_offsets"][0]
    return values, others


def _stored_tensors(files: list[Path]) -> Iterator[tuple[str, Any]]:
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        yield from ((name, entry) for name, entry in header.items() if name != "__metadata__")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError where there is none."""
    try:
        return weights.read_json(path)
    except weights.Broken as error:
        raise ModelError(str(error)) from None


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model: ``text_config`` where there is one."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a configuration mlx-lm has no model for, or that leaves sizes to be guessed."""
    if config.get("model_type") is None:
        raise ModelError(f"{path}: model_type is missing")
    if "dflash_config" in config:  # its model_type is that of its target
        name = shown_name(path.parent)
        raise ModelError(f"{name} is a drafter and cannot generate alone; give it as --drafter {name}")
    try:
        arguments = _get_classes(dict(config))[1]
    except (ValueError, AttributeError, TypeError, ImportError):
        raise ModelError(
            f"{path}: model_type {config['model_type']!r} is not supported: "
            f"mlx-lm {version('mlx-lm')} has no such model; give one of a family it has, "
            "such as llama, qwen3, gemma3 or gpt_oss"
        ) from None
    if "text_config" in config and not isinstance(config["text_config"], dict):
        raise ModelError(f"{path}: text_config is {config['text_config']!r}, not an object")
    text = text_part(config)
    known = {**config, **text}
    missing = [
        name
        for name in dict.fromkeys(["hidden_size", "num_hidden_layers", *_needs(arguments, config)])
        if all(known.get(other) is None for other in (name, *NEVER_GUESSED.get(name, ())))
    ]
    if missing:
        raise ModelError(f"{path}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    for name in (*SIZES, "max_position_embeddings", "sliding_window"):
        value = known.get(name)
        if value is not None and (type(value) is not int or not 1 <= value < LARGEST_SIZE):
            raise ModelError(f"{path}: {name} must be a positive whole number, not {value!r}")


def context_length(config: Mapping[str, Any]) -> int | None:
    """Positions the model was made for, None where the configuration does not say."""
    return {**config, **text_part(config)}.get("max_position_embeddings")


def build_unloaded(config: Mapping[str, Any]) -> Any:
    """The model a configuration describes, its weights random and not computed."""
    model, arguments = _get_classes(dict(config))
    return model(arguments.from_dict(deepcopy(dict(config))))


def _needs(arguments: Any, config: Mapping[str, Any]) -> Iterator[str]:
    """Fields mlx-lm's class has no value for; of a flat configuration also those it would guess."""
    flat = "text_config" not in config
    for name, parameter in inspect.signature(arguments).parameters.items():
        if name == "text_config" and "from_dict" in vars(arguments):
            continue  # the class also reads configurations that are all of text
        guessed = flat and parameter.default is not None and name in NEVER_GUESSED
        says_none = name in config and config[name] is None and type(None) in get_args(parameter.annotation)
        if guessed or (parameter.default is inspect.Parameter.empty and not says_none):
            yield name
    layer_types = config.get("layer_types")
    if flat and isinstance(layer_types, list) and "sliding_attention" in layer_types:
        yield "sliding_window"


def card_of(path: Path, files: list[Path], model: Any) -> Model:
    """The card of a model loaded from ``files`` of the folder ``path``.

    Its dtype is that of most parameters; packings are named the commonest first; parameters are counted as if
    none were packed, all experts, tied tables once.
    """
    types: Counter[str] = Counter()
    total = 0
    for value in dict(tree_flatten(model.parameters())).values():
        total += value.size
        if mx.issubdtype(value.dtype, mx.floating):
            types[str(value.dtype).removeprefix("mlx.core.")] += value.size
    packings: Counter[str] = Counter()
    for module in model.modules():
        if "scales" in module and hasattr(module, "bits"):
            values = module.weight.size * 32 // module.bits
            packings[f"{module.mode} {module.bits}-bit group {module.group_size}"] += values
            stored = [module.get(name) for name in PACKED]
            total += values - sum(array.size for array in stored if array is not None)
    packing = ", ".join(name for name, _ in packings.most_common()) or None
    dtype = types.most_common(1)[0][0] if types else "none"
    return Model(
        id=identity(path),
        weights_sha256=weights.digest(files),
        dtype=dtype,
        quantization=packing,
        parameters=int(total),
        vocab_size=None,
        largest_block=None,
        cache_layers=None,
    )


def identity(path: Path) -> str:
    """A name for the report: where the model is inside this package, else its folder's name."""
    resolved = path.resolve()
    package = Path(__file__).resolve().parents[2]
    return str(resolved.relative_to(package)) if resolved.is_relative_to(package) else resolved.name
