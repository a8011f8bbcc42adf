"""Small tokenizers of every kind that decodes in its own way, and what texts and stop strings ought to be.

The oracle decodes all tokens at once, for every number of them; it is slow and cannot be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?'\n"
WORDS = ("Paris", "is", "the", "capital", "and", "3", "one", "two", ",", "n't", "'s", "é", "你好")
FEW = "Paris is the capital, and  one 3 'two' \n n't 你好 é 🙂🙃 𓂀 it 's , fine."
BYTES = [f"<0x{value:02X}>" for value in range(256)]
MARKED = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def byte_level() -> Tokenizer:
    """As GPT-2's and most others: letters stand for bytes, Ġ for the one of a space."""
    spelled = [_spelled(part) for word in WORDS for part in (f" {word}", word)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = _merged(["<s>", "</s>", *alphabet], spelled)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _spelled(text: str) -> str:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]


def sentencepiece(decoder: Any) -> Tokenizer:
    """As Llama 2's and Gemma's: ▁ for a space, bytes for what is not in the vocabulary."""
    words = [part for word in WORDS for part in (f"▁{word}", word)]
    tokenizer = _merged(["<s>", "</s>", "<unk>", *BYTES, "▁", *LETTERS], words, byte_fallback=True)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoder
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT's: a space before every word, taken out again before punctuation."""
    vocabulary = [
        "<s>",
        "</s>",
        "<unk>",
        *LETTERS,
        *WORDS,
        *[f"##{letter}" for letter in LETTERS],
        "ve",
        "re",
    ]
    numbered = {token: index for index, token in enumerate(dict.fromkeys(vocabulary))}
    tokenizer = Tokenizer(models.WordPiece(numbered, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _merged(first: Sequence[str], words: Sequence[str], **switches: Any) -> Tokenizer:
    """BPE that knows some words, letter by letter from their beginnings."""
    vocabulary = list(first)
    merges = []
    for word in words:
        for size in range(2, len(word) + 1):
            merges.append((word[: size - 1], word[size - 1]))
            vocabulary += [word[size - 1], word[:size]]
    numbered = {token: index for index, token in enumerate(dict.fromkeys(vocabulary))}
    unknown = "<unk>" if switches else None
    return Tokenizer(models.BPE(numbered, list(dict.fromkeys(merges)), unk_token=unknown, **switches))


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "sentencepiece": lambda: sentencepiece(decoders.Sequence(MARKED)),
    "sentencepiece-stripped": lambda: sentencepiece(decoders.Sequence([*MARKED, decoders.Strip(" ", 1, 0)])),
    "metaspace": lambda: sentencepiece(decoders.Metaspace()),
    "word-piece-cleaned": word_piece,
}


def load(kind: str, folder: Path) -> Any:
    """A tokenizer as mlx-lm loads it from a folder."""
    folder.mkdir()
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": kind.endswith("cleaned"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)  # type: ignore[no-untyped-call]


def ids(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def oracle(
    tokenizer: Any, tokens: Sequence[int], texts: Sequence[str], prompt: Sequence[int] = ()
) -> tuple[int | None, str]:
    """How many tokens end the text at a stop string, and the text before it."""
    before = len(tokenizer.decode(list(prompt)))
    text = ""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode([*prompt, *tokens[:count]])[before:]
        if ends := [text.index(stop) for stop in texts if stop in text]:
            return count, text[: min(ends)]
    return None, text
