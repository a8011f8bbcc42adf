"""The projector: keys and values of target layers from what a DFlash drafter knows of the same positions.

For each restored layer, keys = A·f + a and values = B·f + b, where f are the drafter's keys and values of all
its layers at a position, before norms and rotation. What comes out is what the target's own projections would
have given; norms and rotation are the target's. Trained by `engine.training.projector`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
from mlx import nn
from pydantic import Field, TypeAdapter

from engine.errors import ModelError
from engine.networks.dflash import DFlash
from engine.target.folder import Index, Size, validated

FORMAT = "kakeya.projector/1"
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class LayerShape:
    """One restored layer: its number, and the widths of its key and value projections."""

    layer: Index
    keys: Size  # width of its key projection
    values: Size


@dataclass(frozen=True)
class ProjectorConfig:
    """A projector's ``config.json``; other fields in it are notes for people."""

    target: Annotated[Digest, Field(alias="target_sha256")]  # of the weights it was trained for
    drafter: Annotated[Digest, Field(alias="drafter_sha256")]
    # target layers the drafter reads
    target_layers: Annotated[tuple[Index, ...], Field(alias="target_layer_ids", min_length=1)]
    features: Annotated[Size, Field(alias="feature_size")]  # of the drafter's keys and values, all layers
    layers: Annotated[tuple[LayerShape, ...], Field(min_length=1)]  # what it gives, in ascending order

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ProjectorConfig":
        if raw.get("format") != FORMAT:
            raise ModelError(f"not a projector: its config.json says format {raw.get('format')!r}")
        config: ProjectorConfig = validated(cls, raw, "projector config.json")
        numbers = [shape.layer for shape in config.layers]
        if numbers != sorted({*numbers}):
            raise ModelError(f"projector config.json: layers must be in ascending order, not {numbers}")
        return config

    def document(self) -> dict[str, Any]:
        return {"format": FORMAT, **_FILE.dump_python(self, by_alias=True, mode="json")}


_FILE = TypeAdapter(ProjectorConfig)


class LayerProjection(nn.Module):
    """Keys and values of one layer."""

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
    """All restored layers."""

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
        self.target_layers = network.config.target_layer_ids
        self._fc, self._norm = network.fc, network.hidden_norm
        attentions = [layer.self_attn for layer in network.layers]
        self._projections = [part for each in attentions for part in (each.k_proj, each.v_proj)]
        self.size = sum(2 * each.kv_heads * each.head_dim for each in attentions)

    def __call__(self, hidden_states: mx.array) -> mx.array:
        """Tapped rows [..., K·hidden] to features [..., size]."""
        context = self._norm(self._fc(hidden_states))
        return mx.concatenate([projection(context) for projection in self._projections], axis=-1)
