"""What a report says about a model: where it came from, how its weights are stored, how many there are."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from evidence_format.weights import digest

PACKED = ("weight", "scales", "biases", "global_scale")  # arrays a packed matrix is stored in


@dataclass(frozen=True)
class CacheLayer:
    """One cache as the model makes it for itself.

    Attributes:
        kind: ``full``, ``sliding``, or ``other`` for a cache that keeps no keys and values by position.
        values: numbers kept a position, keys and values of all KV heads together; 0 for ``other``.
        window: positions a ``sliding`` layer sees, else None.
    """

    kind: str
    values: int
    window: int | None


@dataclass(frozen=True)
class ModelCard:
    """What a report says about a model.

    Attributes:
        id: a name for people.
        weights_sha256: digest of the weight files.
        dtype: the floating type most parameters are in; of packed ones, that of their scales.
        quantization: how packed matrices are packed, the commonest first; None where none is.
        parameters: their number as if nothing were packed, all experts counted, tied tables once.
        vocab_size: tokens a target knows; None for other models.
        largest_block: the longest block a drafter may be asked for; None for other models.
        cache_layers: a target's caches, in the order of its layers; None for other models.
    """

    id: str
    weights_sha256: str
    dtype: str
    quantization: str | None
    parameters: int
    vocab_size: int | None = None
    largest_block: int | None = None
    cache_layers: tuple[CacheLayer, ...] | None = None


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
    package = Path(__file__).resolve().parents[2]
    return str(resolved.relative_to(package)) if resolved.is_relative_to(package) else resolved.name
