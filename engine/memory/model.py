"""A model's folder → the model with its weights neither read nor computed, and how many bytes they would be.

Where the weight files are there, mlx-lm maps them and reads their headers alone, so shapes, types and packing
are those of the files. A folder of a ``config.json`` alone will do: then sizes follow from it, and packing
from its ``quantization``, as if every matrix that can be packed were.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import load_model

from engine.errors import ModelError
from engine.memory.shapes import written_by
from engine.target.folder import (
    build_unloaded,
    check_config,
    check_depth,
    context_length,
    read_json,
    require_folder,
    tensor_shapes,
    text_part,
    weight_files,
)
from engine.target.loading import DTYPES, dtype_of, opened
from engine.target.model import Target
from engine.target.quantize import check_packing, quantize_target

DEEPEST = 4096  # layers that are built without weights to say so
STORED_NAMES = ("dtype", "torch_dtype")


@dataclass(frozen=True)
class Unloaded:
    """A model that is shapes alone.

    Attributes:
        path: its folder.
        target: the model.
        dtype: the type of its floating weights, and so of keys and values.
        dtype_from: who says so.
        weights: bytes of the weights in that type.
        weights_from: the files, or config.json alone.
        context: positions it was made for, None where the configuration does not say.
    """

    path: Path
    target: Target
    dtype: str
    dtype_from: str
    weights: int
    weights_from: str
    context: int | None


def open_unloaded(path: Path, dtype: str | None = None, quantize: str | None = None) -> Unloaded:
    """Build the model of a folder without its weights.

    Args:
        path: folder with config.json, and perhaps model*.safetensors.
        dtype: float32, float16 or bfloat16; None: float32 on the CPU, as stored on Metal.
        quantize: pack the weights, see `engine.target.quantize`; None leaves them as stored.

    Raises:
        ModelError: the folder cannot be used; the message names the file and the reason.
        ConfigurationError: the dtype is unknown, or the weights cannot be packed as asked for.
    """
    require_folder(path)
    config = read_json(path / "config.json")
    check_config(path / "config.json", config)
    files = files_of(path)
    if files:
        check_depth(path / "config.json", config, tensor_shapes(files))
        model = opened(path, "the model", lambda: load_model(path, lazy=True)[0], config)
    else:
        model = opened(path, "config.json", partial(_from_config, path, config), verb="run")
    if quantize is not None:
        quantize_target(model, quantize)
    name, source = _chosen(dtype, model if files else None, config)
    cast(model, DTYPES[name] if dtype_of(dtype) is not None or not files else None)
    opened(path, "config.json", lambda: written_by(model), verb="run")
    tied = set() if files else _tied_head(model, config)
    weights = nbytes_of(model, skipped=tied)
    where = "the headers of its files" if files else "config.json"
    return Unloaded(path, Target(model), name, source, weights, where, context_length(config))


def files_of(path: Path) -> list[Path]:
    """The weight files of a folder, checked; none where it holds none."""
    return weight_files(path) if any(path.glob("model*.safetensors")) else []


def cast(model: Any, dtype: mx.Dtype | None) -> None:
    """Turn floating parameters into a type as `engine.target.loading` does; None leaves them."""
    if dtype is None:
        return
    may_change: Callable[[str], bool] = getattr(model, "cast_predicate", lambda _: True)

    def changed(name: str, value: mx.array) -> mx.array:
        return value.astype(dtype) if mx.issubdtype(value.dtype, mx.floating) and may_change(name) else value

    model.update(tree_map_with_path(changed, model.parameters()))


def nbytes_of(model: Any, skipped: frozenset[str] | set[str] = frozenset()) -> int:
    """Bytes of a model's parameters, those of some names left out."""
    parameters = dict(tree_flatten(model.parameters()))
    return sum(value.nbytes for name, value in parameters.items() if name not in skipped)


def pack(path: Path, module: nn.Module, quantization: Mapping[str, Any]) -> None:
    """Pack every matrix of an unloaded module as a ``quantization`` of config.json says.

    Raises:
        ModelError: it says something mlx cannot do.
    """
    check_packing(path / "config.json", quantization)

    def packing(name: str, part: nn.Module) -> Any:
        if not hasattr(part, "to_quantized") or part.weight.shape[-1] % quantization["group_size"]:
            return False
        return quantization.get(name, True)

    nn.quantize(
        module,
        quantization["group_size"],
        quantization["bits"],
        mode=quantization.get("mode", "affine"),
        class_predicate=packing,
    )


def _from_config(path: Path, config: Mapping[str, Any]) -> Any:
    """The model a configuration describes, packed as it says."""
    if config.get("quantization_config") is not None and config.get("quantization") is None:
        raise ModelError(
            f"{path / 'config.json'}: quantization_config is for mlx-lm to read with the weights; "
            "put the model*.safetensors beside it"
        )
    if text_part(config)["num_hidden_layers"] > DEEPEST:
        raise ModelError(f"{path / 'config.json'}: num_hidden_layers is more than {DEEPEST}")
    model = build_unloaded(config)
    model.eval()
    if config.get("quantization") is not None:
        pack(path, model, config["quantization"])
    return model


def _chosen(dtype: str | None, model: Any, config: Mapping[str, Any]) -> tuple[str, str]:
    """The name of the weights' type, and who says so; ``model``: as the files hold it, None without files."""
    wanted = dtype_of(dtype)
    if wanted is not None:
        name = next(name for name, known in DTYPES.items() if known == wanted)
        return name, "--dtype" if dtype else "the engine's on a CPU"
    if model is None:
        said = (place.get(name) for place in (config, text_part(config)) for name in STORED_NAMES)
        return next((name for name in said if name in DTYPES), "bfloat16"), "config.json"
    sizes: dict[str, int] = {}
    for value in dict(tree_flatten(model.parameters())).values():
        name = str(value.dtype).removeprefix("mlx.core.")
        if name in DTYPES:
            sizes[name] = sizes.get(name, 0) + value.size
    return max(sizes, key=lambda name: sizes[name]), "as stored"


def _tied_head(model: Any, config: Mapping[str, Any]) -> set[str]:
    """Names of a head that was built, but would not be: the configuration ties it to the token table."""
    said = text_part(config).get("tie_word_embeddings", config.get("tie_word_embeddings"))
    tied = said if said is not None else str(config["model_type"]).startswith("gemma")
    heads = ("lm_head.", "language_model.lm_head.")
    names = dict(tree_flatten(model.parameters()))
    return {name for name in names if name.startswith(heads)} if tied else set()
