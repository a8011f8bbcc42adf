"""Packed (quantized) matrices: whether what a configuration and a file say of them can be.

mlx divides by group sizes and bits before it looks at them, and a zero there ends the process; so numbers it
cannot work with are refused here. Packing itself is mlx's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx import nn

from engine.errors import ModelError

GROUPS, BITS = (16, 32, 64, 128), (2, 3, 4, 5, 6, 8)
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")

Shapes = Mapping[str, tuple[int, ...]]


def check_packing(path: Path, quantization: Any) -> None:
    """Check the ``quantization`` of a config.json as mlx-lm writes it, with its exceptions by matrix name.

    Raises:
        ModelError: it is no object, or a group size, a number of bits or a mode is not one mlx has.
    """
    if not isinstance(quantization, dict):
        raise ModelError(f"{path}: quantization is {quantization!r}, not an object")
    for name, known, needed in (("group_size", GROUPS, True), ("bits", BITS, True), ("mode", MODES, False)):
        for place in (quantization, *(value for value in quantization.values() if isinstance(value, dict))):
            value = place.get(name)
            if value is None and (needed or name in place) and place is quantization:
                raise ModelError(f"{path}: quantization: {name} is missing")
            if value is not None and (value not in known or isinstance(value, float)):
                choice = ", ".join(map(str, known))
                raise ModelError(f"{path}: quantization: {name} {value!r} is not one of {choice}")


def check_packed_shapes(path: Path, model: nn.Module, shapes: Shapes) -> None:
    """Check that matrices a file holds packed have as many columns as those of the model, not yet packed.

    Args:
        path: the folder, for the message.
        model: as its configuration says.
        shapes: of the tensors on disk, by name.

    Raises:
        ModelError: one could not be unpacked to the columns the configuration asks for.
    """
    for name, module in model.named_modules():  # type: ignore[no-untyped-call]
        weight, scales = shapes.get(f"{name}.weight"), shapes.get(f"{name}.scales")
        if not weight or not scales or not hasattr(module, "to_quantized"):
            continue
        columns = module.weight.shape[-1]
        bits, odd = divmod(weight[-1] * 32, columns)
        group, rest = divmod(columns, scales[-1] or columns + 1)
        if odd or rest or bits not in BITS or group not in GROUPS:
            raise ModelError(
                f"{path}: {name} is packed as {weight} with scales {scales}, "
                f"which is no packing of the {columns} columns the config calls for"
            )
