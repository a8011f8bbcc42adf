"""What each claim needs, which figure decides it, whether the rows reach it, and when a speed may be claimed.

The SPEEDUP rules apply to the two arms of each speedup or no_slowdown claim only.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Literal

from bridge.evidence.figures import SPEED_CLAIMS, Case, compare, paired, parity_difference
from bridge.evidence.model import PLAIN_LOOP, Arm, ReportClaim, quotient
from bridge.evidence.text import several, shown

FEWEST_SAMPLES = 5
FEWEST_TOKENS = 32
LARGEST_SPREAD = 3.0
# A row this short, or a difference this small, is a hiccup of the scheduler and not a spread of the work.
SPREAD_TOKENS = 16
SPREAD_S = 0.025
SAME_LENGTH = 1.1  # prompts whose lengths differ by less are the same amount of prefill
# A ratio may exceed the tokens a forward gives by this much: the arms of one prompt are timed one after the
# other, and quiet machines drift by some per cent between them.
RATIO_TOLERANCE = 1.10
# Plain steps of mlx-lm's loop took 1.2 to 1.8 times as long as ours at block 1 where models were small.
# One slow row weighs more in the total than in the median, also on a quiet machine.
MOST_LOOP_GAIN, MOST_TOTAL_LOOP_GAIN = 2.0, 2.25
# A plain step is one forward of one token; a prefill is two or more forwards, of all of the prompt.
MOST_STEP_TO_PREFILL = 1.25


@dataclass(frozen=True)
class ClaimKind:
    """The form of one claim; a bound under `lowest` claims nothing, one over `highest` cannot be meant."""

    bound: Literal["at_least", "at_most"] | None = None
    against: Literal["baseline", "oracle"] | None = None  # the role of the arm it compares with
    lowest: float = 0.0
    highest: float = 1e15
    of_arm: bool = True


@dataclass(frozen=True)
class ClaimFigure:
    """A claim with the figure the rows give; `figure` is None where they give none."""

    name: str
    arm: str | None
    against: str | None
    bound: float | None
    figure: float | None
    met: bool


# Those without a bound are decided by RECALL_BELOW_ORACLE and the restoration rules; the environment block by
# ENVIRONMENT_INCOMPLETE; that outputs agree with a reference's, in every round, by PARITY_TOLERANCE, too.
CLAIMS = {
    "identical_output": ClaimKind(against="baseline"),
    "exact_match": ClaimKind("at_least", "baseline", lowest=0.5, highest=1.0),
    "speedup": ClaimKind("at_least", "baseline", lowest=1.0),
    "no_slowdown": ClaimKind("at_least", "baseline", lowest=0.8, highest=1.0),
    "acceptance_length": ClaimKind("at_least", lowest=1.0, highest=1024),
    "recall": ClaimKind("at_least", lowest=0.01, highest=1.0),
    "recall_parity": ClaimKind(against="oracle"),
    "resident_bytes": ClaimKind("at_most", lowest=1),
    "restoration": ClaimKind(),
    "natural_stops": ClaimKind("at_least", lowest=0.5, highest=1.0),
    "machine": ClaimKind(of_arm=False),
    "parity": ClaimKind("at_most", lowest=-1e15, of_arm=False),
}
# Claims of the same tokens, and of a figure over the arm's own prompts.
SAMENESS = frozenset({"identical_output", "exact_match"})
SHARES = frozenset({"acceptance_length", "natural_stops", "recall", "recall_parity", "restoration"})


def claim_not_met(case: Case) -> Iterator[str]:
    """A claim is malformed, names an arm that is not there, leaves out prompts that the arm it is held
    against ran, calls another baseline than plain decoding its original, calls ends of texts natural that
    other texts go on past, was not asked for by the configuration, or is not reached by the rows.
    """
    for claim in case.report.claims:
        if problem := next(chain(_problems(case, claim), _not_configured(case, claim)), None):
            yield f"{claim.name}: {problem}"


def claim_figures(case: Case) -> tuple[ClaimFigure, ...]:
    """Every claim with its recomputed figure."""
    return tuple(_claim_figure(case, claim, CLAIMS[claim.name]) for claim in case.report.claims)


def _claim_figure(case: Case, claim: ReportClaim, kind: ClaimKind) -> ClaimFigure:
    arm, other = _arms(case, claim, kind)
    return ClaimFigure(
        name=claim.name,
        arm=arm.name if arm else claim.arm if kind.of_arm else None,
        against=other.name if other else None,
        bound=getattr(claim, kind.bound) if kind.bound else None,
        figure=_figure(case, claim.name, arm, other),
        met=next(_problems(case, claim), None) is None,
    )


def _arms(case: Case, claim: ReportClaim, kind: ClaimKind) -> tuple[Arm | None, Arm | None]:
    arm = case.arm_of(claim) if kind.of_arm else None
    return arm, case.other_of(claim, kind.against) if kind.against else None


def _figure(case: Case, name: str, arm: Arm | None, other: Arm | None) -> float | None:
    """The number a claim is about, of its arm and the arm it compares with."""
    if arm is None:
        return parity_difference(case.report.parity) if name == "parity" else None
    figures = case.figures.arms[arm.name]
    if name == "acceptance_length":
        return figures.acceptance_length
    if name == "resident_bytes":
        return figures.max_resident_bytes
    if name in ("recall", "recall_parity", "restoration"):
        return figures.recall
    if name == "natural_stops":
        return quotient(sum(sample.finish_reason == "stop" for sample in arm.samples), len(arm.samples))
    pair = compare(arm, other) if other else None
    if pair and name in SAMENESS:
        return quotient(pair.identical_samples, pair.compared_samples)
    return pair.decode_ratio if pair else None


def _problems(case: Case, claim: ReportClaim) -> Iterator[str]:
    """What is wrong with a claim: the first counts, as later ones rely on it."""
    kind = CLAIMS[claim.name]
    taken = {"name", kind.bound, "arm" if kind.of_arm else None, "baseline" if kind.against else None}
    yield from (f"takes no {name}" for name, value in claim if name not in taken and value is not None)
    bound = getattr(claim, kind.bound) if kind.bound else None
    if kind.bound and (bound is None or not kind.lowest <= bound <= kind.highest):
        yield f"{kind.bound} is {bound}, not a number from {kind.lowest:g} to {kind.highest:g}"
    arm, other = _arms(case, claim, kind)
    if arm is not None:
        # A missing oracle is CONTROL_MISSING; one of another role cannot be compared with.
        needed = kind.against == "baseline" or (kind.against == "oracle" and claim.baseline is not None)
        if needed and (other is None or other.role != kind.against):
            yield (
                f"{shown(claim.baseline)} is no {kind.against}" if claim.baseline else "there is no baseline"
            )
        yield from _unlike_prompts(case, claim, arm, other)
    elif kind.of_arm:
        yield f"there is no arm {shown(claim.arm)}" if claim.arm else "no single arm is under test"
    figure = _figure(case, claim.name, arm, other)
    if kind.bound and figure is None:
        yield "the rows give no such figure"
    sign = -1 if kind.bound == "at_most" else 1
    if figure is not None and bound is not None and sign * figure < sign * bound:
        yield f"claimed {kind.bound} {bound:g}, but the rows give {figure:.6g}"


def _not_configured(case: Case, claim: ReportClaim) -> Iterator[str]:
    """Why `eval throughput`, with the switches that the report states, would not have made a claim."""
    configuration, speed = case.report.configuration, claim.name in SPEED_CLAIMS
    if speed and (reason := configuration.get("speed_not_claimed")) is not None:
        yield f"configuration.speed_not_claimed says why none was claimed: {shown(reason)}"
    asked = configuration.get("claim")
    if (asked == "none" and (speed or claim.name == "identical_output")) or (asked == "identity" and speed):
        yield f"configuration.claim is {shown(asked)}"
    least = configuration.get("min_speedup", claim.at_least)
    if claim.name == "speedup" and least != claim.at_least:
        yield f"claims at_least {shown(claim.at_least)}, but configuration.min_speedup is {shown(least)}"


def _unlike_prompts(case: Case, claim: ReportClaim, arm: Arm, baseline: Arm | None) -> Iterator[str]:
    """Sameness needs plain decoding of the same prompts; identity but for ties, the rounding error too.

    A share over fewer prompts than its references ran: the others may be those that failed.
    """
    if claim.name == "identical_output" and case.report.rounding is None:
        yield "the rounding error of this model was not measured"
    if claim.name in SAMENESS and baseline is not None:
        if not arm.samples or arm.prompts != baseline.prompts:
            yield "the arm and the baseline did not run the same prompts"
        # The baseline of a kv report is the system itself with native caches; KIND_MISMATCH judges it.
        if case.report.kind != "kv" and not baseline.system.is_plain:
            yield f"the baseline {baseline.label} is no plain decoding"
    of_all = claim.name in ("acceptance_length", "natural_stops")
    references = case.baselines if of_all else case.references
    for reference in references if claim.name in SHARES else ():
        ours, theirs = (
            {sample.prompt_id for sample in each.samples if of_all or sample.needle is not None}
            for each in (arm, reference)
        )
        if theirs and ours != theirs:
            yield f"{arm.label} and {reference.label} did not run the same prompts"
    if claim.name == "natural_stops":
        yield from _no_stops(case, arm)


def _no_stops(case: Case, arm: Arm) -> Iterator[str]:
    """Texts that go on past the token that ends another one by `stop`: that is no stop token.

    So a text that was cut at `max_tokens` cannot call that a stop.
    """
    ends = {s.tokens[-1]: s.prompt_id for s in arm.samples if s.finish_reason == "stop" and s.tokens}
    for other, sample, where in case.rows():
        inside = sample.tokens if sample.finish_reason == "length" else sample.tokens[:-1]
        found = ends.keys() & set(inside)
        if found and other.control != "ignore_stops":
            yield f"token {min(found)} ends {shown(ends[min(found)])}, but {where} continues after it"


def speedup_samples(case: Case) -> Iterator[str]:
    """A speed is claimed with fewer than 5 samples, or different prompts, in an arm."""
    for arm in case.speed_arms():
        prompts = len({sample.prompt_sha256 for sample in arm.samples})
        if prompts < FEWEST_SAMPLES:
            counts = f"{len(arm.samples)} samples of {prompts} different prompts"
            yield f"arm {arm.label} has {counts}, a speed needs {FEWEST_SAMPLES}"


def speedup_tokens(case: Case) -> Iterator[str]:
    """A speed is claimed with a median of fewer than 32 decoded tokens."""
    for arm in case.speed_arms():
        middle = case.figures.arms[arm.name].median_decoded_tokens
        if middle < FEWEST_TOKENS:
            yield f"arm {arm.label} decoded {middle:g} tokens in the median, fewer than {FEWEST_TOKENS}"


def speedup_subset(case: Case) -> Iterator[str]:
    """The compared arms did not keep the same prompts."""
    for arm, baseline in case.speed_pairs():
        if alone := sorted(arm.prompts ^ baseline.prompts):
            yield f"only one of {arm.label} and {baseline.label} has: {several(alone)}"


def speedup_scope(case: Case) -> Iterator[str]:
    """The arms are timed over different scopes, or not decode-only."""
    for arm in case.speed_arms():
        if arm.timing_scope != "decode":
            yield f"{arm.label} is timed {arm.timing_scope}, so the headline is no decode-only figure"


def speedup_baseline_loop(case: Case) -> Iterator[str]:
    """The plain arm is not mlx-lm's asynchronous generate_step, or a preset promises one and has none."""
    for _, baseline in case.speed_pairs():
        system = baseline.system
        if not system.is_plain or system.block is not None:
            yield f"baseline {baseline.label} is {shown(system.loop)}, not {PLAIN_LOOP} alone"


def speedup_not_interleaved(case: Case) -> Iterator[str]:
    """The arms ran one after the other, or one of them always went first."""
    for arm, baseline in case.speed_pairs():
        runs = [run for run in case.report.order if run[0] in (arm.name, baseline.name)]
        place = {run: index for index, run in enumerate(runs)}
        both = [
            (place[arm.name, prompt], place[baseline.name, prompt])
            for prompt in arm.prompts & baseline.prompts
            if (arm.name, prompt) in place and (baseline.name, prompt) in place
        ]
        apart = sum(abs(ours - theirs) != 1 for ours, theirs in both)
        first = {ours < theirs for ours, theirs in both}
        if apart or (len(both) >= 2 and len(first) == 1):
            pair = f"{arm.label} and {baseline.label}"
            yield f"{pair}: {apart} of {len(both)} prompts did not run back to back, or one always went first"


def speedup_prefill_spread(case: Case) -> Iterator[str]:
    """Identical prefills varied more than threefold (and by more than 25 ms)."""
    alike: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for pair in case.speed_pairs():
        for samples in paired(*pair):
            alike[*(arm.name for arm in pair), samples[0].prompt_id] = [s.prefill_s or 0.0 for s in samples]
    for arm in case.speed_arms():
        for sample in arm.samples:
            length = round(math.log(sample.prompt_tokens) / math.log(SAME_LENGTH))
            alike[arm.name, length].append(sample.prefill_s or 0.0)
    for of, times in alike.items():
        low, high = min(times), max(times)
        if high > LARGEST_SPREAD * low and high - low > SPREAD_S:
            yield f"equal prefills ({several([*map(str, of)])}) took {low:.4f} to {high:.4f} s"


def speedup_decode_spread(case: Case) -> Iterator[str]:
    """The plain arm's time per token varied more than threefold between rows of 16 tokens or more."""
    for _, baseline in case.speed_pairs():
        long = [sample for sample in baseline.samples if sample.decoded >= SPREAD_TOKENS]
        times = [1e3 * sample.step_s for sample in long if sample.step_s is not None]
        if times and max(times) > LARGEST_SPREAD * min(times):
            yield f"arm {baseline.label}: one token took {min(times):.3f} to {max(times):.3f} ms, by the row"


def speedup_impossible(case: Case) -> Iterator[str]:
    """The ratio exceeds the mean tokens per forward of the target, plain steps included, by more than a
    tenth; held against the same loop at block 1 where the report has that arm, else against plain
    decoding.
    """
    for arm, baseline in case.speed_pairs():
        plain = own_steps(case, arm) or baseline
        most = quotient(sum(sample.decoded for sample in arm.samples), len(arm.rounds))
        figures = compare(arm, plain)
        ratio = max(figures.decode_ratio or 0.0, figures.median_decode_ratio or 0.0)
        if most is not None and ratio > most * RATIO_TOLERANCE:
            times = f"{ratio:.3f} times as fast as {plain.label}"
            yield f"{arm.label} decodes {times}, but its forwards gave {most:.3f} tokens each"


def own_steps(case: Case, arm: Arm) -> Arm | None:
    """The same loop at block 1 over the same prompts: a control, or the arm itself where it never drafts."""
    if arm.system.drafter is None:
        return arm
    for other in case.report.arms:
        same = (other.system.loop, other.system.kv) == (arm.system.loop, arm.system.kv)
        if other.control == "block_1" and same and other.prompts == arm.prompts:
            return other
    return None


def baseline_slow(case: Case) -> Iterator[str]:
    """A plain step took more than 1.25 times its whole prefill, or more than twice (in total 2.25 times) as
    long as the same loop at block 1.
    """
    for arm, baseline in case.speed_pairs():
        if not baseline.steps_s:
            continue
        step = 1e3 * median(baseline.steps_s)
        prefill = 1e3 * median([sample.prefill_s or 0.0 for sample in baseline.samples])
        if step > MOST_STEP_TO_PREFILL * prefill:
            yield f"a plain step of {baseline.label} took {step:.3f} ms, its whole prefill {prefill:.3f} ms"
        if (own := own_steps(case, arm)) is not None:
            gains = compare(own, baseline)
            total, middle = gains.decode_ratio or 0.0, gains.median_decode_ratio or 0.0
            if total > MOST_TOTAL_LOOP_GAIN or middle > MOST_LOOP_GAIN:
                times = f"{total:.2f} times as long as those of {own.label}, {middle:.2f} in the median row"
                limits = f"limits {MOST_TOTAL_LOOP_GAIN:g} and {MOST_LOOP_GAIN:g}"
                yield f"plain steps of {baseline.label} took {times} ({limits})"
