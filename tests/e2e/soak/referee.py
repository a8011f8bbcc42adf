"""Holds what clients received against what the same requests were answered alone, and counts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx

from engine.decode import decode
from engine.device import prepare
from engine.grammar import Grammar, Vocabulary
from engine.registry import CHANNELS
from engine.sampling import STRIDE, Sampler, Sampling
from engine.target.loading import SHIPPED_TARGET, LoadedTarget, load_target
from tests.e2e.soak.pool import Ask, Expected
from tests.e2e.soak.protocols import FORMATS, SCHEMA, Answer

# Nearer than this, rounding may choose either of two tokens: a batch's products are rounded otherwise than
# those of one sequence. Codes of keys and values round what was rounded: a value may get the next code.
TIE, TIE_CODED = 2e-4, 0.1
EXACT = ("native", "sliding-bounded-16", "sink-window-256", "full-kv")  # channels without codes


@dataclass(frozen=True)
class Divergence:
    """An answer that was another one.

    Attributes:
        expected: the request, and its answer alone.
        index: of the choice.
        got: its answer under load.
        at: index of the first token that differs.
    """

    expected: Expected
    index: int
    got: Answer
    at: int

    @property
    def alone(self) -> Answer:
        """The same choice, alone."""
        return self.expected.answers[self.index]

    @property
    def channel(self) -> str:
        """How keys and values are kept."""
        body = self.expected.ask.body
        return str(body.get("kv_channel") or body["model"].partition("@")[2])

    def told(self) -> dict[str, Any]:
        """For the last line."""
        shown = {key: value for key, value in self.expected.ask.body.items() if len(str(value)) < 100}
        return {
            "request": self.expected.ask.name,
            "body": shown,
            "choice": self.index,
            "at": self.at,
            "alone": self.alone.tokens[self.at : self.at + 3],
            "under_load": self.got.tokens[self.at : self.at + 3],
            "cached_from": self.got.cached_from,
            "batch": self.got.batch,
            "finish": [self.alone.finish, self.got.finish],
            "text": [self.alone.text[-80:], self.got.text[-80:]],
        }


@dataclass
class Referee:
    """Counts, and what went wrong."""

    kinds: Counter[str] = field(default_factory=Counter)
    protocols: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    cached_from: Counter[str] = field(default_factory=Counter)
    whole: int = 0
    parts: int = 0
    cut: int = 0
    tokens: int = 0
    batched: int = 0
    largest_batch: int = 1
    errors: list[str] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    no_prefix: list[tuple[Expected, int, str]] = field(default_factory=list)

    def asked(self, ask: Ask, way: str) -> None:
        """A request is made."""
        self.kinds[ask.kind] += 1
        self.protocols[ask.protocol] += 1
        self.ways[way] += 1

    def failed(self, ask: Ask, way: str, error: Exception) -> None:
        """It failed, and not by the client's will."""
        self.errors.append(f"{ask.name}, {way}: {type(error).__name__}: {error}"[:300])

    def was_cut(self) -> None:
        """It failed, for the server was killed."""
        self.cut += 1

    def arrived(self, expected: Expected, answers: Sequence[Answer]) -> None:
        """An answer arrived whole."""
        self.whole += 1
        for index, (alone, got) in enumerate(zip(expected.answers, answers, strict=True)):
            self.tokens += len(got.tokens)
            self.cached_from[got.cached_from or "nowhere"] += 1
            self.batched += got.batch > 1
            self.largest_batch = max(self.largest_batch, got.batch)
            if got != alone:
                pairs = zip(alone.tokens, got.tokens, strict=False)
                shorter = min(len(alone.tokens), len(got.tokens))
                at = next((place for place, (a, b) in enumerate(pairs) if a != b), shorter)
                self.divergences.append(Divergence(expected, index, got, at))

    def left(self, expected: Expected, texts: Mapping[int, str]) -> None:
        """The client left; what had arrived must be how the answer begins."""
        self.parts += 1
        for index, text in texts.items():
            if not expected.answers[index].text.startswith(text):
                self.no_prefix.append((expected, index, text))

    def figures(self) -> dict[str, Any]:
        """Counts for the last line."""
        return {
            "requests": sum(self.kinds.values()),
            "kinds": dict(sorted(self.kinds.items())),
            "protocols": dict(sorted(self.protocols.items())),
            "ways": dict(sorted(self.ways.items())),
            "cached_from": dict(sorted(self.cached_from.items())),
            "batched": self.batched,
            "largest_batch": self.largest_batch,
            "whole": self.whole,
            "disconnects": self.parts,
            "cut": self.cut,
            "compared_tokens": self.tokens,
            "errors": len(self.errors),
            "no_prefix": len(self.no_prefix),
        }


class Judge:
    """Decodes in this process what differed, to see whether rounding may have chosen."""

    @cached_property
    def _loaded(self) -> LoadedTarget:
        prepare()
        return load_target(SHIPPED_TARGET)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._loaded.tokenizer, self._loaded.target.vocab_size)

    def divergence_of(self, expected: Expected, index: int, text: str) -> Divergence:
        """Where a part of a text departs from the answer alone; its tokens are not known."""
        alone = expected.answers[index]
        decoder = self._loaded.tokenizer
        texts = (decoder.decode(list(alone.tokens[: count + 1])) for count in range(len(alone.tokens)))
        at = next((place for place, each in enumerate(texts) if not text.startswith(each)), len(alone.tokens))
        return Divergence(expected, index, Answer(text, "", alone.tokens[:at], alone.prompt), at)

    def is_tie(self, divergence: Divergence) -> tuple[bool, float]:
        """Whether rounding may choose either token where an answer departs, and how far apart they are.

        It ends nothing: where one answer is the beginning of the other, they are infinitely far apart.
        """
        alone, got = divergence.alone.tokens, divergence.got.tokens
        if divergence.at >= len(alone) or (divergence.got.finish and divergence.at >= len(got)):
            return False, float("inf")
        _, gap = self.chosen(divergence)
        return gap < (TIE if divergence.channel in EXACT else TIE_CODED), gap

    def chosen(self, divergence: Divergence) -> tuple[tuple[int, ...], float]:
        """The tokens up to where an answer departs, decoded plainly, and how far apart the last one and the
        next best are: by logits, or by what the seed's draw makes of these.
        """
        ask, alone = divergence.expected.ask, divergence.alone
        gaps: list[float] = []
        sampler = _sampler(ask, divergence.index)

        def look(_: mx.array, logits: mx.array) -> mx.array:
            scores = logits.astype(mx.float32)
            if sampler is not None:  # categorical draws the largest of log p + Gumbel noise
                key = mx.random.key((sampler.seed + STRIDE * len(gaps)) % 2**64)
                noise = mx.random.gumbel(scores[0].shape, key=key)
                scores = mx.log(sampler.distribution(logits)) + noise
            first, second = mx.sort(scores[0])[:-3:-1].tolist()
            gaps.append(first - second)
            return logits

        bound = FORMATS[ask.protocol].items() <= ask.body.items()
        schema = Grammar.json_schema(self._vocabulary, SCHEMA) if bound else None
        steps = decode(
            self._loaded.target,
            None,
            alone.prompt,
            max_tokens=divergence.at + 1,
            sampler=sampler,
            processors=[*([schema.processor(len(alone.prompt))] if schema else []), look],
            policy=CHANNELS[divergence.channel].policy,
        )
        tokens = tuple(token for step in steps for token in step.tokens)
        return tokens, gaps[divergence.at]


def _sampler(ask: Ask, index: int) -> Sampler | None:
    if ask.kind != "seeded":
        return None
    seed, choice = ask.body["seed"], index % ask.body.get("n", 1)
    if choice:  # a prompt's first choice is drawn with the seed itself
        seed = int.from_bytes(hashlib.sha256(f"{seed}:{choice}".encode()).digest()[:8]) % 2**63
    options = {name: ask.body[name] for name in ("temperature", "top_p")}
    return Sampler(Sampling(**options, seed=seed), by_position=True)
