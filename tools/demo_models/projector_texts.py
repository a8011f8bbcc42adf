"""The texts of the shipped projector: four in five are retrieval documents, the others programs."""

from __future__ import annotations

from random import Random
from typing import Any

from engine.haystack_text import HELD_OUT, TRAIN
from engine.training.projector import FACTS
from engine.training.projector_fit import DrawText
from tools.demo_models.corpora import retrieval
from tools.demo_models.corpora.batches import encode, program_document
from tools.demo_models.tokenizer import DemoTokenizer

RETRIEVAL = 0.8


def mixture(tokenizer: Any, length: int) -> DrawText:
    """Draw texts in the tokens of the demo target, whose tokenizer mlx-lm has loaded."""
    demo = DemoTokenizer(tokenizer._tokenizer.backend_tokenizer)

    def draw(rng: Random, held_out: bool) -> list[int]:
        lexicon = HELD_OUT if held_out else TRAIN
        tokens: list[int] = []
        while len(tokens) < length:
            if rng.random() < RETRIEVAL:
                facts = rng.randint(2, FACTS)
                document = retrieval.document(rng, lexicon, demo.count, length=length, facts=facts)
            else:
                document = program_document(rng, lexicon)
            tokens += encode(demo, document)[0]
        return tokens[:length]

    return draw
