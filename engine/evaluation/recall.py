"""Needle in a haystack: does the system under test still find what the plain model finds?

Arms: our loop, the oracle (mlx-lm's plain decoding with the model's own caches), and the control
``no_needle``: our loop on the same prompts without the needle, which must find nothing. Greedy; the answer
must stand in the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import Engine
from engine.errors import ConfigurationError, PromptError
from engine.evaluation.arms import OUR_LOOP, PLAIN_LOOP
from engine.evaluation.environment import SwapWatch, describe
from engine.evaluation.prompts import Prompt
from engine.evaluation.report import Arm, Report, Request, now, sample
from engine.evaluation.throughput import Progress, configuration, encode_all, models, run_arm, warm_up
from engine.runtime import Runtime

ORACLE, CONTROL = "oracle", "no_needle"


@dataclass(frozen=True)
class RecallSwitches:
    """What the command line can set about a recall measurement."""

    prompts: str = "retrieval"
    limit: int | None = None
    max_tokens: int = 16
    seed: int = 0
    min_recall: float | None = None

    def check(self) -> None:
        """Raise ConfigurationError where a switch does not make sense."""
        if self.max_tokens < 1:
            raise ConfigurationError(f"--max-tokens must be at least 1, not {self.max_tokens}")
        if self.min_recall is not None and not 0 < self.min_recall <= 1:
            raise ConfigurationError(f"--min-recall must lie in (0, 1], not {self.min_recall}")


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
        PromptError: a prompt has no needle, or does not fit the model.
    """
    switches.check()
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
    pace = warm_up(engine, full, switches.max_tokens)
    order: list[tuple[str, str]] = []
    for index, prompt in enumerate(prompts):
        jobs = [
            (system, prompt, full[index]),
            (oracle, prompt, full[index]),
            (control, emptied[index], empty[index]),
        ]
        for arm, asked, tokens in jobs if index % 2 == 0 else reversed(jobs):
            progress(len(order), total, "recalling", f"{arm.name} {prompt.id}")
            outcome = run_arm(engine, arm is not oracle, tokens, switches.max_tokens, pace)
            arm.samples.append(sample(asked, tokens, outcome))
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
        configuration=configuration(engine, runtime, "eval recall", switches),
        arms=[system, oracle, control],
        order=order,
        request=request,
    )
