"""Holds what clients received against what the same requests were answered alone, and counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.soak.pool import Answer, Ask, Expected

MOST_SHOWN = 5
TIE = 1e-4  # nearer than this, rounding may choose either of two logits


@dataclass(frozen=True)
class Divergence:
    """An answer that was another one.

    Attributes:
        expected: the request, and its answer alone.
        got: its answer under load.
        at: index of the first token that differs.
    """

    expected: Expected
    got: Answer
    at: int

    def told(self) -> dict[str, Any]:
        """For the last line."""
        ours, others = self.expected.answer.tokens, self.got.tokens
        return {
            "request": self.expected.ask.name,
            "body": {key: value for key, value in self.expected.ask.body.items() if key not in {"messages"}},
            "at": self.at,
            "alone": ours[self.at : self.at + 3],
            "under_load": others[self.at : self.at + 3],
            "finish": [self.expected.answer.finish, self.got.finish],
            "text": [self.expected.answer.text[-80:], self.got.text[-80:]],
        }


@dataclass
class Referee:
    """Counts, and what went wrong."""

    kinds: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    whole: int = 0
    parts: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    no_prefix: list[str] = field(default_factory=list)

    def asked(self, ask: Ask, way: str) -> None:
        """A request is made."""
        self.kinds[ask.kind] += 1
        self.ways[way] += 1

    def failed(self, ask: Ask, way: str, error: Exception) -> None:
        """It failed, and not by the client's will."""
        self.errors.append(f"{ask.name}, {way}: {type(error).__name__}: {error}"[:300])

    def arrived(self, expected: Expected, got: Answer) -> None:
        """An answer arrived whole."""
        alone = expected.answer
        self.whole += 1
        self.tokens += len(got.tokens)
        if got != alone:
            pairs = zip(alone.tokens, got.tokens, strict=False)
            shorter = min(len(alone.tokens), len(got.tokens))
            at = next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)
            self.divergences.append(Divergence(expected, got, at))

    def left(self, expected: Expected, text: str) -> None:
        """The client left; what had arrived must be how the answer begins."""
        self.parts += 1
        if not expected.answer.text.startswith(text):
            self.no_prefix.append(f"{expected.ask.name}: {text!r} does not begin {expected.answer.text!r}")

    def figures(self) -> dict[str, Any]:
        """Counts for the last line."""
        return {
            "requests": sum(self.kinds.values()),
            "kinds": dict(sorted(self.kinds.items())),
            "ways": dict(sorted(self.ways.items())),
            "whole": self.whole,
            "disconnects": self.parts,
            "compared_tokens": self.tokens,
            "errors": len(self.errors),
            "no_prefix": len(self.no_prefix),
        }


def gap(divergence: Divergence) -> float:
    """How far apart the two likeliest tokens are where an answer differs, decoded plainly in this process.

    Greedy answers alone; the logits of a seeded one say nothing of its draw.
    """
    import mlx.core as mx

    from engine.decode import decode
    from engine.device import prepare
    from engine.registry import CHANNELS
    from engine.target.loading import SHIPPED_TARGET, load_target

    prepare()
    target = load_target(SHIPPED_TARGET).target
    answer, body = divergence.expected.answer, divergence.expected.ask.body
    channel = body.get("kv_channel") or body["model"].partition("@")[2]
    seen: list[float] = []

    def look(_: mx.array, logits: mx.array) -> mx.array:
        first, second = sorted(logits[0].tolist(), reverse=True)[:2]
        seen.append(first - second)
        return logits

    steps = decode(
        target,
        None,
        answer.prompt,
        max_tokens=divergence.at + 1,
        processors=[look],
        policy=CHANNELS[channel].policy,
    )
    for _ in steps:
        continue
    return seen[divergence.at]
