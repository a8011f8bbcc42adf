"""Does decoding under a policy and with a drafter give plain decoding's text, and does any of it run away?

Greedy. The report has every first difference, with the plain logits' gap there.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.cache.policy import NATIVE
from engine.config import Engine
from engine.device import Runtime
from engine.errors import ConfigurationError
from engine.evaluation import measure
from engine.evaluation.prompts import Prompt
from engine.evaluation.throughput import refuse_restoring
from evidence_format.claims import CLAIMS as CLAIMED
from evidence_format.model import Report, ReportClaim, Sample
from evidence_format.text import prompt_set

PLAIN, OURS = "plain", "ours"
CLAIMS = ("auto", "identity", "match", "none")


@dataclass(frozen=True, kw_only=True)
class QualitySwitches(measure.SetSwitches):
    """What the command line can set about a comparison of outputs."""

    claim: str = "auto"
    min_match: float | None = measure.at_least(None, CLAIMED["exact_match"].lowest, 1)

    def check(self) -> None:
        super().check()
        measure.check_choice("--claim", self.claim, CLAIMS)
        if (self.claim == "match") != (self.min_match is not None):
            raise ConfigurationError("--claim match and --min-match go together")


def measure_quality(
    engine: Engine,
    prompts: Sequence[Prompt],
    switches: QualitySwitches,
    runtime: Runtime,
    *,
    command: str = "eval quality",
    scored: Callable[[Sample], Sample] = lambda sample: sample,
    **context: Any,
) -> Report:
    """Run plain decoding and our loop over the prompts, compare their output, and score it."""
    switches.check()
    refuse_restoring(engine)
    if engine.alone and engine.policy == NATIVE:
        raise ConfigurationError(
            "there is nothing to compare with plain decoding; give --kv, or --drafter without "
            "--no-speculation"
        )
    evaluation = measure.Evaluation("quality", command, engine, switches, runtime, **context)
    encoded = measure.encode_all(engine, prompts, switches.chat)
    for arm in (measure.plain_arm(PLAIN), measure.our_arm(engine, OURS)):
        evaluation.add(arm, prompts, encoded, "decoding")
    evaluation.run()
    for each in evaluation.runs:
        each.samples = [scored(sample) for sample in each.samples]
    pair: dict[str, Any] = {"arm": OURS, "baseline": PLAIN}
    claims: list[ReportClaim] = []
    if switches.claim == "identity" or (switches.claim == "auto" and engine.policy == NATIVE):
        claims = [ReportClaim(name="identical_output", **pair)]
    elif switches.claim == "match":
        claims = [ReportClaim(name="exact_match", **pair, at_least=switches.min_match)]
    return evaluation.report(claims, compared=2)


def matches_by_set(document: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Of each set of prompts how many outputs are equal, and how many there are; from a report's rows."""
    plain, ours = ({row["prompt_id"]: row["tokens"] for row in arm["samples"]} for arm in document["arms"])
    found: dict[str, list[bool]] = defaultdict(list)
    for identifier, tokens in ours.items():
        found[prompt_set(identifier)].append(tokens == plain[identifier])
    return {name: (sum(equal), len(equal)) for name, equal in found.items()}
