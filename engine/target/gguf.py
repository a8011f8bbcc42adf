"""GGUF files as mlx-lm folders: Llama, Qwen and Gemma, in every packing that the ``gguf`` package reads.

llama.cpp's converter stores some things differently from the published weights; here they are put back:
Llama's query and key rows (it interleaves the halves that rotate together), Gemma's norms (it adds the 1 that
Gemma's layers add themselves), and Llama 3's frequencies (a tensor instead of four numbers). Tokenizers are
rebuilt by transformers. Source: llama.cpp, ``convert_hf_to_gguf.py`` and ``gguf-py/gguf/constants.py``.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import pi
from pathlib import Path
from typing import Any

import mlx.core as mx
from gguf import GGUFReader
from gguf.quants import dequantize
from mlx.utils import tree_flatten
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from engine.device import read_float
from engine.errors import ModelError, wrap_errors
from engine.target.folder import build_unloaded

SHARD_BYTES = 2 * 2**30  # weights converted and held at a time
Progress = Callable[[int, int, str, str], None]  # done, of how many, phase, detail

_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class _Family:
    model_type: str  # as mlx-lm calls it
    architecture: str
    names: Mapping[str, str]  # of a layer's tensors
    gemma: bool = False  # norms hold 1 + w
    interleaved: bool = False  # query and key rows


FAMILIES = {
    "llama": _Family("llama", "LlamaForCausalLM", _BLOCK, interleaved=True),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM", _BLOCK),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM", _BLOCK | _NORMS),
    "gemma": _Family("gemma", "GemmaForCausalLM", _BLOCK, gemma=True),
    "gemma2": _Family("gemma2", "Gemma2ForCausalLM", _BLOCK | _FOUR_NORMS, gemma=True),
    "gemma3": _Family("gemma3_text", "Gemma3ForCausalLM", _BLOCK | _NORMS | _FOUR_NORMS, gemma=True),
}


class _Metadata:
    """The key-value pairs of a file."""

    def __init__(self, path: Path, reader: Any) -> None:
        self.path, self._fields = path, reader.fields
        self.architecture = str(self.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        found = self._fields.get(key)
        return default if found is None else found.contents()

    def of_model(self, key: str, default: Any = None) -> Any:
        """A value of the architecture; ModelError where it is needed and missing."""
        value = self.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelError(f"{self.path}: {self.architecture}.{key} is missing; the file is not whole")
        return value


@dataclass(frozen=True)
class GGUFModel:
    """A GGUF file of a supported family that holds all tensors of its model."""

    path: Path
    reader: Any
    family: _Family
    metadata: _Metadata
    config: Mapping[str, Any]  # as mlx-lm reads it
    names: Mapping[str, str]  # published names of its tensors; those left out are said by the configuration

    @property
    def elements(self) -> int:
        """Values of all its tensors."""
        return sum(int(each.n_elements) for each in self.reader.tensors)


def open_gguf(path: Path) -> GGUFModel:
    """Read what a GGUF file holds, not yet its weights.

    ModelError for a file that is broken, lacks tensors, or is of a family that is not supported.
    """
    with wrap_errors(lambda why: ModelError(f"{path} cannot be read as GGUF: {why}")):
        reader = GGUFReader(path)
    metadata = _Metadata(path, reader)
    if (parts := int(metadata.get("split.count", 0))) > 1:
        raise ModelError(
            f"{path} is part {int(metadata.get('split.no', 0)) + 1} of {parts} of a split model; join them "
            f"with llama.cpp's: llama-gguf-split --merge {path} JOINED.gguf, then convert JOINED.gguf"
        )
    family = FAMILIES.get(metadata.architecture)
    if family is None or metadata.get(f"{metadata.architecture}.expert_count", 0):
        kind = "a mixture of experts" if family else "the architecture"
        raise ModelError(
            f"{path}: {kind} {metadata.architecture!r} is not supported; GGUF files of {', '.join(FAMILIES)} "
            "are; pull the model from the hub instead, for example from mlx-community"
        )
    tensors = {each.name: each for each in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path} lacks the tensor token_embd.weight; the file is not whole, fetch it again")
    config = _config(family, metadata, tensors)
    names = {each: _published(path, family, each) for each in tensors if each != "rope_freqs.weight"}
    with wrap_errors(lambda why: ModelError(f"{path}: its sizes make no {family.model_type} model: {why}")):
        needed = dict(tree_flatten(build_unloaded(config).parameters()))
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    if missing := sorted(set(needed) - set(names.values()) - tied):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{path} lacks the weights {missing[0]}{more}; it is not whole, fetch it again")
    return GGUFModel(path, reader, family, metadata, config, names)


def convert_gguf(
    source: GGUFModel, folder: Path, dtype: mx.Dtype, progress: Progress = lambda *_: None
) -> None:
    """Write a GGUF file as a folder that mlx-lm loads, its weights unpacked to ``dtype``.

    ``folder`` exists and is empty. ModelError for a packing or a tokenizer that is not supported.
    """
    (folder / "config.json").write_text(json.dumps(source.config, indent=1))
    with wrap_errors(lambda why: ModelError(f"{source.path}: its tokenizer cannot be rebuilt: {why}")):
        _save_tokenizer(source.metadata, folder, source.config)
    _save_weights(source, folder, dtype, progress)


def _published(path: Path, family: _Family, tensor: str) -> str:
    """The published name of a tensor; ModelError for one that the family does not have."""
    stem, _, kind = tensor.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    _, layer, part = [*stem.split(".", 2), "", ""][:3]
    if not stem.startswith("blk.") or part not in family.names:
        raise ModelError(f"{path}: the tensor {tensor} is not one of a {family.model_type} model")
    return f"model.layers.{layer}.{family.names[part]}.{kind}"


def _config(family: _Family, metadata: _Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
    of, arch = metadata.of_model, metadata.architecture
    heads, hidden = of("attention.head_count"), of("embedding_length")
    head_dim = of("attention.key_length", hidden // heads)
    config = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "num_hidden_layers": of("block_count"),
        "intermediate_size": of("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": of("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": float(f"{of('attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_theta": float(of("rope.freq_base", 10000.0)),
        "max_position_embeddings": of("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if arch in ("gemma2", "gemma3"):
        # 27B models scale queries by another number than their heads' size; no key of the file says so
        large = of("block_count") in (46, 62)
        config["query_pre_attn_scalar"] = hidden // heads if large else head_dim
    if arch == "gemma2":
        config["attn_logit_softcapping"] = of("attn_logit_softcapping", 50.0)
        config["final_logit_softcapping"] = of("final_logit_softcapping", 30.0)
    if arch == "gemma3":
        config["sliding_window"] = of("attention.sliding_window")
        config["sliding_window_pattern"] = 6
        config["rope_local_base_freq"] = float(of("rope.freq_base_swa", 10000.0))
    config["rope_scaling"] = _rope_scaling(metadata, tensors.get("rope_freqs.weight"), config)
    return {name: value for name, value in config.items() if value is not None}


def _rope_scaling(metadata: _Metadata, freqs: Any, config: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = metadata.of_model("rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(metadata.of_model("rope.scaling.factor"))}
    if kind != "none":
        raise ModelError(f"{metadata.path}: rope scaling {kind!r} is not supported; none and linear are")
    if freqs is None:
        return None
    found = mx.array(freqs.data).reshape(-1)
    scaling = {"factor": read_float(found.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = original = 8192
    half = int(config["head_dim"]) // 2
    waves = 2 * pi * config["rope_theta"] ** (mx.arange(half) / half)
    smooth = (original / waves - 1.0) / 3.0
    factor = scaling["factor"]
    wanted = mx.where(waves < original / 4.0, 1.0, 1.0 / ((1 - smooth) / factor + smooth))
    wanted = mx.where(waves > original, factor, wanted)
    if found.shape != wanted.shape or not mx.allclose(found, wanted, rtol=1e-3).item():
        raise ModelError(f"{metadata.path}: rope_freqs are not those of Llama 3; this model is not supported")
    return {"rope_type": "llama3", **scaling}


def _save_tokenizer(metadata: _Metadata, folder: Path, config: Mapping[str, Any]) -> None:
    ggml = {
        key: metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "scores", "token_type", "merges")
    }
    ggml["tokenizer_type"] = kind = metadata.get("tokenizer.ggml.model")
    ggml["pre_tokenizer_type"] = pre = metadata.get("tokenizer.ggml.pre")
    told = {key: value for key, value in ggml.items() if value is not None}
    backend, _ = convert_gguf_tokenizer(metadata.architecture, told)
    if pre == "smollm":  # splits numbers into digits; transformers' table does not have it
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            special[f"{name}_token"] = ggml["tokens"][token]
    if metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        from tokenizers.processors import TemplateProcessing

        bos, number = special["bos_token"], int(config["bos_token_id"])
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, number)]
        )
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        model_max_length=int(config["max_position_embeddings"]),
        clean_up_tokenization_spaces=False,
        **special,
    )
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    tokenizer.save_pretrained(folder)


def _save_weights(source: GGUFModel, folder: Path, dtype: mx.Dtype, progress: Progress) -> None:
    shards: list[list[Any]] = [[]]
    held = 0
    for tensor in source.reader.tensors:
        size = int(tensor.n_elements) * dtype.size
        if held and held + size > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += size
    index: dict[str, str] = {}
    done, total = 0, len(source.reader.tensors)
    for number, shard in enumerate(shards, 1):
        weights: dict[str, mx.array] = {}
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for tensor in shard:
            progress(done, total, "converting", tensor.name)
            if name := source.names.get(tensor.name):
                weights[name] = _converted(source, tensor).astype(dtype)
                mx.eval(weights[name])
            done += 1
        mx.save_safetensors(str(folder / file), weights, metadata={"format": "mlx"})
        index |= dict.fromkeys(weights, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index}, indent=1)
    )
    progress(total, total, "converting", "done")


def _converted(source: GGUFModel, tensor: Any) -> mx.array:
    """A tensor as it is published, float32 [rows, columns] or [rows]."""
    path, config, family, name = source.path, source.config, source.family, source.names[tensor.name]
    try:
        value = mx.array(dequantize(tensor.data, tensor.tensor_type))
    except NotImplementedError:
        packing = tensor.tensor_type.name
        raise ModelError(
            f"{path}: {tensor.name} is packed as {packing}, which cannot be unpacked; "
            "give a file packed as Q4_K_M, Q8_0, F16 or another common type"
        ) from None
    stem = name.rpartition(".")[0]
    if family.interleaved and stem.endswith(("q_proj", "k_proj")):
        heads = config["num_attention_heads" if stem.endswith("q_proj") else "num_key_value_heads"]
        value = value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
    if family.gemma and stem.endswith("norm"):
        value = value - 1.0
    return value
