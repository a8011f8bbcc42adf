"""A folder on this machine → a target with its tokenizer, or a drafter; checked before any work.

Models are built by mlx-lm, so whatever it can load from a folder is a target. Nothing is downloaded. On the
CPU weights become float32 (half precision is slow there); on Metal they stay as stored.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters, load_model, load_tokenizer

from engine.drafters.base import Drafter
from engine.drafters.block import BlockDrafter
from engine.errors import ConfigurationError, ModelError
from engine.networks.dflash import DFlash, DFlashConfig
from engine.target import Target
from engine.weights import digest, read_json, weight_files

SHIPPED = Path(__file__).parent / "models" / "demo"
SHIPPED_TARGET, SHIPPED_DRAFTER = SHIPPED / "target", SHIPPED / "drafter"
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class ModelCard:
    """What a report says about a model."""

    id: str
    weights_sha256: str
    dtype: str
    quantization: str | None
    parameters: int


@dataclass(frozen=True)
class LoadedTarget:
    """A target ready to run."""

    target: Target
    tokenizer: Any  # mlx-lm's TokenizerWrapper
    card: ModelCard
    context: int | None  # positions the model was made for, None where the config does not say

    @property
    def stops(self) -> frozenset[int]:
        """Token ids that end a text."""
        return frozenset(self.tokenizer.eos_token_ids)


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter bound to its target."""

    drafter: Drafter
    card: ModelCard


def load_target(path: Path, dtype: str | None = None) -> LoadedTarget:
    """Load a model folder with mlx-lm.

    Args:
        path: folder with config.json, model*.safetensors and the tokenizer's files.
        dtype: float32, float16 or bfloat16; None: float32 on the CPU, as stored on Metal.

    Raises:
        ModelError: the folder cannot be used; the message names the file and the reason.
        ConfigurationError: the dtype is unknown.
    """
    wanted = _dtype(dtype)
    config = read_json(path / "config.json") if path.is_dir() else {}
    files = weight_files(path)
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tekken.json")):
        raise ModelError(f"{path} holds no tokenizer (tokenizer.json)")
    try:
        model, config = load_model(path)
        tokenizer = load_tokenizer(  # type: ignore[no-untyped-call]
            path, eos_token_ids=config.get("eos_token_id")
        )
    except (ValueError, KeyError, TypeError, RuntimeError, OSError, AttributeError) as error:
        raise ModelError(f"{path} cannot be loaded: {_first_line(error)}") from error
    _refuse_not_finite(path, model)
    if wanted is not None:
        model.set_dtype(wanted)
        mx.eval(list(_parameters(model).values()))
    quantization = config.get("quantization")
    card = ModelCard(
        id=_identity(path),
        weights_sha256=digest(files),
        dtype=_dtype_name(model),
        quantization=_describe(quantization) if isinstance(quantization, dict) else None,
        parameters=int(get_total_parameters(model)),  # type: ignore[no-untyped-call]
    )
    text = config.get("text_config", config)
    positions = text.get("max_position_embeddings")
    return LoadedTarget(Target(model), tokenizer, card, int(positions) if positions else None)


def load_drafter(path: Path, target: Target, dtype: str | None = None) -> LoadedDrafter:
    """Load a drafter folder and bind it to a target.

    Raises:
        ModelError: the folder cannot be used.
        DrafterMismatchError: it was made for a target of another shape.
        ConfigurationError: the dtype is unknown.
    """
    wanted = _dtype(dtype)
    files = weight_files(path)
    raw = read_json(path / "config.json")
    config = DFlashConfig.from_dict(raw)
    network = DFlash(config)
    try:
        weights = {name: value for file in files for name, value in mx.load(str(file)).items()}  # type: ignore[union-attr]
    except (RuntimeError, ValueError, OSError) as error:
        raise ModelError(f"{path} cannot be loaded: {_first_line(error)}") from error
    _refuse_other_shapes(path, network, weights)
    network.load_weights(list(weights.items()))
    network.eval()
    _refuse_not_finite(path, network)
    if wanted is not None:
        network.set_dtype(wanted)
    mx.eval(list(_parameters(network).values()))
    drafter: Drafter = BlockDrafter(network)
    drafter.bind(target)
    parameters = sum(value.size for value in weights.values())
    card = ModelCard(_identity(path), digest(files), _dtype_name(network), None, int(parameters))
    return LoadedDrafter(drafter, card)


def _parameters(module: Any) -> dict[str, mx.array]:
    """Every parameter by its dotted name."""
    return dict(tree_flatten(module.parameters()))


def _dtype(name: str | None) -> mx.Dtype | None:
    if name is None:
        return None if mx.metal.is_available() else mx.float32
    if name not in DTYPES:
        raise ConfigurationError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _identity(path: Path) -> str:
    """A name for the report: where the model is inside this package, else its folder's name."""
    resolved = path.resolve()
    package = Path(__file__).resolve().parent.parent
    return str(resolved.relative_to(package)) if resolved.is_relative_to(package) else resolved.name


def _dtype_name(module: Any) -> str:
    """The commonest floating dtype of the parameters."""
    kinds = [value.dtype for value in _parameters(module).values()]
    floating = [str(kind).removeprefix("mlx.core.") for kind in kinds if mx.issubdtype(kind, mx.floating)]
    return max(sorted(set(floating)), key=floating.count) if floating else "none"


def _describe(quantization: dict[str, Any]) -> str:
    mode = quantization.get("mode", "affine")
    return f"{mode} {quantization.get('bits')}-bit group {quantization.get('group_size')}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _refuse_not_finite(path: Path, module: Any) -> None:
    for name, value in _parameters(module).items():
        if mx.issubdtype(value.dtype, mx.floating) and not mx.all(mx.isfinite(value)).item():
            raise ModelError(f"{path}: {name} holds NaN or infinite weights")


def _refuse_other_shapes(path: Path, network: Any, weights: dict[str, mx.array]) -> None:
    """Names and shapes of the file against those the config asks for; the first difference is the error."""
    wanted = {name: tuple(value.shape) for name, value in _parameters(network).items()}
    for name in sorted(wanted.keys() | weights.keys()):
        if name not in weights:
            raise ModelError(f"{path}: the weights lack {name}")
        if name not in wanted:
            raise ModelError(f"{path}: the weights hold {name}, which the config does not call for")
        if tuple(weights[name].shape) != wanted[name]:
            raise ModelError(f"{path}: {name} is {tuple(weights[name].shape)}, config says {wanted[name]}")
