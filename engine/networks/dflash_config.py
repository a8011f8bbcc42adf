"""The configuration of a DFlash or DFlash 2 drafter, read from a published ``config.json`` and checked.

Every field that changes the network's arithmetic is read; a value this project does not implement is an
error that names it. Fields that do not (dropout, initialiser, transformers' bookkeeping) are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    FiniteFloat,
    PlainValidator,
    Strict,
    StrictBool,
    StrictInt,
    ValidationInfo,
)

from engine.errors import ModelError
from engine.networks.rotary import RotaryConfig, rotary_config
from engine.target.folder import Index, Size, validated

SLIDING = "sliding_attention"
KINDS = {"DFlashDraftModel": "dflash", "DFlash2DraftModel": "dflash2"}  # by the published architecture
NESTED_KEYS = {
    "target_layer_ids", "mask_token_id", "block_size", "input_embedding_scale", "output_multiplier",
    "final_logit_softcapping",
}  # fmt: skip
# What transformers' Qwen3Config assumes where a config.json is silent; WINDOW only where windows are used.
HEAD_DIM, WINDOW, FIRST_SLIDING_LAYER = 128, 4096, 28
MOST_CANDIDATES = 4096  # a position; their pairs are scored

Number = Annotated[FiniteFloat, Strict()]
Capped = Annotated[Size, AfterValidator(int)]  # so that a bound of its own is looked at last
Softcap = Annotated[Number, AfterValidator(lambda cap: cap if cap > 0 else None)] | None
SizeOrNone = Annotated[Index, AfterValidator(lambda size: size or None)] | None


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def _rotary(raw: Mapping[str, Any], info: ValidationInfo) -> RotaryConfig:
    return rotary_config(raw, info.data.get("head_dim", HEAD_DIM))


@dataclass(frozen=True)
class Second:
    """What DFlash 2 has besides."""

    conv_kernel_size: Size  # block rows a convolution sees, the row itself included
    conv_group_size: Size  # channels that share a dynamic kernel
    selector_rank: Size  # width of the codebooks that score pairs of neighbours
    selector_top_k: Size  # candidates per position


@dataclass(frozen=True)
class DFlashConfig:
    """A published ``config.json``, checked. Lengths in tokens, ids in the target's vocabulary."""

    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    intermediate_size: Size
    vocab_size: Size
    rms_norm_eps: Number
    head_dim: Annotated[Capped, Field(le=4096)]  # its frequencies are computed one by one
    rotary: Annotated[RotaryConfig, PlainValidator(_rotary)]
    block_size: Annotated[Capped, Field(le=512)]  # twice as many may be asked for
    target_layer_ids: Annotated[tuple[StrictInt, ...], Field(min_length=1)]
    mask_token_id: Index
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] = ()
    num_target_layers: SizeOrNone = None
    use_sliding_window: StrictBool = False
    sliding_window: SizeOrNone = None
    max_window_layers: Index = FIRST_SLIDING_LAYER
    is_causal: StrictBool | None = None
    attention_bias: StrictBool = False
    hidden_act: Literal["silu", "gelu_pytorch_tanh", "gelu"] = "silu"
    input_embedding_scale: Number = 1.0
    output_multiplier: Number = 1.0
    final_logit_softcapping: Softcap = None
    second: Second | None = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "DFlashConfig":
        """Read a ``config.json``; ``dflash_config`` goes before the top level, and null counts as absent."""
        kind = _kind(raw)
        nested = raw.get("dflash_config") or {}
        if not isinstance(nested, Mapping):
            raise _fault(f"dflash_config must be an object, not {nested!r}")
        second_keys = [each.name for each in fields(Second)] if kind == "dflash2" else []
        if unknown := sorted(nested.keys() - NESTED_KEYS - {*second_keys}):
            raise ModelError(f"dflash_config: unknown fields {', '.join(unknown)}")
        given = {name: each for part in (raw, nested) for name, each in part.items() if each is not None}
        given |= {name: int(each) for name, each in given.items() if _is_whole(each)}
        given.setdefault("num_key_value_heads", given.get("num_attention_heads", 1))
        if given.get("use_sliding_window"):
            given.setdefault("sliding_window", WINDOW)
        given |= {"rotary": raw, "head_dim": given.get("head_dim", HEAD_DIM)}
        if second_keys:
            given["second"] = {name: given[name] for name in second_keys if name in given}
        config: DFlashConfig = validated(cls, given, "drafter config.json")
        config._check_layers()
        config._check_ids()
        return config

    def _check_layers(self) -> None:
        types, window = self.layer_types, self.sliding_window
        if types and len(types) != self.num_hidden_layers:
            raise _fault(f"layer_types has {len(types)} entries for {self.num_hidden_layers} layers")
        if (SLIDING in types or self.use_sliding_window) and window is None:
            raise _fault(f"a {SLIDING} layer needs a positive sliding_window, not {window}")
        if self.head_dim % 2:
            raise _fault(f"head_dim {self.head_dim} is odd; its halves are rotated against each other")
        if self.num_attention_heads % self.num_key_value_heads:
            raise _fault(f"{self.num_attention_heads} heads are no multiple of {self.num_key_value_heads}")
        if self.second is not None and self.hidden_size % (group := self.second.conv_group_size):
            raise _fault(f"hidden_size {self.hidden_size} is no multiple of conv_group_size {group}")

    def _check_ids(self) -> None:
        layers, ids, vocabulary = self.num_target_layers, self.target_layer_ids, self.vocab_size
        if min(ids) < 0 or (layers is not None and max(ids) >= layers):
            raise _fault(f"target_layer_ids {list(ids)} do not fit {layers} target layers")
        if self.mask_token_id >= vocabulary:
            raise _fault(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {vocabulary}")
        top_k = self.second.selector_top_k if self.second else 0
        if top_k > vocabulary:
            raise _fault(f"selector_top_k {top_k} exceeds the vocabulary of {vocabulary}")
        if top_k > MOST_CANDIDATES:
            raise _fault(f"selector_top_k must be at most {MOST_CANDIDATES}, not {top_k}")

    @property
    def kind(self) -> str:
        return "dflash" if self.second is None else "dflash2"

    def window(self, layer: int) -> int | None:
        """Attention window of a layer in positions, None where it sees everything."""
        return self.sliding_window if self._slides(layer) else None

    def causal(self, layer: int) -> bool:
        """Whether a block row may look only at rows before it: sliding layers, unless the config says."""
        return self._slides(layer) if self.is_causal is None else self.is_causal

    def _slides(self, layer: int) -> bool:
        """As written, else transformers' rule: where windows are used, from ``max_window_layers`` on."""
        if self.layer_types:
            return self.layer_types[layer] == SLIDING
        return self.use_sliding_window and self.sliding_window is not None and layer >= self.max_window_layers


def _fault(what: str) -> ModelError:
    return ModelError(f"drafter config.json: {what}")


def _kind(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or ["DFlashDraftModel"]
    found = [KINDS[name] for name in names if name in KINDS] if isinstance(names, list) else []
    if not found:
        raise ModelError(f"not a DFlash drafter: architectures is {names}")
    if raw.get("model_type", "qwen3") != "qwen3":
        raise ModelError(f"drafter model_type {raw['model_type']!r} is not known; DFlash drafters are qwen3")
    return found[0]
