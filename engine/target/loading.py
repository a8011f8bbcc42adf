"""Load a target with its tokenizer, or a DFlash drafter, from a folder on this machine.

Models are built by mlx-lm, so what it can load from a folder is a target. Nothing is downloaded. On the CPU
weights become float32 (half precision is slow there); on Metal they stay as stored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_config, load_model, load_tokenizer

from engine.cache.policy import NATIVE, KVPolicy
from engine.drafters.base import Drafter
from engine.drafters.block import BlockDrafter
from engine.errors import ConfigurationError, ModelError, wrap_errors
from engine.networks.dflash import DFlash
from engine.networks.dflash2 import build_network
from engine.networks.dflash_config import DFlashConfig
from engine.target.folder import (
    LARGEST_SIZE,
    SHAPES,
    SHIPPED_MODELS,
    build_unloaded,
    card_of,
    check_config,
    context_length,
    read_json,
    require_file,
    tensor_shapes,
    text_part,
    weight_files,
)
from engine.target.model import Target
from engine.target.quantize import check_packed_shapes, check_packing, pack_as_stored, quantize_target
from evidence_format.model import Model

SHIPPED_TARGET, SHIPPED_DRAFTER = SHIPPED_MODELS["demo"], SHIPPED_MODELS["demo-drafter"]
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
DRAFTER_QUANTIZE = "--drafter-quantize"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json")


@dataclass(frozen=True)
class LoadedTarget:
    """A target ready to run."""

    target: Target
    tokenizer: Any  # mlx-lm's TokenizerWrapper
    card: Model
    context: int | None  # positions the model was made for, None where the config does not say
    folder: Path | None = None

    @property
    def stops(self) -> frozenset[int]:
        """Token ids that end a text."""
        return frozenset(self.tokenizer.eos_token_ids)


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter bound to its target."""

    drafter: Drafter
    card: Model | None  # None for a drafter without weights
    settings: str | None = None  # how it was set up beyond its weights, as a report says it


def check_target(path: Path, config: Mapping[str, Any], files: list[Path]) -> Any:
    """Refuse a configuration that its weights contradict; mlx may crash on these instead of raising.

    Return what the folder says of ``eos_token_id``.
    """
    file = path / "config.json"
    check_config(file, config)
    shapes = tensor_shapes(file, config, files)
    if config.get("quantization") is not None:
        check_packing(file, config["quantization"])
        check_packed_shapes(path, opened(path, "config.json", lambda: build_unloaded(config)), shapes)
    stops = opened(path, "generation_config.json", lambda: load_config(path)).get("eos_token_id")
    for token in stops if isinstance(stops, list) else [] if stops is None else [stops]:
        if type(token) is not int or not 0 <= token < LARGEST_SIZE:
            raise ModelError(f"{path}: eos_token_id must be a token id or a list of them, not {stops!r}")
    return stops


def load_target(
    path: Path, dtype: str | None = None, quantize: str | None = None, option: str = "--quantize"
) -> LoadedTarget:
    """Load a folder with config.json, model*.safetensors and the tokenizer's files with mlx-lm.

    ``dtype`` is a name of `DTYPES`; None: float32 on the CPU, as stored on Metal. ``quantize`` is the text of
    ``option``.
    """
    wanted = dtype_of(dtype)
    files = weight_files(path)
    config = read_json(path / "config.json")
    stops = check_target(path, config, files)
    tokenizer = tokenizer_of(path, stops)
    # lazily: what cannot be packed is refused before it is read, and packing never holds all of it in memory
    model, _ = opened(path, "the model", lambda: load_model(path, lazy=True), config)
    if quantize is not None:
        quantize_target(model, quantize, option)
    target = Target(model)
    # not computed: what has the shape of its weights may still not fit together
    tokens = mx.zeros((1, 2), mx.int32)
    opened(path, "config.json", lambda: model(tokens, cache=make_prompt_cache(model)), verb="run")
    half = wanted is not None and wanted != mx.float32 and not mx.metal.is_available()
    if half and any(type(module) is SwitchLinear for module in model.modules()):
        raise ConfigurationError(
            f"{path}: mlx runs experts in float32 alone on a CPU, not in {dtype}; use --dtype float32"
        )
    make_ready(path, model, wanted)
    return LoadedTarget(target, tokenizer, card_of(path, files, model), context_length(config), path)


def load_drafter(
    path: Path,
    target: Target,
    dtype: str | None = None,
    policy: KVPolicy = NATIVE,
    quantize: str | None = None,
) -> LoadedDrafter:
    """Load the folder of a DFlash or DFlash 2 drafter, with a policy of its own, and bind it to a target."""
    network, files = load_network(path, dtype, quantize)
    drafter = block_drafter(network, policy)
    drafter.bind(target)
    return LoadedDrafter(drafter, card_of(path, files, network))


def block_drafter(network: DFlash, policy: KVPolicy) -> BlockDrafter:
    """A drafter with a network; ConfigurationError for a policy its heads do not take."""
    try:
        return BlockDrafter(network, policy)
    except ConfigurationError as error:
        raise ConfigurationError(f"--drafter-kv {policy.spec}: {error}") from None


def load_network(path: Path, dtype: str | None, quantize: str | None = None) -> tuple[DFlash, list[Path]]:
    """Load the network of a DFlash or DFlash 2 drafter; return it and its weight files."""
    wanted = dtype_of(dtype)
    files, file = weight_files(path), path / "config.json"
    config = read_json(file)
    tensor_shapes(file, config, files)
    network: DFlash = opened(path, "config.json", partial(build_dflash, file, config))
    fill_network(path, files, network, config.get("quantization"))
    make_ready_drafter(path, network, wanted, quantize)
    return network, files


def build_dflash(file: Path, config: Mapping[str, Any]) -> DFlash:
    """The network that a config.json describes, without its weights."""
    try:
        return build_network(DFlashConfig.from_dict(config))
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None


def make_ready_drafter(path: Path, network: Any, dtype: mx.Dtype | None, quantize: str | None) -> None:
    """`make_ready`, the weights packed before as a ``--drafter-quantize`` text says, None: as stored."""
    if quantize is not None:
        quantize_target(network, quantize, DRAFTER_QUANTIZE, whole=False)
    make_ready(path, network, dtype)


def fill_network(
    path: Path, files: list[Path], network: nn.Module, quantization: Mapping[str, Any] | None
) -> None:
    """Put weights into a network of ours, packed as the ``quantization`` of its config.json says."""
    weights: dict[str, mx.array] = {}
    for file in files:
        weights |= opened(path, "the weights", partial(mx.load, str(file)))
    put_weights(path, weights, network, quantization)


def put_weights(
    path: Path, weights: dict[str, mx.array], network: nn.Module, quantization: Mapping[str, Any] | None
) -> None:
    """Likewise with weights that were read from ``path`` before."""
    if hasattr(network, "sanitize"):  # mlx-lm's name for: published names to those of the modules
        weights = network.sanitize(weights)
    if quantization is not None:
        pack = partial(pack_as_stored, path / "config.json", network, quantization)
        opened(path, "quantization", lambda: pack(lambda name, _: f"{name}.scales" in weights))
    _check_weights(path, network, weights)
    network.load_weights(list(weights.items()))
    network.eval()


def opened(
    path: Path,
    what: str,
    work: Callable[[], Any],
    config: Mapping[str, Any] | None = None,
    verb: str = "loaded",
) -> Any:
    """What other libraries make of a folder; whatever they raise is an error of the folder."""

    def refusal(reason: str) -> ModelError:
        guessed = [name for name in SHAPES if name not in text_part(config)] if config else []
        hint = f" (config.json does not say {', '.join(guessed)})" if guessed and "shape" in reason else ""
        return ModelError(f"{path}: {what} cannot be {verb}: {reason}{hint}")

    with wrap_errors(refusal):
        return work()


def tokenizer_of(path: Path, stops: Any) -> Any:
    """mlx-lm's tokenizer of a folder; ``stops`` is what its configurations say of ``eos_token_id``."""
    found = [path / name for name in TOKENIZERS if (path / name).exists()]
    if not found:
        raise ModelError(f"{path} holds no tokenizer (tokenizer.json)")
    for file in found:
        require_file(file)
        if file.suffix == ".json":
            read_json(file)
    return opened(path, "the tokenizer", lambda: load_tokenizer(path, eos_token_ids=stops))  # type: ignore[no-untyped-call]


def make_ready(path: Path, model: Any, dtype: mx.Dtype | None) -> None:
    """Turn parameters into ``dtype`` (None: leave them), compute them, and refuse NaN and infinity."""
    if dtype is not None:
        cast_weights(model, dtype)
    parameters = dict(tree_flatten(model.parameters()))
    opened(path, "the weights", lambda: mx.eval(list(parameters.values())))
    for name, value in parameters.items():
        if mx.issubdtype(value.dtype, mx.floating) and not mx.all(mx.isfinite(value)).item():
            raise ModelError(f"{path}: {name} holds NaN or infinite weights")


def cast_weights(model: Any, dtype: mx.Dtype) -> None:
    """Turn floating parameters into a type, but for those that a model keeps in its own (decay rates)."""
    may_change = getattr(model, "cast_predicate", lambda _: True)

    def cast(name: str, value: mx.array) -> mx.array:
        floating = mx.issubdtype(value.dtype, mx.floating)
        return value.astype(dtype) if floating and may_change(name) else value

    model.update(tree_map_with_path(cast, model.parameters()))


def dtype_of(name: str | None) -> mx.Dtype | None:
    """What weights are turned into; None: they stay as stored."""
    if name is None:
        return None if mx.metal.is_available() else mx.float32
    if name not in DTYPES:
        raise ConfigurationError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _check_weights(path: Path, network: Any, weights: Mapping[str, mx.array]) -> None:
    wanted = dict(tree_flatten(network.parameters()))
    for name in sorted(wanted.keys() | weights.keys()):
        if name not in weights:
            raise ModelError(f"{path}: the weights lack {name}")
        if name not in wanted:
            raise ModelError(f"{path}: the weights hold {name}, which the config does not call for")
        has, needs = weights[name], wanted[name]
        if has.shape != needs.shape:
            raise ModelError(
                f"{path}: the shape of {name} is {tuple(has.shape)}, config says {tuple(needs.shape)}"
            )
        if mx.issubdtype(has.dtype, mx.floating) != mx.issubdtype(needs.dtype, mx.floating):
            raise ModelError(f"{path}: {name} is stored as {has.dtype}, which is no {needs.dtype}")
