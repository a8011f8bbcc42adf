"""The projector: keys and values of target layers from what a DFlash drafter knows of the same positions.

For each restored layer, keys = A·f + a and values = B·f + b, where f are the drafter's keys and values of all
its layers at a position, before norms and rotation. What comes out is what the target's own projections would
have given; norms and rotation are the target's. Trained by `engine.training.projector`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn

from engine.errors import ModelError
from engine.networks.dflash import DFlash

FORMAT = "kakeya.projector/1"
LARGEST = 2**31


@dataclass(frozen=True)
class LayerShape:
    """One restored layer: its number, and the widths of its key and value projections."""

    layer: int
    keys: int
    values: int


@dataclass(frozen=True)
class ProjectorConfig:
    target: str  # digest of the weights of the target it was trained for
    drafter: str  # … of the drafter
    taps: tuple[int, ...]  # target layers the drafter reads
    features: int  # width of the drafter's keys and values, all layers together
    layers: tuple[LayerShape, ...]  # what it gives, in ascending order

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ProjectorConfig":
        """Read what `document` gives; other fields are notes for people."""
        if raw.get("format") != FORMAT:
            raise ModelError(f"not a projector: its config.json says format {raw.get('format')!r}")
        digests = [raw.get(name) for name in ("target_sha256", "drafter_sha256")]
        if odd := [value for value in digests if not re.fullmatch("[0-9a-f]{64}", str(value))]:
            raise ModelError(f"projector config.json: {odd[0]!r} is no sha256")
        taps, layers = raw.get("target_layer_ids"), raw.get("layers")
        if not isinstance(taps, list) or not taps or not all(_whole(tap, 0) for tap in taps):
            raise ModelError(f"projector config.json: target_layer_ids must list layers, not {taps!r}")
        if not _whole(size := raw.get("feature_size"), 1):
            raise ModelError(f"projector config.json: feature_size must be a positive number, not {size!r}")
        if not isinstance(layers, list) or not layers or not all(_is_shape(entry) for entry in layers):
            raise ModelError(
                f"projector config.json: layers must list objects with layer, keys and values, not {layers!r}"
            )
        shapes = tuple(LayerShape(entry["layer"], entry["keys"], entry["values"]) for entry in layers)
        if [shape.layer for shape in shapes] != sorted({shape.layer for shape in shapes}):
            raise ModelError("projector config.json: layers must be in ascending order")
        return cls(str(digests[0]), str(digests[1]), tuple(taps), int(raw["feature_size"]), shapes)

    def document(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "target_sha256": self.target,
            "drafter_sha256": self.drafter,
            "target_layer_ids": list(self.taps),
            "feature_size": self.features,
            "layers": [vars(shape) for shape in self.layers],
        }


def _whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < LARGEST


def _is_shape(entry: Any) -> bool:
    return isinstance(entry, dict) and all(
        _whole(entry.get(name), least) for name, least in (("layer", 0), ("keys", 1), ("values", 1))
    )


class LayerProjection(nn.Module):
    def __init__(self, features: int, shape: LayerShape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is untyped here
        self.k_proj = nn.Linear(features, shape.keys)
        self.v_proj = nn.Linear(features, shape.values)

    def __call__(self, features: mx.array) -> tuple[mx.array, mx.array]:
        """[..., features] to keys [..., key width] and values [..., value width]."""
        return self.k_proj(features), self.v_proj(features)

    def check(self, path: Path, layer: int, widths: tuple[int, int]) -> None:
        own = (int(self.k_proj.weight.shape[0]), int(self.v_proj.weight.shape[0]))
        if own != widths:
            raise ModelError(
                f"{path}: layer {layer} gives keys and values of width {own[0]} and {own[1]}; "
                f"the target's are {widths[0]} and {widths[1]}"
            )


class Projector(nn.Module):
    def __init__(self, config: ProjectorConfig) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx is untyped here
        self.config = config
        self.layers = [LayerProjection(config.features, shape) for shape in config.layers]

    def of(self, layer: int) -> LayerProjection:
        """The projection of a target layer; ModelError where it was trained for others."""
        numbers = [shape.layer for shape in self.config.layers]
        if layer not in numbers:
            known = ", ".join(map(str, numbers))
            raise ModelError(f"this projector does not restore layer {layer}; it was trained for {known}")
        return self.layers[numbers.index(layer)]


class DrafterFeatures:
    """A DFlash network's keys and values before norms and rotation; keeps the matrices it needs alone."""

    def __init__(self, network: DFlash) -> None:
        self.taps = network.config.target_layer_ids
        self._fc, self._norm = network.fc, network.hidden_norm
        attentions = [layer.self_attn for layer in network.layers]
        self._projections = [part for each in attentions for part in (each.k_proj, each.v_proj)]
        self.size = sum(2 * each.kv_heads * each.head_dim for each in attentions)

    def __call__(self, taps: mx.array) -> mx.array:
        """Tapped rows [..., K·hidden] to features [..., size]."""
        context = self._norm(self._fc(taps))
        return mx.concatenate([projection(context) for projection in self._projections], axis=-1)
