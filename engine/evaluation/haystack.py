"""Retrieval prompts made from a seed: one fact asked for, at a chosen depth of filler and other facts.

Names and filler are in nothing that training saw. A depth is the share of the haystack's tokens before the
needle, without question and needle; it is met as closely as whole sentences allow.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import accumulate
from random import Random
from typing import Any

from engine.errors import ConfigurationError, PromptError
from engine.evaluation.measure import BoundedSwitches, at_least
from engine.evaluation.prompts import Needle, Prompt, load_prompts, tokens_of
from engine.generate import ChatSwitches
from engine.haystack_text import HELD_OUT, Fact, draw_facts, filler, generator

GENERATED, SHIPPED, KIND = "generated", "retrieval", "retrieval"
CONTEXT, DEPTHS, PER_DEPTH = 440, (0.0, 0.25, 0.5, 0.75, 1.0), 4
FACTS = 5  # the one asked for and four others
MISSES = 24  # too long sentences drawn before what is left stays empty
INSTRUCTION = "Question: what is the secret code of {}? Answer:"
CHAT_INSTRUCTION = "Please read. What is the secret code of {}?"


@dataclass(frozen=True)
class Haystack(BoundedSwitches):
    """What the command line can set about made-up retrieval prompts; None where nothing was set."""

    context: int | None = at_least(None)  # tokens of a prompt, at most
    depths: tuple[float, ...] | None = None  # shares of the haystack before the needle, 0 to 1
    per_depth: int | None = at_least(None)  # prompts at each depth

    @property
    def wanted(self) -> bool:
        return any(value is not None for value in (self.context, self.depths, self.per_depth))

    def with_defaults(self, depths: tuple[float, ...] = DEPTHS) -> "Haystack":
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(Haystack(CONTEXT, depths, PER_DEPTH), **given)

    def filled(self, prompts: str, *, unfit: bool = False) -> "Haystack":
        """With defaults, where prompts are made up: by `--prompts`, a setting, or an unfit shipped set."""
        made_up = prompts == GENERATED or self.wanted or (prompts == SHIPPED and unfit)
        return self.with_defaults() if made_up else self

    def check(self) -> None:
        super().check()
        if self.depths is not None:
            if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
                raise ConfigurationError("--depths must be numbers from 0 to 1")
            if len(set(self.depths)) < len(self.depths):
                raise ConfigurationError("--depths names a depth twice")


def generate(
    tokenizer: Any,
    *,
    context: int = CONTEXT,
    depths: Sequence[float] = DEPTHS,
    per_depth: int = PER_DEPTH,
    seed: int = 0,
    beyond: int | None = None,
    switches: ChatSwitches | None = None,
) -> list[Prompt]:
    """Prompts of at most ``context`` tokens that each hide one fact, depth by depth in turn.

    At least ``beyond`` tokens come after the needle; deeper ones are moved up, as their `Needle.depth` says.
    """
    maker = _Maker(tokenizer, switches or ChatSwitches(), context, beyond or 0)
    names = [
        (f"needle-{context}-{depth:g}-{turn + 1:03d}", depth) for turn in range(per_depth) for depth in depths
    ]
    return [maker.prompt(generator(f"haystack/{seed}/{name}"), name, depth) for name, depth in names]


def retrieval_prompts(
    name: str,
    haystack: Haystack,
    tokenizer: Any,
    *,
    limit: int | None,
    seed: int,
    switches: ChatSwitches,
    beyond: int | None = None,
) -> list[Prompt]:
    """The prompts of a recall evaluation: made up where anything of ``haystack`` was set, else read."""
    if name != GENERATED and not haystack.wanted:
        return load_prompts(name, limit, seed)
    if name not in (GENERATED, SHIPPED):
        raise ConfigurationError(
            f"--context, --depths and --per-depth make prompts up; leave them out, or --prompts {name}"
        )
    given = asdict(haystack.with_defaults())
    return generate(tokenizer, seed=seed, beyond=beyond, switches=switches, **given)[:limit]


def refuse_near(prompts: Sequence[Prompt], tokenizer: Any, beyond: int) -> None:
    """Raise PromptError where fewer than ``beyond`` tokens come after a needle."""
    for prompt in prompts:
        if prompt.needle is None or prompt.text is None:
            continue
        after = prompt.text.partition(prompt.needle.sentence)[2]
        if (left := len(tokenizer.encode(after, add_special_tokens=False))) < beyond:
            raise PromptError(
                f"prompt {prompt.id} has {left} tokens after its needle, and a policy that restores is tried "
                f"on needles {beyond} before the end; leave --prompts out to have such prompts made up"
            )


class _Maker:
    def __init__(self, tokenizer: Any, switches: ChatSwitches, context: int, beyond: int) -> None:
        self._tokenizer, self._switches = tokenizer, switches
        self._context, self._beyond = context, beyond
        self._count = lru_cache(maxsize=None)(
            lambda text: len(tokenizer.encode(text, add_special_tokens=False))
        )

    def prompt(self, rng: Random, identifier: str, depth: float) -> Prompt:
        facts: list[Fact] = []
        while len({fact.code for fact in facts}) < FACTS:
            facts = draw_facts(rng, HELD_OUT, FACTS)
        wanted, *others = facts
        sentences = [fact.sentence for fact in others]
        left = self._context - self._length(sentences, wanted)
        if left < 0:
            raise PromptError(
                f"--context {self._context} is too short: "
                f"facts and question take {self._context - left} tokens"
            )
        misses = 0
        while misses < MISSES:
            sentence = filler(rng, HELD_OUT)
            if self._count(sentence) <= left:
                sentences.append(sentence)
                left -= self._count(sentence)
            else:
                misses += 1
        while self._length(sentences, wanted) > self._context:
            sentences.pop()
        rng.shuffle(sentences)
        index, share = self._place(sentences, wanted, depth)
        text = self._text([*sentences[:index], wanted.sentence, *sentences[index:]], wanted)
        needle = Needle(wanted.sentence.strip(), wanted.code, share)
        instruction = CHAT_INSTRUCTION if self._switches.chat else INSTRUCTION
        return Prompt(identifier, KIND, text, None, needle, instruction)

    def _place(self, sentences: Sequence[str], wanted: Fact, depth: float) -> tuple[int, float]:
        """Before which sentence the needle goes, and its depth: the one asked for where that is met."""
        before = [0, *accumulate(map(self._count, sentences))]
        nearest, *others = sorted(range(len(before)), key=lambda at: abs(before[at] - depth * before[-1]))
        for index in (nearest, *others):
            if self._count("".join(sentences[index:]) + self._question(wanted)) >= self._beyond:
                return index, depth if index == nearest else round(before[index] / before[-1], 2)
        raise PromptError(
            f"--context {self._context} is too short for a needle {self._beyond} tokens before the end"
        )

    def _length(self, sentences: Sequence[str], wanted: Fact) -> int:
        whole = Prompt("needle", KIND, self._text([wanted.sentence, *sentences], wanted))
        return len(tokens_of(whole, self._tokenizer, self._switches))

    def _text(self, sentences: Sequence[str], wanted: Fact) -> str:
        opening = "Please read." if self._switches.chat else ""
        return opening + "".join(sentences) + self._question(wanted)

    def _question(self, wanted: Fact) -> str:
        """As the shipped target was trained to be asked: plainly, or in a conversation."""
        return f" What is the secret code of {wanted.name}?" if self._switches.chat else wanted.question
