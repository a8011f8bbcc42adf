"""Packed (quantized) weights: ``--quantize BITS[,GROUP]``, and checks of what is packed already.

Every matrix that mlx can pack is packed in its affine mode, embedding and head included, unless the model's
``quant_predicate`` says otherwise. Nothing is written to disk. The packed model's greedy text is its own.

mlx divides by group sizes and bits before it looks at them, and a zero there ends the process; so numbers in
a configuration or a file that it cannot work with are refused here.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlx import nn

from engine.errors import ConfigurationError, ModelError

STORED_GROUPS, BITS = (16, 32, 64, 128), (2, 3, 4, 5, 6, 8)
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
GROUPS = (32, 64, 128)
DEFAULT_GROUP = 64


def parse_quantize(text: str, option: str = "--quantize") -> tuple[int, int]:
    """Bits a weight and weights a group of a ``--quantize`` text, or of another option's."""
    if not (found := re.fullmatch(r"([0-9]{1,9})(?:,([0-9]{1,9}))?", text)):
        raise ConfigurationError(f"{option} {text!r} is not BITS or BITS,GROUP; give, for example, 4,64")
    bits, group = int(found[1]), int(found[2] or DEFAULT_GROUP)
    for name, value, known in (("bits", bits, BITS), ("group", group, GROUPS)):
        if value not in known:
            choice = ", ".join(map(str, known))
            raise ConfigurationError(f"{option} {text}: {name} {value} is not one of {choice}")
    return bits, group


def quantize_target(
    model: Any, text: str, option: str = "--quantize", *, whole: bool = True
) -> dict[str, Any]:
    """Pack the weights of a model, in place and not yet computed; ``option`` is named in errors.

    Where a matrix has columns that groups do not divide, that is an error, or if not ``whole``, it stays.
    Returns what a config.json says of it as its ``quantization``.
    """
    bits, group = parse_quantize(text, option)
    predicate = getattr(model, "quant_predicate", None) or (lambda _name, _module: True)
    chosen: dict[str, bool | dict[str, Any]] = {}
    for name, module in model.named_modules():
        if "scales" in module:
            raise ModelError(f"{option} {text}: the model is packed already ({name}); leave it out")
        if hasattr(module, "to_quantized"):
            chosen[name] = how = predicate(name, module)
            size = how.get("group_size", group) if isinstance(how, dict) else group
            columns = module.weight.shape[-1]
            if how and columns % size and not whole:
                chosen[name] = False
            elif how and columns % size:
                fitting = " or ".join(str(known) for known in GROUPS if columns % known == 0)
                remedy = f"give a group of {fitting}" if fitting else "this model cannot be packed"
                has = f"{name} has {columns} columns, which groups of {size} do not divide"
                raise ConfigurationError(f"{option} {text}: {has}; {remedy}")
    if not any(chosen.values()):
        raise ModelError(f"{option} {text}: the model holds no matrix that can be packed")
    nn.quantize(model, group, bits, class_predicate=lambda name, _module: chosen.get(name, False))
    exceptions = {name: how for name, how in chosen.items() if isinstance(how, dict)}
    return {"group_size": group, "bits": bits, "mode": "affine", **exceptions}


def pack_as_stored(
    path: Path, model: nn.Module, quantization: Any, stored: Callable[[str, Any], bool]
) -> None:
    """Pack the matrices that are ``stored`` packed as the ``quantization`` of a config.json says."""
    check_packing(path, quantization)
    how = {name: quantization[name] for name in ("group_size", "bits", "mode") if name in quantization}

    def packed(name: str, module: nn.Module) -> Any:
        return hasattr(module, "to_quantized") and stored(name, module) and quantization.get(name, True)

    nn.quantize(model, **how, class_predicate=packed)


def check_packing(path: Path, quantization: Any) -> None:
    """Check the ``quantization`` of a config.json as mlx-lm writes it, with its exceptions by matrix name."""
    if not isinstance(quantization, dict):
        raise ModelError(f"{path}: quantization is {quantization!r}, not an object")
    for name, known in (("group_size", STORED_GROUPS), ("bits", BITS), ("mode", MODES)):
        if quantization.get(name) is None and (name != "mode" or name in quantization):
            raise ModelError(f"{path}: quantization: {name} is missing")
        for part in (quantization, *(part for part in quantization.values() if isinstance(part, dict))):
            value = part.get(name)
            if value is not None and (value not in known or isinstance(value, float)):
                choice = ", ".join(map(str, known))
                raise ModelError(f"{path}: quantization: {name} {value!r} is not one of {choice}")


def check_packed_shapes(path: Path, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that matrices a file holds packed have as many columns as those of the model, not yet packed."""
    for name, module in model.named_modules():  # type: ignore[no-untyped-call]
        weight, scales = shapes.get(f"{name}.weight"), shapes.get(f"{name}.scales")
        if not weight or not scales or not hasattr(module, "to_quantized"):
            continue
        columns = module.weight.shape[-1]
        bits, odd = divmod(weight[-1] * 32, columns)
        group, rest = divmod(columns, scales[-1] or columns + 1)
        if odd or rest or bits not in BITS or group not in STORED_GROUPS:
            raise ModelError(
                f"{path}: {name} is packed as {weight} with scales {scales}, "
                f"which is no packing of the {columns} columns the config calls for"
            )
