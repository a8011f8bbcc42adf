"""What a report says about a model: where it came from, how its weights are stored, how many there are."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from engine.weights import digest

PACKED = ("weight", "scales", "biases", "global_scale")  # arrays a packed matrix is stored in


@dataclass(frozen=True)
class ModelCard:
    """What a report says about a model.

    Attributes:
        id: a name for people.
        weights_sha256: digest of the weight files.
        dtype: the floating type most parameters are in; of packed ones, that of their scales.
        quantization: how packed matrices are packed, the commonest first; None where none is.
        parameters: their number as if nothing were packed, all experts counted, tied tables once.
    """

    id: str
    weights_sha256: str
    dtype: str
    quantization: str | None
    parameters: int


def card_of(path: Path, files: list[Path], model: Any) -> ModelCard:
    """The card of a model as it is in memory, loaded from ``files`` of the folder ``path``."""
    kinds: Counter[str] = Counter()
    total = 0
    for value in dict(tree_flatten(model.parameters())).values():
        total += value.size
        if mx.issubdtype(value.dtype, mx.floating):
            kinds[str(value.dtype).removeprefix("mlx.core.")] += value.size
    packings: Counter[str] = Counter()
    for module in model.modules():
        if "scales" in module and hasattr(module, "bits"):
            values = module.weight.size * 32 // module.bits
            packings[f"{module.mode} {module.bits}-bit group {module.group_size}"] += values
            stored = [module.get(name) for name in PACKED]
            total += values - sum(array.size for array in stored if array is not None)
    packing = ", ".join(name for name, _ in packings.most_common()) or None
    dtype = kinds.most_common(1)[0][0] if kinds else "none"
    return ModelCard(identity(path), digest(files), dtype, packing, int(total))


def identity(path: Path) -> str:
    """A name for the report: where the model is inside this package, else its folder's name."""
    resolved = path.resolve()
    package = Path(__file__).resolve().parent.parent
    return str(resolved.relative_to(package)) if resolved.is_relative_to(package) else resolved.name
