"""Needle in a haystack: does the system under test still find what the plain model finds?

Arms: our loop, the oracle (mlx-lm's plain decoding with the model's own caches), and the control
``no_needle``: our loop on the same prompts without the needle, which must find nothing. Where keys and values
are restored, two more controls restore them from elsewhere: ``exact`` must find what the oracle finds, and
``noise`` nothing. Greedy; the answer must stand in the text once reasoning is taken off. Our loop may decode
several prompts together; the oracle never does.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from engine.cache.policy import KVPolicy
from engine.config import Engine
from engine.device import Runtime
from engine.draft_length import AdaptiveDraftLength, DraftLength, Tour
from engine.errors import ConfigurationError, PromptError
from engine.evaluation.arms import OUR_LOOP, PLAIN_LOOP, Outcome, plain, speculate_together
from engine.evaluation.environment import describe
from engine.evaluation.fingerprint import fingerprint
from engine.evaluation.haystack import Haystack, refuse_near
from engine.evaluation.interleave import Lane, Progress, run_interleaved, scored_rows
from engine.evaluation.journal import Journals
from engine.evaluation.kv_arms import under
from engine.evaluation.prompt_checks import refuse_unsound
from engine.evaluation.prompts import Prompt
from engine.evaluation.report import Arm, Report, now
from engine.evaluation.system_load import StrainWatch
from engine.evaluation.templates import ChatSwitches
from engine.evaluation.throughput import (
    WARM_UPS,
    configuration,
    encode_all,
    models,
    our_arm,
    run_arm,
    warm_up,
)
from evidence_format.claims import CLAIMS
from evidence_format.model import ReportRequest
from evidence_format.policies import MEANINGFUL

ORACLE, CONTROL = "oracle", "no_needle"
RESTORING_CONTROLS = ("exact", "noise")
LOSSLESS = ("native", "sliding-bounded")  # policies of which parity with the oracle is claimed
LEAST_RECALL = CLAIMS["recall"].lowest
DEPTHS = 12  # recall is told for each of so many depths


@dataclass(frozen=True)
class RecallSwitches:
    """What the command line can set about a recall measurement.

    With a ``batch`` of more than 1, the arms of our loop decode so many prompts together. Their rows hold
    shares: seconds and resident bytes divided among the sequences they served, see `speculate_together`.
    ``claim`` is parity with the oracle, none, or auto: parity where the policy is one of `LOSSLESS`.
    """

    prompts: str = "retrieval"
    limit: int | None = None
    max_tokens: int = 16
    seed: int = 0
    min_recall: float | None = None
    claim: str = "auto"
    batch: int = 1
    haystack: Haystack = field(default_factory=Haystack)
    chat: ChatSwitches = field(default_factory=ChatSwitches)

    def check(self) -> None:
        """Raise ConfigurationError where a switch does not make sense."""
        self.haystack.check()
        self.chat.check()
        if self.max_tokens < 1:
            raise ConfigurationError(f"--max-tokens must be at least 1, not {self.max_tokens}")
        if self.min_recall is not None and not LEAST_RECALL <= self.min_recall <= 1:
            raise ConfigurationError(f"--min-recall must lie in [{LEAST_RECALL}, 1], not {self.min_recall}")
        if self.limit is not None and self.limit < 1:
            raise ConfigurationError(f"--limit must be at least 1, not {self.limit}")
        if self.batch < 1:
            raise ConfigurationError(f"--batch must be at least 1, not {self.batch}")


def measure_recall(
    engine: Engine,
    prompts: Sequence[Prompt],
    switches: RecallSwitches,
    runtime: Runtime,
    *,
    progress: Progress,
    request: ReportRequest | None = None,
    journals: Journals | None = None,
) -> Report:
    """Run the three arms over the prompts that have a needle.

    Raises:
        ConfigurationError: a switch does not make sense, or not with a batch; or the journal belongs to
            another run.
        ModelError: sequences of this model cannot be decoded together.
        PromptError: a prompt has no needle or one that a restoring policy does not reach, does not fit the
            model, or proves nothing, see `refuse_unsound`.
    """
    switches.check()
    if switches.batch > 1 and engine.options.single_graph:
        raise ConfigurationError("--single-graph diagnoses one sequence at a time; leave out --batch")
    if bare := [prompt.id for prompt in prompts if prompt.needle is None]:
        raise PromptError(f"recall needs prompts with a needle; {bare[0]} has none")
    refuse_near(prompts, engine.target.tokenizer, reach(engine.policy))
    started, watch = now(), StrainWatch()
    emptied = [prompt.without_needle() for prompt in prompts]
    full, empty = (encode_all(engine, some, switches.chat) for some in (prompts, emptied))
    name = "speculative" if engine.drafter else "kakeya"
    claims = _claims(engine.policy, name, switches)
    refuse_unsound(prompts)
    settings = configuration(engine, runtime, "eval recall", switches) | {
        "compiled": engine.options.compiled and switches.batch == 1
    }
    environment = describe(runtime, watch, models(engine))
    marks = fingerprint(environment, settings, prompts, full, request)
    journal = journals.open(marks) if journals else None
    controls = restoring_controls(engine.policy)
    progress(0, (3 + len(controls)) * len(prompts), "warming up", prompts[0].id)
    draft_length = _warm_up(engine, full, switches)

    def lane(of: Engine, arm: Arm, asked: Sequence[Prompt], encoded: Sequence[list[int]]) -> Lane:
        ours = arm.loop == OUR_LOOP
        return Lane(
            arm,
            asked,
            encoded,
            run=partial(_run, of, ours, switches, draft_length),
            row=scored_rows(engine.target.tokenizer),
            phase=f"recalling {arm.name}",
            together=switches.batch > 1 and ours,
        )

    lanes = [
        lane(engine, our_arm(engine, name), prompts, full),
        lane(engine, Arm(ORACLE, "oracle", PLAIN_LOOP), prompts, full),
        lane(engine, our_arm(engine, CONTROL, "control", "no_needle"), emptied, empty),
    ]
    for source, policy in controls.items():
        restored = under(engine, policy)
        lanes.append(lane(restored, our_arm(restored, policy.spec, "control", source), prompts, full))
    course = run_interleaved(lanes, batch=switches.batch, progress=progress, journal=journal)
    progress(len(course.order), len(course.order), "checking", "recall")
    return Report.build(
        "recall",
        started=journal.started if journal else started,
        claims=claims,
        environment=describe(runtime, watch, models(engine)),
        configuration=settings | {"resumed": course.resumed},
        arms=[each.arm for each in lanes],
        order=course.order,
        request=request,
    )


def reach(policy: KVPolicy) -> int:
    """How many tokens before the end a needle must lie for a policy that restores to matter; else 0."""
    return 0 if policy.source is None else policy.sink + policy.window


def restoring_controls(policy: KVPolicy) -> dict[str, KVPolicy]:
    """What a policy that restores is measured beside: the same with other sources, by the control's name."""
    if policy.source is None:
        return {}
    return {source: replace(policy, source=source) for source in RESTORING_CONTROLS}


def _claims(policy: KVPolicy, name: str, switches: RecallSwitches) -> list[dict[str, Any]]:
    """What the report asks to be believed for."""
    claims: list[dict[str, Any]] = []
    if switches.claim == "parity" or (switches.claim == "auto" and policy.kind in LOSSLESS):
        claims.append({"name": "recall_parity", "arm": name, "baseline": ORACLE})
    if policy.source in MEANINGFUL:
        claims.append({"name": "restoration", "arm": name})
    if switches.min_recall is not None:
        claims.append({"name": "recall", "arm": name, "at_least": switches.min_recall})
    return claims


def _run(
    engine: Engine,
    ours: bool,
    switches: RecallSwitches,
    draft_length: DraftLength,
    encoded: Sequence[list[int]],
) -> list[Outcome]:
    """Some prompts through one arm; ours decodes them together if asked to."""
    if ours and switches.batch > 1:
        return speculate_together(engine, encoded, switches.max_tokens, draft_length)
    return [run_arm(engine, ours, tokens, switches.max_tokens, draft_length) for tokens in encoded]


def _warm_up(engine: Engine, encoded: Sequence[Sequence[int]], switches: RecallSwitches) -> DraftLength:
    """As `warm_up`; with batches the draft length learns what the rounds of a batch cost."""
    if switches.batch == 1:
        return warm_up(engine, encoded, switches.max_tokens)
    plain(engine.target, encoded[0], switches.max_tokens, engine.options.prefill_chunk)
    draft_length = engine.new_draft_length()
    if not isinstance(draft_length, AdaptiveDraftLength):
        speculate_together(engine, encoded[: switches.batch], switches.max_tokens, draft_length)
        return draft_length
    tour = Tour(draft_length)
    for turn in range(WARM_UPS):
        start = turn * switches.batch % len(encoded)
        speculate_together(engine, encoded[start : start + switches.batch], switches.max_tokens, tour)
        if tour.finished:
            break
    return draft_length


def recall_by_depth(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Share of answered needles at every depth, from the rows of one arm.

    Where there are more than `DEPTHS` depths they are put together in quarters of the context.
    """
    needles = [row["needle"] for row in rows if "needle" in row]
    exact = len({needle["depth"] for needle in needles}) <= DEPTHS
    hits: dict[str, list[bool]] = defaultdict(list)
    for needle in sorted(needles, key=lambda needle: needle["depth"]):
        quarter = min(int(4 * needle["depth"]), 3)
        name = f"{needle['depth']:g}" if exact else f"{quarter / 4:g}-{(quarter + 1) / 4:g}"
        hits[name].append(needle["hit"])
    return {name: sum(found) / len(found) for name, found in hits.items()}
