"""Needle in a haystack: does the system under test still find what the plain model finds?

Arms: our loop, the oracle (mlx-lm's plain decoding with the model's own caches), and the control
``no_needle``: our loop on the same prompts without the needle, which must find nothing. Greedy; the answer
must stand in the text. Our loop may decode several prompts together; the oracle never does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import Engine
from engine.errors import ConfigurationError, PromptError
from engine.evaluation.arms import OUR_LOOP, PLAIN_LOOP, Outcome, plain, speculate_together
from engine.evaluation.environment import SwapWatch, describe
from engine.evaluation.prompts import Prompt
from engine.evaluation.report import Arm, Report, Request, now, sample
from engine.evaluation.throughput import (
    WARM_UPS,
    Progress,
    configuration,
    encode_all,
    models,
    run_arm,
    warm_up,
)
from engine.pace import Adaptive, Pace, Tour
from engine.runtime import Runtime

ORACLE, CONTROL = "oracle", "no_needle"


@dataclass(frozen=True)
class RecallSwitches:
    """What the command line can set about a recall measurement.

    With a ``batch`` of more than 1, the arms of our loop decode so many prompts together. Their rows hold
    shares: seconds and resident bytes divided among the sequences they served, see `speculate_together`.
    """

    prompts: str = "retrieval"
    limit: int | None = None
    max_tokens: int = 16
    seed: int = 0
    min_recall: float | None = None
    batch: int = 1

    def check(self) -> None:
        """Raise ConfigurationError where a switch does not make sense."""
        if self.max_tokens < 1:
            raise ConfigurationError(f"--max-tokens must be at least 1, not {self.max_tokens}")
        if self.min_recall is not None and not 0 < self.min_recall <= 1:
            raise ConfigurationError(f"--min-recall must lie in (0, 1], not {self.min_recall}")
        if self.batch < 1:
            raise ConfigurationError(f"--batch must be at least 1, not {self.batch}")


def measure_recall(
    engine: Engine,
    prompts: Sequence[Prompt],
    switches: RecallSwitches,
    runtime: Runtime,
    *,
    progress: Progress,
    request: Request | None = None,
) -> Report:
    """Run the three arms over the prompts that have a needle.

    Raises:
        ConfigurationError: a switch does not make sense, or not with a batch.
        ModelError: sequences of this model cannot be decoded together.
        PromptError: a prompt has no needle, or does not fit the model.
    """
    switches.check()
    if switches.batch > 1 and engine.options.single_graph:
        raise ConfigurationError("--single-graph diagnoses one sequence at a time; leave out --batch")
    if bare := [prompt.id for prompt in prompts if prompt.needle is None]:
        raise PromptError(f"recall needs prompts with a needle; {bare[0]} has none")
    started, swap = now(), SwapWatch()
    emptied = [prompt.without_needle() for prompt in prompts]
    full, empty = encode_all(engine, prompts), encode_all(engine, emptied)
    drafter = engine.drafter.drafter.name if engine.drafter else None
    block = engine.options.block if engine.drafter else None
    name = "speculative" if drafter else "kakeya"
    system = Arm(name, "sut", OUR_LOOP, drafter=drafter, block=block)
    oracle = Arm(ORACLE, "oracle", PLAIN_LOOP)
    control = Arm(CONTROL, "control", OUR_LOOP, drafter=drafter, block=block, control="no_needle")
    total = 3 * len(prompts)
    progress(0, total, "warming up", prompts[0].id)
    pace = _warm_up(engine, full, switches)
    order: list[tuple[str, str]] = []
    for turn, start in enumerate(range(0, len(prompts), switches.batch)):
        group = slice(start, start + switches.batch)
        jobs = [
            (system, prompts[group], full[group]),
            (oracle, prompts[group], full[group]),
            (control, emptied[group], empty[group]),
        ]
        for arm, asked, encoded in jobs if turn % 2 == 0 else reversed(jobs):
            outcomes = _run(engine, arm, encoded, switches, pace)
            for prompt, tokens in zip(asked, encoded, strict=True):
                progress(len(order), total, "recalling", f"{arm.name} {prompt.id}")
                arm.samples.append(sample(prompt, tokens, next(outcomes)))
                order.append((arm.name, prompt.id))
    progress(total, total, "checking", "recall")
    claims: list[dict[str, Any]] = [{"name": "recall_parity", "arm": name, "baseline": ORACLE}]
    if switches.min_recall is not None:
        claims.append({"name": "recall", "arm": name, "at_least": switches.min_recall})
    return Report.build(
        "recall",
        started=started,
        claims=claims,
        environment=describe(runtime, swap, models(engine)),
        configuration=configuration(engine, runtime, "eval recall", switches)
        | {"compiled": engine.options.compiled and switches.batch == 1},
        arms=[system, oracle, control],
        order=order,
        request=request,
    )


def _run(
    engine: Engine, arm: Arm, encoded: Sequence[Sequence[int]], switches: RecallSwitches, pace: Pace
) -> Iterator[Outcome]:
    """A group of prompts through one arm; ours decodes them together if asked to."""
    ours = arm.loop == OUR_LOOP
    if ours and switches.batch > 1:
        yield from speculate_together(engine, encoded, switches.max_tokens, pace)
        return
    for tokens in encoded:
        yield run_arm(engine, ours, tokens, switches.max_tokens, pace)


def _warm_up(engine: Engine, encoded: Sequence[Sequence[int]], switches: RecallSwitches) -> Pace:
    """As `warm_up`; with batches the pace learns what the rounds of a batch cost."""
    if switches.batch == 1:
        return warm_up(engine, encoded, switches.max_tokens)
    plain(engine.target, encoded[0], switches.max_tokens, engine.options.prefill_chunk)
    pace = engine.new_pace()
    if not isinstance(pace, Adaptive):
        speculate_together(engine, encoded[: switches.batch], switches.max_tokens, pace)
        return pace
    tour = Tour(pace)
    for turn in range(WARM_UPS):
        start = turn * switches.batch % len(encoded)
        speculate_together(engine, encoded[start : start + switches.batch], switches.max_tokens, tour)
        if tour.finished:
            break
    return pace
