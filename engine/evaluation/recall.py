"""Needle in a haystack: does the system under test still find what the plain model finds?

Arms: our loop, perhaps in batches, the oracle (mlx-lm's plain decoding), and the control ``no_needle``: our
loop without the needle, which must find nothing. Where keys and values are restored, two more controls
restore them from another source: ``exact`` must find what the oracle finds, ``noise`` nothing.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from engine.cache.policy import KVPolicy
from engine.config import Engine
from engine.device import Runtime
from engine.errors import ConfigurationError, PromptError
from engine.evaluation import measure
from engine.evaluation.haystack import Haystack, refuse_near
from engine.evaluation.prompts import Prompt, refuse_unsound
from evidence_format.claims import CLAIMS
from evidence_format.model import Control, Report, ReportClaim
from evidence_format.policies import MEANINGFUL
from evidence_format.rules.recall import FEWEST_DEPTHS, FEWEST_PROMPTS

ORACLE = "oracle"
CONTROL: Literal["no_needle"] = "no_needle"
RESTORING_CONTROLS: tuple[Control, ...] = ("exact", "noise")
LOSSLESS = ("native", "sliding-bounded")  # policies for which `auto` claims parity with the oracle
DEPTHS = 12  # recall is reported for each of at most so many depths


@dataclass(frozen=True, kw_only=True)
class RecallSwitches(measure.SetSwitches):
    """What the command line can set about a recall evaluation."""

    prompts: str = "retrieval"
    limit: int | None = measure.at_least(None)
    max_tokens: int = measure.at_least(16)
    min_recall: float | None = measure.at_least(None, CLAIMS["recall"].lowest, 1)
    claim: str = "auto"
    batch: int = measure.at_least(1)  # rows then hold shares, see `speculate_batch`
    haystack: Haystack = field(default_factory=Haystack)


def measure_recall(
    engine: Engine, prompts: Sequence[Prompt], switches: RecallSwitches, runtime: Runtime, **context: Any
) -> Report:
    """Run the arms over prompts that have a needle and prove something, see `refuse_unsound`."""
    switches.check()
    if switches.batch > 1 and engine.options.single_graph:
        raise ConfigurationError("--single-graph diagnoses one sequence at a time; leave out --batch")
    if bare := [prompt.id for prompt in prompts if prompt.needle is None]:
        raise PromptError(f"recall needs prompts with a needle; {bare[0]} has none")
    refuse_near(prompts, engine.target.tokenizer, reach(engine.policy))
    emptied = [prompt.without_needle() for prompt in prompts]
    full, empty = (measure.encode_all(engine, some, switches.chat) for some in (prompts, emptied))
    refuse_unsound(prompts)
    evaluation = measure.Evaluation("recall", "eval recall", engine, switches, runtime, **context)
    name = "speculative" if engine.drafter else "kakeya"
    arms = [
        (measure.our_arm(engine, name), engine),
        (measure.plain_arm(ORACLE, "oracle"), engine),
        (measure.our_arm(engine, CONTROL, "control", CONTROL), engine),
    ]
    for source, policy in restoring_controls(engine.policy).items():
        restored = measure.under(engine, policy)
        arms.append((measure.our_arm(restored, policy.spec, "control", source), restored))
    for arm, of in arms:
        asked, tokens = (emptied, empty) if arm.name == CONTROL else (prompts, full)
        evaluation.add(arm, asked, tokens, f"recalling {arm.name}", engine=of)
    evaluation.run()
    claims: list[ReportClaim] = []
    depths = {round(prompt.needle.depth, 2) for prompt in prompts if prompt.needle}
    enough = len(prompts) >= FEWEST_PROMPTS and len(depths) >= FEWEST_DEPTHS
    if switches.claim == "parity" or (switches.claim == "auto" and engine.policy.kind in LOSSLESS and enough):
        claims.append(ReportClaim(name="recall_parity", arm=name, baseline=ORACLE))
    if engine.policy.source in MEANINGFUL:
        claims.append(ReportClaim(name="restoration", arm=name))
    if switches.min_recall is not None:
        claims.append(ReportClaim(name="recall", arm=name, at_least=switches.min_recall))
    compiled = engine.options.compiled and switches.batch == 1
    return evaluation.report(claims, "recall", compiled=compiled)


def reach(policy: KVPolicy) -> int:
    """How many tokens before the end a needle must be for a policy that restores to matter; else 0."""
    return 0 if policy.source is None else policy.sink + policy.window


def restoring_controls(policy: KVPolicy) -> dict[Control, KVPolicy]:
    """The controls of a policy that restores: the same with other sources, by the control's name."""
    if policy.source is None:
        return {}
    return {source: replace(policy, source=source) for source in RESTORING_CONTROLS}


def recall_by_depth(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Share of answered needles in rows at every depth, or where there are many, in every quarter."""
    needles = [row["needle"] for row in rows if "needle" in row]
    exact = len({needle["depth"] for needle in needles}) <= DEPTHS
    hits: dict[str, list[bool]] = defaultdict(list)
    for needle in sorted(needles, key=lambda needle: needle["depth"]):
        quarter = min(int(4 * needle["depth"]), 3)
        name = f"{needle['depth']:g}" if exact else f"{quarter / 4:g}-{(quarter + 1) / 4:g}"
        hits[name].append(needle["hit"])
    return {name: sum(found) / len(found) for name, found in hits.items()}
