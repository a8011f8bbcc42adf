"""Reasoning taken off answers, and the chat template's switches under the names evaluation uses.

Reasoning is what stands between the marks of a literal table; the marks may be missing on either side: the
first because the chat template has written it, the last because the text was cut short.
"""

from collections.abc import Sequence
from typing import Any

from engine.generate import ChatSwitches, chat_tokens
from evidence_format.text import MARKS, without_reasoning

__all__ = ["ChatSwitches", "answer_of", "chat_tokens"]

TAIL = 16  # tokens of a prompt in which the template may have begun the reasoning


def answer_of(tokenizer: Any, prompt: Sequence[int], text: str) -> str:
    """A model's text without its reasoning, and without white space around what is left where there was any.

    Args:
        tokenizer: of the model.
        prompt: token ids the text continues; they may end inside the reasoning.
        text: what the model said.
    """
    tail = str(tokenizer.decode(list(prompt[-TAIL:]))).rstrip() if prompt else ""
    opened = (number for number, (begin, _) in enumerate(MARKS) if tail.endswith(begin))
    return without_reasoning(text, next(opened, None))
