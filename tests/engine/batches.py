"""Sequences to decode together: models, prompts with continuations, drafters and draft lengths to try."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import mlx.core as mx
import pytest

from engine.batch_decode import Emitted, Request, decode_batch
from engine.decode import Step
from engine.draft_length import AdaptiveDraftLength, DraftLength, FixedDraftLength
from engine.drafters.base import NOTHING, Draft, Drafter, NetworkDrafter
from engine.sampling import Sampler
from engine.target.model import Target
from tests.engine import families, tiny
from tests.engine.random_drafters import make

FAMILIES = ("llama", "qwen3", "gemma3_text", "gpt_oss", "gemma4_text", "qwen3_5", "qwen3_next")
SCRIPTED = "scripted"
DRAFTERS = ("dflash", "prompt-lookup", "autoregressive", "mtp", "prompt-lookup+dflash", SCRIPTED)
CHOICES: dict[str, Callable[[], DraftLength]] = {
    **{f"block {block}": partial(FixedDraftLength, block) for block in (1, 2, 8)},
    "auto": partial(AdaptiveDraftLength, 8),
}
LENGTHS = (3, 4 * tiny.WINDOW + 2, 1, tiny.WINDOW)  # below, beyond and at the window
COUNT = 28


def mostly_slow(*axes: Iterable[Any]) -> list[Any]:
    """All combinations; a share of them is fast, in which each value of two axes meets each of the other."""
    sized = [list(enumerate(axis)) for axis in axes]
    rows = []
    for combined in product(*sized):
        slow = sum(index for index, _ in combined) % len(sized[-1])
        rows.append(pytest.param(*(value for _, value in combined), marks=[pytest.mark.slow] if slow else []))
    return rows


def prompt_of(length: int) -> tuple[int, ...]:
    """Some tokens, always the same for a length."""
    random = tiny.seeded(length)
    return tuple(random.randrange(5, 60) for _ in range(length))


@cache
def target_of(family: str) -> Target:
    """A random model of the family, built once."""
    return Target(families.build(family))


@cache
def plain(family: str, length: int) -> list[int]:
    """mlx-lm's continuation, one prompt by itself."""
    return tiny.plain_tokens(target_of(family).model, prompt_of(length), COUNT)


class Scripted(NetworkDrafter):
    """Knows the texts of all sequences, gets a share of their tokens wrong, and checks what it is told.

    It learns from the tokens observed which of the texts it is in. Some proposals are shorter than asked.
    """

    name = SCRIPTED
    block_size = 8
    target_layers = (0, 2)
    nbytes = 0
    forwards = 0
    twins = 0

    def __init__(self, texts: Sequence[Sequence[int]], wrong: float = 0.3, seed: int = 0) -> None:
        self._texts, self._wrong, self._random = [list(text) for text in texts], wrong, tiny.seeded(seed)
        self.seen: list[int] = []

    def bind(self, target: Target) -> None:
        pass

    def twin(self) -> Scripted:
        self.twins += 1
        return Scripted(self._texts, self._wrong, self.twins)

    def start(self) -> None:
        self.seen = []

    def observe(self, tokens: Sequence[int], hidden_states: mx.array | None) -> None:
        assert hidden_states is not None
        assert hidden_states.shape[:2] == (1, len(tokens)), "one row of hidden_states for each token"
        self.seen.extend(tokens)
        assert self._matching(self.seen), "these tokens are no sequence's"

    def rewind(self, count: int) -> bool:
        return False

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
        text = self._matching([*self.seen, bonus])[0]
        at = len(self.seen) + 1
        right = text[at : at + self._random.randint(0, count)]
        return Draft(
            mx.array([(t + (self._random.random() < self._wrong)) % tiny.VOCAB for t in right], mx.int32)
        )

    def _matching(self, start: list[int]) -> list[list[int]]:
        return [text for text in self._texts if text[: len(start)] == start]


class Silent(NetworkDrafter):
    """A drafter that speaks only now and then, so that spells of plain steps begin and end."""

    name = "silent"
    block_size = 4
    target_layers = ()
    nbytes = 0
    forwards = 0

    def __init__(self, seed: int = 0) -> None:
        self._random = tiny.seeded(seed)

    def bind(self, target: Target) -> None:
        pass

    def twin(self) -> Silent:
        return Silent(self._random.randrange(1000))

    def start(self) -> None:
        pass

    def observe(self, tokens: Sequence[int], hidden_states: mx.array | None) -> None:
        assert hidden_states is None

    def rewind(self, count: int) -> bool:
        return False

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
        if self._random.random() < 0.9:
            return NOTHING
        return Draft(mx.array([7] * count, mx.int32))


def drafter_of(kind: str, family: str) -> Drafter:
    """A drafter for the family; the scripted one knows the texts of all `LENGTHS`."""
    if kind == SCRIPTED:
        return Scripted([[*prompt_of(length), *plain(family, length)] for length in LENGTHS])
    return make(kind, target_of(family))


def gather(rounds: Any, count: int) -> list[list[Emitted]]:
    """What each request got."""
    found: list[list[Emitted]] = [[] for _ in range(count)]
    for emitted in rounds:
        for each in emitted:
            found[each.request].append(each)
    return found


def tokens_of(steps: Sequence[Emitted | Step]) -> list[int]:
    """All tokens of one sequence."""
    return [token for each in steps for token in (each.step if isinstance(each, Emitted) else each).tokens]


def run(
    family: str, kind: str | None, draft_length: DraftLength, requests: Sequence[Request], chunk: int = 2048
) -> list[list[Emitted]]:
    """Decode the requests together: what each got."""
    drafter = drafter_of(kind, family) if kind else None
    rounds = decode_batch(
        target_of(family), drafter, requests, draft_length=draft_length, prefill_chunk=chunk
    )
    return gather(rounds, len(requests))


def classes_of(model: Any) -> dict[str, type]:
    """What every module is at the moment, by name."""
    return {name: type(module) for name, module in model.named_modules()}
