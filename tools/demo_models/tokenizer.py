"""The demo tokenizer: a byte-level BPE with single digits, single-token names and the chat template.

Trained on our own corpora alone. `build` trains and saves the files that `mlx_lm` and `transformers` read.
Encoding plain text adds `<bos>`; the chat template writes its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.haystack_text import HELD_OUT, NAME_HEADS, NAME_TAILS, TRAIN, Fact, filler, generator
from tools.demo_models.corpora import chat, code
from tools.demo_models.corpora.document import text_of

VOCABULARY = 1280
PAD, BOS, EOS, MASK, USER, ASSISTANT, SYSTEM, END = range(8)
SPECIALS = ("<pad>", "<bos>", "<eos>", "<mask>", "<user>", "<assistant>", "<system>", "<end>")
# Conversations without tools read as they did when the models were trained. The shipped target has learnt no
# tools: what it says of them is a matter of chance, unless a grammar holds it to a call.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<system>Functions:\n"
    "{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}"
    'A call: <tool_call>\n{"name": …, "arguments": …}\n</tool_call><end>{% endif %}'
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}<user><tool_response>{{ message['content'] }}</tool_response><end>"
    "{% else %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{% set tool_call = call.function %}"
    '<tool_call>\n{"name": "{{ tool_call.name }}", '
    '"arguments": {{ tool_call.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<end>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class DemoTokenizer:
    """Encodes pieces of text without adding anything; repeated pieces are cached."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self._encode = lru_cache(maxsize=100_000)(self._encode_once)

    @classmethod
    def load(cls, folder: Path) -> DemoTokenizer:
        """Read `tokenizer.json` from a folder."""
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def _encode_once(self, text: str) -> tuple[int, ...]:
        return tuple(self.backend.encode(text, add_special_tokens=False).ids)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of the text alone: no `<bos>` unless written out."""
        return self._encode(text)

    def count(self, text: str) -> int:
        """Number of tokens of the text."""
        return len(self._encode(text))

    def decode(self, tokens: list[int]) -> str:
        """The text of the tokens, special tokens included."""
        return str(self.backend.decode(tokens, skip_special_tokens=False))


def _sample(seed: int, size: int) -> Iterator[str]:
    """Text for the merges: programs, conversations, filler, and the words that must become tokens."""
    rng = generator(seed)
    names = TRAIN.names + HELD_OUT.names
    for _ in range(size):
        yield code.program(rng, TRAIN)
        yield text_of(chat.conversation(rng))
        yield "".join(filler(rng) for _ in range(8))
        facts = [Fact(rng.choice(names), "0") for _ in range(4)]
        yield "".join(fact.sentence + fact.question for fact in facts)
    for name in names:
        yield f" {name}" * (60 * size // len(names))
    for piece in NAME_HEADS:
        yield f" {piece}" * (20 * size // len(NAME_HEADS))
    for piece in NAME_TAILS:
        yield f"0{piece}" * (20 * size // len(NAME_TAILS))


def train(seed: int = 0, size: int = 1500) -> DemoTokenizer:
    """Train the merges on `size` documents of each kind."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_sample(seed, size), trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    return DemoTokenizer(backend)


def save(tokenizer: DemoTokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
