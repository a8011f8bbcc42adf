"""One generation, streamed, with the record of what it cost: behind ``kakeya_engine generate``."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from engine.config import Engine
from engine.evaluation.arms import OUR_LOOP, Outcome, speculate
from engine.evaluation.environment import SwapWatch, describe
from engine.evaluation.prompts import Prompt, encode
from engine.evaluation.report import Arm, Report, Request, now, sample, summarise
from engine.evaluation.throughput import configuration, models
from engine.runtime import Runtime


@dataclass(frozen=True)
class GenerateSwitches:
    """What the command line can set about one generation."""

    max_tokens: int


@dataclass(frozen=True)
class Generation:
    """One prompt, what came of it, and when it began."""

    prompt: Prompt
    tokens: list[int]
    outcome: Outcome
    arm: Arm
    switches: GenerateSwitches
    started: datetime
    swap: SwapWatch

    def figures(self) -> dict[str, Any]:
        """The figures of the JSON line."""
        summary = summarise([self.arm])["arms"][self.arm.name]
        return {
            "text": self.outcome.text,
            "finish_reason": self.outcome.finish,
            "prompt_tokens": len(self.tokens),
            "generated_tokens": summary["generated_tokens"],
            "prefill_s": round(self.outcome.prefill_s, 7),
            "decode_s": round(self.outcome.decode_s, 7),
            "decode_tokens_per_s": summary["decode_tokens_per_s"],
            "verify_rounds": summary["verify_rounds"],
            "acceptance_length": summary["acceptance_length"],
            "resident_bytes": self.outcome.resident_bytes,
            "path": self.outcome.path,
        }

    def line(self) -> str:
        """The same for people, in one line."""
        figures = self.figures()
        rate, length = figures["decode_tokens_per_s"], figures["acceptance_length"]
        parts = [f"{figures['generated_tokens']} tokens ({figures['finish_reason']})"]
        if rate is not None:
            parts.append(f"{rate:.1f} tok/s")
        if length is not None:
            parts.append(f"{length:.2f} tokens emitted per verify over {figures['verify_rounds']} rounds")
        return ", ".join(parts)


def generate_stream(
    engine: Engine, prompt: Prompt, max_tokens: int, show: Callable[[str], None]
) -> Generation:
    """Continue the prompt, calling ``show`` with each readable piece of text.

    Raises:
        PromptError: the prompt is empty or does not fit the context.
    """
    started, swap, target = now(), SwapWatch(), engine.target
    tokens = encode(prompt, target.tokenizer, target.target.vocab_size, target.context)
    drafter = engine.drafter.drafter.name if engine.drafter else None
    name = "speculative" if drafter else "kakeya"
    arm = Arm(name, "sut", OUR_LOOP, drafter=drafter, block=engine.options.block if drafter else None)
    outcome = speculate(engine, tokens, max_tokens, engine.new_pace(), show)
    arm.samples.append(sample(prompt, tokens, outcome))
    return Generation(prompt, tokens, outcome, arm, GenerateSwitches(max_tokens), started, swap)


def generate_report(
    engine: Engine, runtime: Runtime, generation: Generation, request: Request | None
) -> Report:
    """An evidence report with this one row and no claim."""
    return Report.build(
        "throughput",
        started=generation.started,
        claims=[],
        environment=describe(runtime, generation.swap, models(engine)),
        configuration=configuration(engine, runtime, "generate", generation.switches),
        arms=[generation.arm],
        order=[(generation.arm.name, generation.prompt.id)],
        request=request,
    )
