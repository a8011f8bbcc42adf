"""The configuration of a DFlash or DFlash 2 drafter, read from a published ``config.json`` and checked.

Every field that changes the network's arithmetic is read; a value this project does not implement is an
error that names it. Fields that do not (dropout, initialiser, transformers' bookkeeping) are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

from engine.errors import ModelError
from engine.networks.rotary import RotaryConfig, rotary_config

LARGEST_SIZE = 2**31  # sizes are 32-bit numbers
LARGEST = {
    "block_size": 512,  # tokens; twice as many may be asked for
    "head_dim": 4096,  # its frequencies are computed one by one before the weights are looked at
}
SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = {"DFlashDraftModel": "dflash", "DFlash2DraftModel": "dflash2"}  # by the published architecture
NESTED_KEYS = {
    "target_layer_ids", "mask_token_id", "block_size", "input_embedding_scale", "output_multiplier",
    "final_logit_softcapping",
}  # fmt: skip
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")
# What transformers' Qwen3Config assumes where a config.json is silent.
MOST_CANDIDATES = 4096  # a position; their pairs are scored
HEAD_DIM, WINDOW, FIRST_SLIDING_LAYER = 128, 4096, 28


@dataclass(frozen=True)
class Second:
    conv_kernel_size: int  # block rows a convolution sees, the row itself included
    conv_group_size: int  # channels that share a dynamic kernel
    selector_rank: int  # width of the codebooks that score pairs of neighbours
    selector_top_k: int  # candidates per position


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
    rotary: RotaryConfig
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    layer_types: tuple[str, ...]
    num_target_layers: int | None = None
    sliding_window: int | None = None
    is_causal: bool | None = None
    attention_bias: bool = False
    hidden_act: str = "silu"
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    second: Second | None = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "DFlashConfig":
        """Read a ``config.json``; values of ``dflash_config`` go before those of the top level."""
        kind = _kind(raw)
        nested = raw.get("dflash_config") or {}
        if not isinstance(nested, Mapping):
            raise _fault(f"dflash_config must be an object, not {nested!r}")
        second_keys = [each.name for each in fields(Second)] if kind == "dflash2" else []
        if unknown := sorted(nested.keys() - NESTED_KEYS - {*second_keys}):
            raise ModelError(f"dflash_config: unknown fields {', '.join(unknown)}")
        read = _Fields({**raw, **{name: value for name, value in nested.items() if value is not None}})
        layers, heads = read.integer("num_hidden_layers"), read.integer("num_attention_heads")
        window = read.integer("sliding_window", WINDOW if raw.get("use_sliding_window") else 0)
        head_dim = read.integer("head_dim", HEAD_DIM)
        softcap = read.number("final_logit_softcapping", 0.0)
        config = cls(
            hidden_size=read.integer("hidden_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=read.integer("num_key_value_heads", heads),
            head_dim=head_dim,
            intermediate_size=read.integer("intermediate_size"),
            vocab_size=read.integer("vocab_size"),
            rms_norm_eps=read.number("rms_norm_eps"),
            rotary=rotary_config(raw, head_dim),
            block_size=read.integer("block_size"),
            target_layer_ids=read.integers("target_layer_ids"),
            mask_token_id=read.integer("mask_token_id", least=0),
            layer_types=_layer_types(read, layers, window),
            num_target_layers=read.integer("num_target_layers", 0) or None,
            sliding_window=window or None,
            is_causal=read.switch("is_causal"),
            attention_bias=bool(read.switch("attention_bias")),
            hidden_act=str(raw.get("hidden_act", "silu")),
            input_embedding_scale=read.number("input_embedding_scale", 1.0),
            output_multiplier=read.number("output_multiplier", 1.0),
            final_logit_softcapping=softcap if softcap > 0 else None,
            second=Second(*map(read.integer, second_keys)) if second_keys else None,
        )
        config._check_layers()
        config._check_ids()
        return config

    def _check_layers(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers:
            raise _fault(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers"
            )
        if odd := sorted(set(self.layer_types) - {SLIDING, FULL}):
            raise _fault(f"layer_types holds {', '.join(odd)}; known are {SLIDING}, {FULL}")
        if SLIDING in self.layer_types and self.sliding_window is None:
            raise _fault(f"a {SLIDING} layer needs a positive sliding_window, not {self.sliding_window}")
        if self.hidden_act not in ACTIVATIONS:
            raise _fault(f"hidden_act {self.hidden_act!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.head_dim % 2:
            raise _fault(f"head_dim {self.head_dim} is odd; its halves are rotated against each other")
        if self.num_attention_heads % self.num_key_value_heads:
            raise _fault(f"{self.num_attention_heads} heads are no multiple of {self.num_key_value_heads}")
        if self.second is not None and self.hidden_size % (group := self.second.conv_group_size):
            raise _fault(f"hidden_size {self.hidden_size} is no multiple of conv_group_size {group}")

    def _check_ids(self) -> None:
        layers, ids = self.num_target_layers, self.target_layer_ids
        if not ids:
            raise _fault("target_layer_ids is empty")
        if min(ids) < 0 or (layers is not None and max(ids) >= layers):
            raise _fault(f"target_layer_ids {list(ids)} do not fit {layers} target layers")
        if self.mask_token_id >= self.vocab_size:
            raise _fault(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        top_k = self.second.selector_top_k if self.second is not None else 0
        if top_k > self.vocab_size:
            raise _fault(f"selector_top_k {top_k} exceeds the vocabulary of {self.vocab_size}")
        if top_k > MOST_CANDIDATES:
            raise _fault(f"selector_top_k must be at most {MOST_CANDIDATES}, not {top_k}")

    @property
    def kind(self) -> str:
        return "dflash" if self.second is None else "dflash2"

    def window(self, layer: int) -> int | None:
        """Attention window of a layer in positions, None where it sees everything."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def causal(self, layer: int) -> bool:
        """Whether a block row may look only at rows before it: sliding layers, unless the config says."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal


def _fault(what: str) -> ModelError:
    return ModelError(f"drafter config.json: {what}")


class _Fields:
    """Typed reading; null counts as absent."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def get(self, name: str, default: Any = None) -> Any:
        value = default if self._values.get(name) is None else self._values[name]
        if value is None:
            raise _fault(f"{name} is missing")
        return value

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.get(name, default)
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole:
            raise _fault(f"{name} must be a whole number, not {value!r}")
        if value < least and value != default:
            wanted = "positive" if least == 1 else f"at least {least}"
            raise _fault(f"{name} must be {wanted}, not {value}")
        if value >= LARGEST_SIZE:
            raise _fault(f"{name} must be less than {LARGEST_SIZE}, not {value}")
        if value > LARGEST.get(name, LARGEST_SIZE):
            raise _fault(f"{name} must be at most {LARGEST[name]}, not {value}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise _fault(f"{name} must be a finite number, not {value!r}")
        return float(value)

    def integers(self, name: str) -> tuple[int, ...]:
        values = self.get(name)
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise _fault(f"{name} must be a list of whole numbers, not {values!r}")
        return tuple(values)

    def switch(self, name: str) -> bool | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, bool):
            raise _fault(f"{name} must be true, false or absent, not {value!r}")
        return value


def _layer_types(fields: _Fields, layers: int, window: int) -> tuple[str, ...]:
    """As written, else transformers' rule: where windows are used, sliding from ``max_window_layers`` on."""
    given = fields.get("layer_types", [])
    if not isinstance(given, list) or not all(isinstance(item, str) for item in given):
        raise _fault(f"layer_types must be a list of names, not {given!r}")
    first = fields.integer("max_window_layers", FIRST_SLIDING_LAYER, least=0)
    slides = bool(fields.switch("use_sliding_window")) and window > 0
    return tuple(given) or tuple(SLIDING if slides and index >= first else FULL for index in range(layers))


def _kind(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or ["DFlashDraftModel"]
    found = [KINDS[name] for name in names if name in KINDS] if isinstance(names, list) else []
    if not found:
        raise ModelError(f"not a DFlash drafter: architectures is {names}")
    if raw.get("model_type", "qwen3") != "qwen3":
        raise ModelError(f"drafter model_type {raw['model_type']!r} is not known; DFlash drafters are qwen3")
    return found[0]
