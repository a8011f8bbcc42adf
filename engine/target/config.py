"""A target's ``config.json``, checked before mlx-lm builds anything from it.

mlx-lm fills in what a configuration does not say, so a missing size turns into a foreign one and shows up
late, as weights of the wrong shape or not at all. What a family needs is read from mlx-lm's own classes; what
its published configurations always say beside that is listed here. Values are used by mlx-lm, not here.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlx_lm.utils import _get_classes

from engine.errors import ModelError

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
NESTED_NEEDS = ("hidden_size", "num_hidden_layers")
SLIDING = "sliding_attention"
LARGEST_SIZE = 2**31  # positions and sizes are 32-bit numbers


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model: ``text_config`` where there is one."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a configuration mlx-lm has no model for, or that leaves sizes to be guessed.

    Args:
        path: the file, for the message.
        config: what it holds.

    Raises:
        ModelError: ``model_type`` is missing or unknown, fields are missing (all are named), or a size is no
            positive whole number.
    """
    kind = config.get("model_type")
    if kind is None:
        raise ModelError(f"{path}: model_type is missing")
    arguments = _arguments(path, config)
    if "text_config" in config and not isinstance(config["text_config"], dict):
        raise ModelError(f"{path}: text_config is {config['text_config']!r}, not an object")
    text = text_part(config)
    known = config if text is config else {**config, **text}
    missing = []
    kinds = text.get("layer_types")
    needs = [*NESTED_NEEDS, *_needs(arguments, flat=text is config)]
    if text is config and isinstance(kinds, list) and SLIDING in kinds:
        needs.append("sliding_window")
    for name in dict.fromkeys(needs):
        said = (name, *NEVER_GUESSED.get(name, ()))
        if all(known.get(other) is None for other in said):
            missing.append(name)
    if missing:
        raise ModelError(f"{path}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    for name in (*SIZES, "max_position_embeddings", "sliding_window"):
        value = known.get(name)
        if value is not None and (type(value) is not int or not 1 <= value < LARGEST_SIZE):
            raise ModelError(f"{path}: {name} must be a positive whole number, not {value!r}")


def check_depth(path: Path, config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse a configuration with more layers than the weights have, before they are all built.

    Raises:
        ModelError: both numbers are in it.
    """
    found = {match[1] for name in names if (match := re.search(r"(?:^|\.)layers\.(\d+)\.", name))}
    layers = text_part(config).get("num_hidden_layers")
    if found and isinstance(layers, int | float) and layers > len(found):
        raise ModelError(f"{path}: num_hidden_layers is {layers}, the weights hold {len(found)} layers")


def unsaid(config: Mapping[str, Any]) -> list[str]:
    """Sizes a configuration leaves to mlx-lm; worth naming when the weights do not fit."""
    return [name for name in SHAPES if name not in text_part(config)]


def context_length(config: Mapping[str, Any]) -> int | None:
    """Positions the model was made for, None where the configuration does not say."""
    positions = text_part(config).get("max_position_embeddings", config.get("max_position_embeddings"))
    return None if positions is None else int(positions)


def _needs(arguments: Any, *, flat: bool) -> list[str]:
    """Fields mlx-lm's class has no value for; of a flat configuration also those it would guess."""
    needs = []
    for name, parameter in inspect.signature(arguments).parameters.items():
        required = parameter.default is inspect.Parameter.empty
        guessed = flat and parameter.default is not None and name in NEVER_GUESSED
        if name == "text_config" and "from_dict" in vars(arguments):
            continue  # the class also reads configurations that are all of text
        if required or guessed:
            needs.append(name)
    return needs


def build_unloaded(config: Mapping[str, Any]) -> Any:
    """The model a configuration describes, its weights random and not computed."""
    model, arguments = _get_classes(dict(config))
    return model(arguments.from_dict(deepcopy(dict(config))))


def _arguments(path: Path, config: Mapping[str, Any]) -> Any:
    """The class mlx-lm reads a configuration of this model_type into."""
    try:
        return _get_classes(dict(config))[1]
    except (ValueError, AttributeError, TypeError, ImportError):
        raise ModelError(
            f"{path}: model_type {config['model_type']!r} is not supported: "
            f"mlx-lm {version('mlx-lm')} has no such model; give one of a family it has, "
            "such as llama, qwen3, gemma3 or gpt_oss"
        ) from None
