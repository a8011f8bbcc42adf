"""GGUF files of every supported family become folders that compute what the model did before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from mlx.utils import tree_flatten
from mlx_lm.models import gemma, gemma2, gemma3_text, llama, qwen2, qwen3
from mlx_lm.utils import load_model, load_tokenizer

from engine.errors import ModelError
from engine.target.gguf import FAMILIES, convert_gguf, open_gguf

VOCAB = 262
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "vocab_size": VOCAB,
    "rope_theta": 10000.0, "max_position_embeddings": 512,
}  # fmt: skip
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (llama, {"model_type": "llama", "tie_word_embeddings": False}),
    "qwen2": (qwen2, {"model_type": "qwen2", "tie_word_embeddings": True}),
    "qwen3": (qwen3, {"model_type": "qwen3", "tie_word_embeddings": False}),
    "gemma": (gemma, {"model_type": "gemma"}),
    "gemma2": (
        gemma2,
        {
            "model_type": "gemma2",
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3": (
        gemma3_text,
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000.0,
        },
    ),
}
TOKENS = mx.array([[5, 77, 140, 9, 201, 33, 8, 90, 15, 61, 12, 250]])


def built(family: str) -> Any:
    module, own = MODELS[family]
    mx.random.seed(11)
    model = module.Model(module.ModelArgs.from_dict(SIZES | own))
    noisy = [
        (name, value + 0.1 * mx.random.normal(value.shape))
        for name, value in tree_flatten(model.parameters())
    ]
    model.load_weights(noisy)
    model.eval()
    return model


def write_gguf(
    path: Path, family: str, model: Any, packing: GGMLQuantizationType | None = None, **more: Any
) -> None:
    """What llama.cpp's converter makes of a model, by the rules of its ``convert_hf_to_gguf.py``."""
    writer = GGUFWriter(str(path), family)
    writer.add_block_count(len(model.layers))
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    if family == "gemma3":
        writer.add_sliding_window(8)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(50.0)
        writer.add_final_logit_softcapping(30.0)
    add_tokenizer(writer)
    for key, value in more.items():
        writer.add_uint32(f"{family}.{key}", value)
    published = FAMILIES[family]
    names = {theirs: ours for ours, theirs in published.names.items()}
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, value in tree_flatten(model.parameters()):
        stem, _, kind = name.rpartition(".")
        array = np.array(value, np.float32)
        if stem in outer:
            stored = outer[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            stored = f"blk.{layer}.{names[part]}"
            if family == "llama" and part.endswith(("q_proj", "k_proj")):
                heads = 4 if part.endswith("q_proj") else 2
                array = array.reshape(heads, 2, 8, 64).swapaxes(1, 2).reshape(array.shape)
        if family.startswith("gemma") and stem.endswith("norm"):
            array = array + 1
        if packing is not None and array.ndim == 2:
            writer.add_tensor(f"{stored}.{kind}", quantize(array, packing), raw_dtype=packing)
        else:
            writer.add_tensor(f"{stored}.{kind}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: GGUFWriter) -> None:
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<pad>", "<s>", "</s>", "<user>", *letters, "1 2", "ab"][:VOCAB])
    writer.add_token_types([3, 3, 3, 3, *[1] * 258])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<user>{{ m['content'] }}{% endfor %}")


def converted(
    root: Path, family: str, packing: GGMLQuantizationType | None = None, **more: Any
) -> tuple[Any, Any, Path]:
    """The model, the one that came back, and its folder."""
    model, folder = built(family), root / "folder"
    write_gguf(root / "m.gguf", family, model, packing, **more)
    folder.mkdir()
    convert_gguf(open_gguf(root / "m.gguf"), folder, mx.float32)
    return model, load_model(folder)[0], folder


@pytest.mark.parametrize("family", MODELS)
def test_a_converted_model_computes_the_same(tmp_path: Path, family: str):
    before, after, folder = converted(tmp_path, family)
    assert mx.allclose(before(TOKENS), after(TOKENS), rtol=1e-4, atol=1e-4).item()
    assert json.loads((folder / "config.json").read_text())["head_dim"] == 16


@pytest.mark.parametrize(
    ("packing", "error"),
    [(GGMLQuantizationType.F16, 1e-3), (GGMLQuantizationType.Q8_0, 0.02), (GGMLQuantizationType.Q4_0, 0.3),
     (GGMLQuantizationType.Q5_1, 0.2), (GGMLQuantizationType.BF16, 0.01)],
)  # fmt: skip
def test_packed_weights_are_unpacked(tmp_path: Path, packing: GGMLQuantizationType, error: float):
    before, after, _ = converted(tmp_path, "qwen3", packing)
    stored, kept = (side.model.layers[1].self_attn.q_proj.weight for side in (before, after))
    worst = mx.abs(stored - kept).max().item() / mx.abs(stored).max().item()
    assert worst <= error


def test_the_tokenizer_and_its_template_come_along(tmp_path: Path):
    _, _, folder = converted(tmp_path, "qwen2")
    tokenizer = load_tokenizer(folder)
    text = "ab<user>12 é\n\n  你"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("ab") == [261]
    assert tokenizer.encode("<user>") == [3]
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "<user>ab"


@pytest.mark.parametrize(("architecture", "more"), [("mamba", {}), ("qwen2", {"expert_count": 8})])
def test_other_architectures_are_refused_by_name(tmp_path: Path, architecture: str, more: dict[str, int]):
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(str(path), architecture)
    for key, value in more.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=f"{architecture}.*is not supported; GGUF files of llama, qwen2"):
        open_gguf(path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no such thing at all" * 10])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="cannot be read as GGUF"):
        open_gguf(path)


def test_a_file_without_all_layers_is_refused(tmp_path: Path):
    model = built("qwen3")
    model.layers[2].pop("mlp")
    write_gguf(tmp_path / "m.gguf", "qwen3", model)
    said = r"lacks the weights model\.layers\.2\.mlp\.down_proj\.weight and 2 more; it is not whole"
    with pytest.raises(ModelError, match=said):
        open_gguf(tmp_path / "m.gguf")


def test_the_first_part_of_a_split_file_is_refused(tmp_path: Path):
    path = tmp_path / "m-00001-of-00003.gguf"
    writer = GGUFWriter(str(path), "qwen3")
    writer.add_uint16("split.no", 0)
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="is part 1 of 3 of a split model; join them"):
        open_gguf(path)
