"""Packing the weights of a loaded target: ``--quantize BITS`` or ``--quantize BITS,GROUP``.

Every matrix that mlx can pack is packed in its affine mode, embedding and head included, each row in groups
of GROUP values with a scale and a bias; norms stay as they are. A model that wants some matrices finer, or
not packed at all, says so itself (mlx-lm's ``quant_predicate``) and is heard. Nothing is written to disk.

The packed model is another model: its greedy text is its own, and drafting for it must give just that text.
"""

import re
from collections.abc import Mapping
from typing import Any

from mlx import nn

from engine.errors import ConfigurationError, ModelError
from engine.target.packing import BITS

GROUPS = (32, 64, 128)
DEFAULT_GROUP = 64


def parse_quantize(text: str) -> tuple[int, int]:
    """Bits a weight and weights a group of a ``--quantize`` text.

    Raises:
        ConfigurationError: it is not BITS or BITS,GROUP with numbers that mlx has.
    """
    if not (found := re.fullmatch(r"([0-9]{1,9})(?:,([0-9]{1,9}))?", text)):
        raise ConfigurationError(f"--quantize {text!r} is not BITS or BITS,GROUP; give, for example, 4,64")
    bits, group = int(found[1]), int(found[2] or DEFAULT_GROUP)
    for name, value, known in (("bits", bits, BITS), ("group", group, GROUPS)):
        if value not in known:
            choice = ", ".join(map(str, known))
            raise ConfigurationError(f"--quantize {text}: {name} {value} is not one of {choice}")
    return bits, group


def quantize_target(model: Any, text: str) -> None:
    """Pack the weights of a model, in place and not yet computed.

    Args:
        model: as mlx-lm has loaded it.
        text: BITS or BITS,GROUP.

    Raises:
        ConfigurationError: the text is wrong, or the groups do not divide a matrix.
        ModelError: the weights are packed already, or there is nothing to pack.
    """
    bits, group = parse_quantize(text)
    asked = getattr(model, "quant_predicate", None) or (lambda _name, _module: True)
    chosen: dict[str, bool | dict[str, Any]] = {}
    for name, module in model.named_modules():
        if "scales" in module:
            raise ModelError(f"--quantize {text}: the model is packed already ({name}); leave it out")
        if hasattr(module, "to_quantized"):
            chosen[name] = asked(name, module)
            _refuse_rest(text, name, module.weight.shape[-1], group, chosen[name])
    if not any(chosen.values()):
        raise ModelError(f"--quantize {text}: the model holds no matrix that can be packed")
    nn.quantize(model, group, bits, class_predicate=lambda name, _module: chosen.get(name, False))


def _refuse_rest(text: str, name: str, columns: int, group: int, how: bool | Mapping[str, Any]) -> None:
    """Raise ConfigurationError for a matrix whose rows are no whole number of groups."""
    size = how.get("group_size", group) if isinstance(how, Mapping) else group
    if how and columns % size:
        fitting = [str(known) for known in GROUPS if columns % known == 0]
        remedy = f"give a group of {' or '.join(fitting)}" if fitting else "this model cannot be packed"
        raise ConfigurationError(
            f"--quantize {text}: {name} has {columns} columns, which groups of {size} do not divide; {remedy}"
        )
