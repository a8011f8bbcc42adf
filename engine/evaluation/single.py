"""One generation, streamed, with the record of what it cost: behind ``kakeya_engine generate``."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from typing import Any

from mlx_lm.sample_utils import make_logits_processors

from engine.config import Engine
from engine.errors import ConfigurationError
from engine.evaluation.arms import OUR_LOOP, Outcome, SamplingOptions, speculate
from engine.evaluation.environment import describe
from engine.evaluation.prompts import Prompt, encode
from engine.evaluation.report import Arm, Report, now, sample
from engine.evaluation.summary import summarise
from engine.evaluation.system_load import StrainWatch
from engine.evaluation.throughput import configuration, models
from engine.runtime import Runtime
from engine.sampling import Sampling
from evidence_format.model import ReportRequest


@dataclass(frozen=True)
class GenerateSwitches:
    """What the command line can set about one generation.

    Attributes:
        max_tokens: emit at most so many.
        temperature, top_p, min_p, top_k, seed: see `engine.sampling.Sampling`.
        repetition_penalty, presence_penalty, frequency_penalty: mlx-lm's logits processors; 0 for none.
        stop: texts that end the text.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int | None = None
    repetition_penalty: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise ConfigurationError where a switch does not make sense."""
        if self.max_tokens < 1:
            raise ConfigurationError(f"--max-tokens must be at least 1, not {self.max_tokens}")
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            if not isfinite(getattr(self, name)):
                flag = "--" + name.replace("_", "-")
                raise ConfigurationError(f"{flag} must be a finite number, not {getattr(self, name)}")
        if self.repetition_penalty and not 0.01 <= self.repetition_penalty <= 100:
            raise ConfigurationError(
                f"--repetition-penalty must be 0 or lie in 0.01 to 100, not {self.repetition_penalty}"
            )
        if not all(self.stop):
            raise ConfigurationError("--stop must not be empty")
        self.sampling.check()

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        return Sampling(self.temperature, self.top_p, self.min_p, self.top_k, self.seed)

    def wish(self) -> SamplingOptions:
        """The same as the loop takes it."""
        processors = make_logits_processors(
            repetition_penalty=self.repetition_penalty or None,
            presence_penalty=self.presence_penalty or None,
            frequency_penalty=self.frequency_penalty or None,
        )
        return SamplingOptions(self.sampling, tuple(processors), self.stop)


@dataclass(frozen=True)
class Generation:
    """One prompt, what came of it, and when it began."""

    prompt: Prompt
    tokens: list[int]
    outcome: Outcome
    arm: Arm
    switches: GenerateSwitches
    started: datetime
    watch: StrainWatch

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
            "kv": self.arm.kv,
            "restored_positions": self.outcome.restored,
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
    engine: Engine, prompt: Prompt, switches: GenerateSwitches, show: Callable[[str], None]
) -> Generation:
    """Continue the prompt, calling ``show`` with each readable piece of text.

    Raises:
        PromptError: the prompt is empty or does not fit the context.
        ConfigurationError: a switch does not make sense.
    """
    switches.check()
    started, watch, target = now(), StrainWatch(), engine.target
    tokens = encode(prompt, target.tokenizer, target.target.vocab_size, target.context)
    drafter = engine.drafter.drafter.name if engine.drafter else None
    name = "speculative" if drafter else "kakeya"
    arm = Arm(name, "sut", OUR_LOOP, drafter=drafter, block=engine.options.block if drafter else None)
    draft_length = engine.new_draft_length(repeatable=switches.seed is not None)
    outcome = speculate(engine, tokens, switches.max_tokens, draft_length, show=show, wish=switches.wish())
    arm.take([sample(prompt, tokens, outcome)], outcome.drafter_forwards)
    return Generation(prompt, tokens, outcome, arm, switches, started, watch)


def generate_report(
    engine: Engine, runtime: Runtime, generation: Generation, request: ReportRequest | None
) -> Report:
    """An evidence report with this one row and no claim."""
    return Report.build(
        "throughput",
        started=generation.started,
        claims=[],
        environment=describe(runtime, generation.watch, models(engine)),
        configuration=configuration(engine, runtime, "generate", generation.switches),
        arms=[generation.arm],
        order=[(generation.arm.name, generation.prompt.id)],
        request=request,
    )
