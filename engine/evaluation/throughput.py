"""Speculative against plain decoding of the same prompts.

When identical work takes very different times, all of it is measured again. Where a speed may be claimed, a
third arm runs our own loop at block 1: on small models its step is quicker than mlx-lm's, and only this arm
separates that from the gain of drafting.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal

from engine.cache.policy import NATIVE
from engine.config import Engine
from engine.device import Runtime
from engine.errors import ConfigurationError
from engine.evaluation import measure
from engine.evaluation.arms import speculate
from engine.evaluation.environment import busy, disturbance, idle_load
from engine.evaluation.prompts import Prompt
from engine.generate import SamplingOptions
from evidence_format.claims import CLAIMS as CLAIMED
from evidence_format.claims import FEWEST_SAMPLES, FEWEST_TOKENS, SPEED_CLAIMS, WATCHED
from evidence_format.model import Report, ReportClaim

PLAIN, SPECULATIVE, BLOCK_1 = "plain", "speculative", "block-1"
IGNORE_STOPS: Literal["ignore_stops"] = "ignore_stops"  # the arm, and the control it is
CLAIMS = ("auto", "speedup", "no-slowdown", "identity", "none")
NO_SLOWDOWN = 0.9
# What the gate asks of a speed; with less, `auto` claims identical output alone.
TOO_FEW_TO_TIME = f"a speed needs {FEWEST_SAMPLES} prompts and more than {FEWEST_TOKENS} tokens of each"


@dataclass(frozen=True, kw_only=True)
class Switches(measure.SetSwitches):
    """What the command line can set about a throughput evaluation."""

    claim: str = "auto"
    min_speedup: float = 1.0
    min_stops: float | None = measure.at_least(None, CLAIMED["natural_stops"].lowest, 1)
    ignore_stops: bool = False  # a control arm shows what over-generation does to acceptance and speed
    # How often a disturbed measurement may start over; a report lists at most 16 restarts.
    restarts: int = measure.at_least(measure.RESTARTS, 0, 16)

    def check(self) -> None:
        super().check()
        measure.check_choice("--claim", self.claim, CLAIMS)
        if not (isfinite(self.min_speedup) and self.min_speedup >= 1):
            raise ConfigurationError(
                f"--min-speedup must be a finite number of at least 1, not {self.min_speedup}"
            )


def measure_throughput(
    engine: Engine, prompts: Sequence[Prompt], switches: Switches, runtime: Runtime, **context: Any
) -> Report:
    """Run plain decoding and, unless it would be the same, our loop over the prompts."""
    compares = not engine.alone or engine.policy != NATIVE
    _check(engine, switches, compares)
    evaluation = measure.Evaluation("throughput", "eval throughput", engine, switches, runtime, **context)
    encoded = measure.encode_all(engine, prompts, switches.chat)
    claims = _claims(engine, switches, runtime, len(prompts)) if compares else []
    is_timed = any(claim.name in SPEED_CLAIMS for claim in claims)
    plainly = replace(engine, drafter=None)
    arms = [measure.plain_arm(PLAIN), measure.our_arm(engine, SPECULATIVE)][: 1 + compares]
    drafted = "drafting/verifying" if engine.drafter else "decoding"
    for arm, phase in zip(arms, ("decoding", drafted), strict=False):
        evaluation.add(arm, prompts, encoded, phase)
    steps = measure.our_arm(replace(plainly, alone=True), BLOCK_1, "control", "block_1")
    has_steps = is_timed and engine.drafter is not None
    if has_steps:
        evaluation.add(steps, prompts, encoded, "decoding", engine=plainly)
    if switches.ignore_stops:
        forced = measure.our_arm(engine, IGNORE_STOPS, "control", IGNORE_STOPS)
        evaluation.add(forced, prompts, encoded, drafted, options=SamplingOptions(ignore_stops=True))
    # What `auto` claims depends on what else the machine does, and never on the speed that was measured.
    reason = None
    if switches.claim == "auto" and claims:
        reason = busy(idle_load()) if is_timed else TOO_FEW_TO_TIME
    if reason and is_timed:
        evaluation.progress(0, evaluation.total, "skipping the speed claim", reason)

    def warm_up() -> None:
        evaluation.warm_up()
        if has_steps:
            speculate(plainly, encoded[0], switches.max_tokens, plainly.new_draft_length())

    def disturbed() -> str | None:
        return disturbance(evaluation.arms)

    evaluation.run(warm_up, disturbed if is_timed and reason is None else None, switches.restarts)
    if is_timed and switches.claim == "auto":
        reason = reason or busy(evaluation.watch.timed_load) or _unwatched(evaluation) or disturbed()
        if reason:
            claims = [claim for claim in claims if claim.name not in SPEED_CLAIMS]
    if switches.claim == "auto" and compares and not evaluation.arms[1].drafted_blocks:
        # Drafting did not pay: what is left to say is that nothing was lost by finding that out.
        claims = [no_slowdown() if claim.name == "speedup" else claim for claim in claims]
    checking = reason if is_timed and reason else measure.COMPARING
    return evaluation.report(claims, checking, len(arms), speed_not_claimed=reason)


def refuse_restoring(engine: Engine) -> None:
    """Raise ConfigurationError for a policy that restores: it means nothing without its controls."""
    if engine.policy.source is not None:
        raise ConfigurationError(
            f"--kv {engine.policy.spec} means nothing without its controls: eval recall and eval kv run them"
        )


def _check(engine: Engine, switches: Switches, compares: bool) -> None:
    switches.check()
    refuse_restoring(engine)
    if engine.alone and switches.claim not in ("auto", "none"):
        raise ConfigurationError(f"--claim {switches.claim} compares with speculation; give --drafter PATH")
    if not compares and (switches.ignore_stops or switches.min_stops is not None):
        raise ConfigurationError("--ignore-stops and --min-stops need a drafter; give --drafter PATH")


def _unwatched(evaluation: measure.Evaluation) -> str | None:
    """Why the load says nothing about most rows: an earlier process ran them."""
    timed = sum(row.seconds for run in evaluation.runs for row in run.samples)
    seconds = evaluation.watch.timed_load.seconds
    if seconds < WATCHED * timed:
        return f"the load was measured for {seconds:.1f} s of {timed:.1f} timed seconds (a resumed run)"
    return None


def _claims(engine: Engine, switches: Switches, runtime: Runtime, prompts: int) -> list[ReportClaim]:
    """What the report claims, before any timing; `auto` may drop a speed where the machine was busy."""
    claim = switches.claim
    if claim == "auto" and engine.policy != NATIVE:  # a policy may change the output
        claim = "none"
    if claim == "auto":
        claim = "speedup" if runtime.fast and engine.drafter else "no-slowdown"
        if prompts < FEWEST_SAMPLES or switches.max_tokens <= FEWEST_TOKENS:
            claim = "identity"
    pair: dict[str, Any] = {"arm": SPECULATIVE, "baseline": PLAIN}
    claims: list[ReportClaim] = []
    if switches.min_stops is not None:
        claims.append(ReportClaim(name="natural_stops", arm=SPECULATIVE, at_least=switches.min_stops))
    if claim != "none":
        claims.append(ReportClaim(name="identical_output", **pair))
    if claim == "speedup":
        claims.append(ReportClaim(name="speedup", **pair, at_least=switches.min_speedup))
    elif claim == "no-slowdown":
        claims.append(no_slowdown())
    return claims


def no_slowdown() -> ReportClaim:
    """The claim of a machine or a drafter without a speed-up."""
    return ReportClaim(name="no_slowdown", arm=SPECULATIVE, baseline=PLAIN, at_least=NO_SLOWDOWN)
