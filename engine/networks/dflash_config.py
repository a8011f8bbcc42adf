"""The configuration of a DFlash drafter, read from a published ``config.json`` and checked.

Every field that changes the network's arithmetic is read; a value this project does not implement is an
error that names it. Fields that do not (dropout, initialiser, transformers' bookkeeping) are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelError

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ROPE_KEYS = {
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
}  # fmt: skip
NESTED_KEYS = {
    "target_layer_ids", "mask_token_id", "block_size", "input_embedding_scale", "output_multiplier",
    "final_logit_softcapping",
}  # fmt: skip
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")


@dataclass(frozen=True)
class DFlashConfig:
    """A published ``config.json``, checked. Lengths in tokens, ids in the target's vocabulary."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    layer_types: tuple[str, ...]
    num_target_layers: int | None = None
    max_position_embeddings: int | None = None
    rope_scaling: Mapping[str, Any] | None = None
    sliding_window: int | None = None
    is_causal: bool | None = None
    attention_bias: bool = False
    hidden_act: str = "silu"
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "DFlashConfig":
        """Read a ``config.json``. Values of ``dflash_config`` go before those of the top level.

        Raises:
            ModelError: a field is missing, or names an architecture this network does not have.
        """
        _refuse_other_architectures(raw)
        nested = raw.get("dflash_config") or {}
        if unknown := sorted(set(nested) - NESTED_KEYS):
            raise ModelError(f"dflash_config: unknown fields {', '.join(unknown)}")

        def need(name: str) -> Any:
            value = nested.get(name, raw.get(name))
            if value is None:
                raise ModelError(f"drafter config.json: {name} is missing")
            return value

        def number(name: str, default: float) -> float:
            value = nested.get(name, raw.get(name))
            return default if value is None else float(value)

        layers, heads, hidden = (
            int(need(name)) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        )
        theta, scaling = _rope(raw)
        softcap = number("final_logit_softcapping", 0.0)
        config = cls(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            intermediate_size=int(need("intermediate_size")),
            vocab_size=int(need("vocab_size")),
            rms_norm_eps=float(need("rms_norm_eps")),
            rope_theta=theta,
            block_size=int(need("block_size")),
            target_layer_ids=tuple(int(index) for index in need("target_layer_ids")),
            mask_token_id=int(need("mask_token_id")),
            layer_types=tuple(raw.get("layer_types") or [FULL] * layers),
            num_target_layers=_optional_int(raw.get("num_target_layers")),
            max_position_embeddings=_optional_int(raw.get("max_position_embeddings")),
            rope_scaling=scaling,
            sliding_window=_optional_int(raw.get("sliding_window")),
            is_causal=raw.get("is_causal"),
            attention_bias=bool(raw.get("attention_bias", False)),
            hidden_act=str(raw.get("hidden_act", "silu")),
            input_embedding_scale=number("input_embedding_scale", 1.0),
            output_multiplier=number("output_multiplier", 1.0),
            final_logit_softcapping=softcap if softcap > 0 else None,
        )
        config._check()
        return config

    def _check(self) -> None:
        def refuse(what: str) -> None:
            raise ModelError(f"drafter config.json: {what}")

        if len(self.layer_types) != self.num_hidden_layers:
            refuse(f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers")
        if odd := sorted(set(self.layer_types) - {SLIDING, FULL}):
            refuse(f"layer_types holds {', '.join(odd)}; known are {SLIDING}, {FULL}")
        if SLIDING in self.layer_types and (self.sliding_window or 0) < 1:
            refuse(f"a {SLIDING} layer needs a positive sliding_window, not {self.sliding_window}")
        if self.is_causal not in (None, True, False):
            refuse(f"is_causal must be true, false or absent, not {self.is_causal!r}")
        if self.hidden_act not in ACTIVATIONS:
            refuse(f"hidden_act {self.hidden_act!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.num_attention_heads % self.num_key_value_heads:
            refuse(f"{self.num_attention_heads} heads are no multiple of {self.num_key_value_heads}")
        if not self.target_layer_ids:
            refuse("target_layer_ids is empty")
        layers = self.num_target_layers
        if min(self.target_layer_ids) < 0 or (layers is not None and max(self.target_layer_ids) >= layers):
            refuse(f"target_layer_ids {list(self.target_layer_ids)} do not fit {layers} target layers")
        if not 0 <= self.mask_token_id < self.vocab_size:
            refuse(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        if self.block_size < 1:
            refuse(f"block_size must be positive, not {self.block_size}")

    def window(self, layer: int) -> int | None:
        """Attention window of a layer in positions, None where it sees everything."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def causal(self, layer: int) -> bool:
        """Whether a block row may look only at rows before it: sliding layers, unless the config says."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal


def _optional_int(value: Any) -> int | None:
    return None if value is None else int(value)


def _refuse_other_architectures(raw: Mapping[str, Any]) -> None:
    names = raw.get("architectures") or []
    if "DFlash2DraftModel" in names:
        raise ModelError(
            "this is a DFlash 2 drafter (DFlash2DraftModel); only DFlashDraftModel can be loaded"
        )
    if names and "DFlashDraftModel" not in names:
        raise ModelError(f"not a DFlash drafter: architectures is {names}")
    if raw.get("model_type", "qwen3") != "qwen3":
        raise ModelError(f"drafter model_type {raw['model_type']!r} is not known; DFlash drafters are qwen3")


def _rope(raw: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """Base and scaling of the rotary embedding, from ``rope_parameters`` or the older pair of fields."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling")
    if scaling is not None:
        kind = scaling.get("rope_type") or scaling.get("type", "default")
        if kind not in ROPE_TYPES:
            raise ModelError(f"drafter rope_type {kind!r} is not one of {', '.join(ROPE_TYPES)}")
        if odd := sorted(key for key in set(scaling) - ROPE_KEYS if scaling[key] is not None):
            raise ModelError(f"drafter rope parameters: unknown fields {', '.join(odd)}")
    theta = (scaling or {}).get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ModelError("drafter config.json: rope_theta is missing")
    return float(theta), scaling
