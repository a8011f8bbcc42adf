"""Runs arms in turns and times the decoding alone: from the first batch of tokens to the last.

In every repetition each prompt goes through all arms of a mode, one after another, in an order that moves on
by one from repetition to repetition, plain decoding among them. Whatever tokens come with the first batch are
not counted, so the prompt's forward is nobody's time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import mlx.core as mx

from peerbench.engines.base import Arm, Batch
from peerbench.script import Script

Progress = Callable[[int, int, str, str], None]


@dataclass(frozen=True)
class Setting:
    """An engine at a block length in a mode."""

    engine: str
    block: int | str
    mode: str


@dataclass(frozen=True)
class Run:
    """One prompt through one arm.

    Attributes:
        tokens: all new tokens.
        timed: how many of them came after the first batch.
        seconds: from the first batch to the last.
        rounds: the engine's records of the timed rounds, if it keeps any.
    """

    tokens: list[int]
    timed: int
    seconds: float
    rounds: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """A prompt, its true continuation, and the script of the mode."""

    part: str
    prompt: Sequence[int]
    truth: Sequence[int]
    script: Script | None


@dataclass(frozen=True)
class Sample:
    """A run and where it belongs."""

    setting: Setting
    repetition: int
    part: str
    run: Run
    identical: bool


def clocked(batches: Iterator[Batch]) -> Run:
    """Consume an arm's batches under the clock."""
    gc.collect()
    tokens: list[int] = []
    rounds: list[Any] = []
    first = last = perf_counter()
    uncounted = 0
    for batch in batches:
        last = perf_counter()
        if not tokens:
            first, uncounted = last, len(batch.tokens)
        elif batch.round is not None:
            rounds.append(batch.round)
        tokens.extend(int(token) for token in batch.tokens)
    mx.synchronize()
    return Run(tokens, len(tokens) - uncounted, last - first, rounds)


def measure(
    arms: dict[Setting, Arm],
    cases: Sequence[Case],
    max_tokens: int,
    repetitions: int,
    progress: Progress,
) -> list[Sample]:
    """Warm every arm up, then run all arms over all cases, in turns."""
    prompts, script = [case.prompt for case in cases], cases[0].script
    total = repetitions * len(cases) * len(arms)
    for setting, arm in arms.items():
        progress(0, total, "warming up", _name(setting))
        arm.warm_up(prompts, max_tokens, script)
    samples: list[Sample] = []
    order, done = list(arms), 0
    for repetition in range(repetitions):
        for index, case in enumerate(cases):
            turn = (repetition + index) % len(order)
            for setting in order[turn:] + order[:turn]:
                progress(done, total, f"repetition {repetition + 1}", _name(setting))
                run = clocked(arms[setting].run(case.prompt, max_tokens, case.script))
                identical = run.tokens == list(case.truth[:max_tokens])
                samples.append(Sample(setting, repetition, case.part, run, identical))
                done += 1
    progress(total, total, "measured", "")
    return samples


def _name(setting: Setting) -> str:
    return f"{setting.engine} block {setting.block} {setting.mode}"
