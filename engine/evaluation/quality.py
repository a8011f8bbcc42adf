"""Does decoding under a policy and with a drafter give plain decoding's text, and does any of it run away?

Arms: mlx-lm's plain decoding as baseline, and our loop as the switches say. Greedy, interleaved. Told are the
share of prompts whose tokens are equal, every first difference beside the plain logits' gap there, the error
between block and single-token logits, and the outputs that end in repetition.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine.cache.policy import NATIVE
from engine.config import Engine
from engine.device import Runtime
from engine.draft_length import DraftLength
from engine.errors import ConfigurationError
from engine.evaluation.arms import PLAIN_LOOP, Outcome
from engine.evaluation.environment import describe
from engine.evaluation.fingerprint import fingerprint
from engine.evaluation.interleave import Lane, Progress, run_interleaved, scored_rows
from engine.evaluation.journal import Journals
from engine.evaluation.prompts import Prompt
from engine.evaluation.report import Arm, Report, now
from engine.evaluation.system_load import StrainWatch
from engine.evaluation.templates import ChatSwitches
from engine.evaluation.throughput import (
    configuration,
    encode_all,
    find_divergences,
    measure_rounding,
    models,
    our_arm,
    run_arm,
    warm_up,
)
from evidence_format.claims import CLAIMS as CLAIMED
from evidence_format.model import ReportRequest
from evidence_format.text import prompt_set

PLAIN, OURS = "plain", "ours"
LEAST_MATCH = CLAIMED["exact_match"].lowest
CLAIMS = ("auto", "identity", "match", "none")


@dataclass(frozen=True)
class QualitySwitches:
    """What the command line can set about a comparison of outputs.

    Attributes:
        prompts, limit, seed: see `engine.evaluation.prompts.load_prompts`.
        max_tokens: tokens to generate a prompt.
        claim: ``identity``: equal but for rounding ties; ``match``: at least ``min_match`` of the prompts are
            equal, without any excuse; ``auto``: identity where native caches are kept, else none.
        min_match: share to claim.
        chat: how prompts are put to the model.
    """

    prompts: str = "all"
    limit: int | None = 8
    max_tokens: int = 96
    seed: int = 0
    claim: str = "auto"
    min_match: float | None = None
    chat: ChatSwitches = field(default_factory=ChatSwitches)

    def check(self) -> None:
        """Raise ConfigurationError where a switch does not make sense."""
        self.chat.check()
        if self.max_tokens < 1:
            raise ConfigurationError(f"--max-tokens must be at least 1, not {self.max_tokens}")
        if self.limit is not None and self.limit < 1:
            raise ConfigurationError(f"--limit must be at least 1, not {self.limit}")
        if self.claim not in CLAIMS:
            raise ConfigurationError(f"--claim {self.claim!r} is not one of {', '.join(CLAIMS)}")
        if (self.claim == "match") != (self.min_match is not None):
            raise ConfigurationError("--claim match and --min-match go together")
        if self.min_match is not None and not LEAST_MATCH <= self.min_match <= 1:
            raise ConfigurationError(f"--min-match must lie in [{LEAST_MATCH}, 1], not {self.min_match}")


def measure_quality(
    engine: Engine,
    prompts: Sequence[Prompt],
    switches: QualitySwitches,
    runtime: Runtime,
    *,
    progress: Progress,
    request: ReportRequest | None = None,
    journals: Journals | None = None,
) -> Report:
    """Run both arms over the prompts and compare what came out.

    Raises:
        ConfigurationError: a switch does not make sense, there is nothing of ours to compare, or the journal
            belongs to another run.
        PromptError: a prompt does not fit the model.
    """
    switches.check()
    if engine.policy.source is not None:
        raise ConfigurationError(
            f"--kv {engine.policy.spec} means nothing without its controls: eval recall and eval kv run them"
        )
    if engine.alone and engine.policy == NATIVE:
        raise ConfigurationError("there is nothing to compare with plain decoding; give --drafter or --kv")
    started, watch = now(), StrainWatch()
    encoded = encode_all(engine, prompts, switches.chat)
    settings = configuration(engine, runtime, "eval quality", switches)
    marks = fingerprint(describe(runtime, watch, models(engine)), settings, prompts, encoded, request)
    journal = journals.open(marks) if journals else None
    arms = [Arm(PLAIN, "baseline", PLAIN_LOOP), our_arm(engine, OURS)]
    total = len(arms) * len(prompts)
    progress(0, total, "warming up", prompts[0].id)
    draft_length = warm_up(engine, encoded, switches.max_tokens)
    row = scored_rows(engine.target.tokenizer)
    lanes = [
        Lane(
            arm,
            prompts,
            encoded,
            partial(_run, engine, arm, switches.max_tokens, draft_length),
            row,
            "decoding",
        )
        for arm in arms
    ]
    course = run_interleaved(lanes, progress=progress, journal=journal)
    progress(total, total, "checking", "rounding and divergences")
    divergences = find_divergences(engine, encoded, *arms)
    rounding = measure_rounding(engine, encoded, arms, {found["prompt_id"] for found in divergences})
    return Report.build(
        "quality",
        started=journal.started if journal else started,
        claims=_claims(engine, switches),
        environment=describe(runtime, watch, models(engine)),
        configuration=settings | {"resumed": course.resumed},
        arms=arms,
        order=course.order,
        rounding=rounding,
        divergences=divergences,
        request=request,
    )


def _run(
    engine: Engine, arm: Arm, max_tokens: int, draft_length: DraftLength, encoded: Sequence[list[int]]
) -> list[Outcome]:
    """Prompts through one arm, one after the other."""
    return [run_arm(engine, arm.role == "sut", tokens, max_tokens, draft_length) for tokens in encoded]


def _claims(engine: Engine, switches: QualitySwitches) -> list[dict[str, Any]]:
    """What the report asks to be believed for; known before anything is run."""
    pair = {"arm": OURS, "baseline": PLAIN}
    claim = switches.claim
    if claim == "auto":
        claim = "identity" if engine.policy == NATIVE else "none"
    if claim == "identity":
        return [{"name": "identical_output", **pair}]
    return [{"name": "exact_match", **pair, "at_least": switches.min_match}] if claim == "match" else []


def matches_by_set(document: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Of each set of prompts how many outputs are equal, and how many there are; from a report's rows."""
    plain, ours = ({row["prompt_id"]: row["tokens"] for row in arm["samples"]} for arm in document["arms"])
    found: dict[str, list[bool]] = defaultdict(list)
    for identifier, tokens in ours.items():
        found[prompt_set(identifier)].append(tokens == plain[identifier])
    return {name: (sum(equal), len(equal)) for name, equal in found.items()}
