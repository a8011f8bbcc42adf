"""Where a layer makes its keys and values, and how rows from elsewhere become like them.

    projection(x)  [N, KV heads · head dim]   what a source supplies: not normalised, not rotated
    keys   = rope(k_norm(projection), position)
    values = v_norm(projection)               most families leave values as they are

Norms and rotation are the layer's own modules. Families differ in more than these say, so attention modules
are known by name (`KINDS`); others are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.errors import ModelError


@dataclass(frozen=True)
class AttentionKind:
    """What attention modules of a name have in common."""

    scale: str = "scale"  # the attribute that queries are multiplied with
    keys_first: bool = False  # keys are rotated before queries are
    sinks: bool = False  # it has scores besides those of the positions, one a head, in `sinks`


# By module and class of mlx-lm's attention; the tests go through this table.
KINDS: dict[str, AttentionKind] = {
    "gemma3_text.Attention": AttentionKind(),
    "gemma4_text.Attention": AttentionKind(keys_first=True),
    "gpt_oss.AttentionBlock": AttentionKind(scale="sm_scale", sinks=True),
    "llama.Attention": AttentionKind(),
    "qwen2.Attention": AttentionKind(),
    "qwen3.Attention": AttentionKind(),
    "qwen3_moe.Attention": AttentionKind(),
    "qwen3_next.Qwen3NextAttention": AttentionKind(),
}
VARYING_ROPE = "DynamicNTKScalingRoPE"  # rotates by the length of the text, so rows cannot be rotated later


@dataclass(frozen=True)
class Site:
    """The attention of one layer."""

    layer: int
    attention: Any
    kind: AttentionKind

    @property
    def projections(self) -> tuple[Any, ...]:
        """The modules that give keys and values; one where it gives both."""
        return tuple(self.attention[name] for name in ("k_proj", "v_proj") if name in self.attention)

    @property
    def widths(self) -> tuple[int, int]:
        """Of the rows for keys and for values."""
        found = [int(projection.weight.shape[0]) for projection in self.projections]
        return found[0], found[-1]

    def placed(self, keys: mx.array, values: mx.array, start: int, heads: int) -> tuple[mx.array, mx.array]:
        """Rows [S, N, heads · dim] from position ``start`` on as attention reads them, [S, heads, N, dim]."""
        keys, values = (rows.reshape(*rows.shape[:2], heads, -1) for rows in (keys, values))
        if "k_norm" in self.attention:
            keys = self.attention.k_norm(keys)
        if "v_norm" in self.attention:
            values = self.attention.v_norm(values)
        rotated: mx.array = self.attention.rope(keys.transpose(0, 2, 1, 3), offset=start)
        return rotated, values.transpose(0, 2, 1, 3)


def sites_of(model: Any, layers: Sequence[int]) -> list[Site]:
    """The attention of chosen layers; ModelError names one whose rows cannot be supplied from elsewhere."""
    sites = []
    for layer in layers:
        attention: Any = getattr(model.layers[layer], "self_attn", {})
        name = f"{type(attention).__module__.rsplit('.', 1)[-1]}.{type(attention).__name__}"
        failed = f"keys and values of layer {layer} ({name}) cannot be restored"
        if name not in KINDS or "k_proj" not in attention:
            raise ModelError(f"{failed}; this is known of {', '.join(KINDS)}")
        if type(attention.rope).__name__ == VARYING_ROPE:
            raise ModelError(f"{failed}: {VARYING_ROPE} depends on the length")
        sites.append(Site(layer, attention, KINDS[name]))
    return sites
