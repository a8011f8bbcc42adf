"""The evidence report of one generation, for ``kakeya_engine generate --report``."""

from collections.abc import Sequence

from engine.config import Engine
from engine.evaluation.arms import OUR_LOOP
from engine.evaluation.environment import LoadWatch, describe
from engine.evaluation.measure import configuration, models
from engine.evaluation.prompts import chat_prompt, raw_prompt
from engine.evaluation.report import Arm, Report, now, sample
from engine.generate import GenerateSwitches, Messages, Outcome
from engine.runtime import Runtime
from evidence_format.model import ReportRequest


class GenerationReport:
    """Made before the generation begins, so that its times and the machine's load are those of it."""

    def __init__(
        self, engine: Engine, runtime: Runtime, switches: GenerateSwitches, request: ReportRequest | None
    ) -> None:
        self._engine, self._runtime, self._switches, self._request = engine, runtime, switches, request
        self._started, self._watch = now(), LoadWatch()

    def build(self, content: str | Messages, tokens: Sequence[int], outcome: Outcome) -> Report:
        """A report with one row and no claim: what came of a text or a conversation, and of its tokens."""
        engine, runtime = self._engine, self._runtime
        prompt = raw_prompt(content) if isinstance(content, str) else chat_prompt(content)
        drafter = engine.drafter.drafter.name if engine.drafter else None
        block = engine.options.block if drafter else None
        arm = Arm("speculative" if drafter else "kakeya", "sut", OUR_LOOP, drafter=drafter, block=block)
        arm.add([sample(prompt, tokens, outcome)], outcome.drafter_forwards)
        return Report.build(
            "throughput",
            started=self._started,
            claims=[],
            environment=describe(runtime, self._watch, models(engine)),
            configuration=configuration(engine, runtime, "generate", self._switches),
            arms=[arm],
            order=[(arm.name, prompt.id)],
            request=self._request,
        )
