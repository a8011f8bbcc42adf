"""What each claim needs, which figure decides it, whether the rows reach it, and when a speed may be claimed.

The SPEEDUP rules apply to the two arms of each speedup or no_slowdown claim only.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from statistics import median

from evidence_format import claims
from evidence_format.claims import CLAIMS, SAMENESS, SPEED_CLAIMS
from evidence_format.figures import Case, faults, pair_samples, parity_difference
from evidence_format.model import PLAIN_LOOP, Arm, ReportClaim, quotient
from evidence_format.text import several, shown

# A ratio may exceed the tokens a forward gives by this much: the arms of one prompt are timed one after the
# other, and quiet machines drift by some per cent between them.
RATIO_TOLERANCE = 1.10
# A plain step is one forward of one token; a prefill is two or more forwards, of all of the prompt.
MOST_STEP_TO_PREFILL = 1.25


@dataclass(frozen=True)
class ClaimFigure:
    """A claim with the figure the rows give; `figure` is None where they give none."""

    name: str
    arm: str | None
    against: str | None
    bound: float | None
    figure: float | None
    met: bool


def claim_not_met(case: Case) -> Iterator[str]:
    """A claim is malformed, names an arm that is not there, leaves out prompts that the arm it is held
    against ran, calls another baseline than plain decoding its original, calls ends of texts natural that
    other texts go on past, was not asked for by the configuration, or is not reached by the rows.
    """
    for claim in case.claims:
        problems = chain(_problems(case, claim), _not_configured(case, claim))
        yield from (f"{claim.name}: {problem}" for problem in islice(problems, 1))


def claim_figures(case: Case) -> Iterator[ClaimFigure]:
    """Every claim with its recomputed figure."""
    for claim in case.claims:
        kind, (arm, other) = CLAIMS[claim.name], _arms(case, claim)
        yield ClaimFigure(
            name=claim.name,
            arm=arm.name if arm else claim.arm if kind.of_arm else None,
            against=other.name if other else None,
            bound=getattr(claim, kind.bound) if kind.bound else None,
            figure=_figure(case, claim.name, arm, other),
            met=next(_problems(case, claim), None) is None,
        )


def _arms(case: Case, claim: ReportClaim) -> tuple[Arm | None, Arm | None]:
    kind = CLAIMS[claim.name]
    arm = case.arm_of(claim) if kind.of_arm else None
    return arm, case.other_of(claim, kind.against) if kind.against else None


def _figure(case: Case, name: str, arm: Arm | None, other: Arm | None) -> float | None:
    if arm is None:
        if name == "nll_increase":
            interval = case.figures.perplexity.nll_interval if case.figures.perplexity else None
            return interval[1] if interval else None
        return parity_difference(case.report.parity) if name == "parity" else None
    figures, pair = case.figures.arms[arm.name], case.compare(arm, other) if other else None
    if name in SPEED_CLAIMS:
        return pair.decode_ratio if pair else None
    if name in SAMENESS:
        return quotient(pair.identical_samples, pair.compared_samples) if pair else None
    if name == "natural_stops":
        return quotient(sum(sample.finish_reason == "stop" for sample in arm.samples), len(arm.samples))
    of_summary = {
        "acceptance_length": figures.acceptance_length,
        "resident_bytes": figures.max_resident_bytes,
    }
    return of_summary.get(name, figures.recall)


def _problems(case: Case, claim: ReportClaim) -> Iterator[str]:
    """What is wrong with a claim: the first counts, as later ones rely on it."""
    kind, (arm, other) = CLAIMS[claim.name], _arms(case, claim)
    bound, figure = getattr(claim, kind.bound) if kind.bound else None, _figure(case, claim.name, arm, other)
    known = {"name", kind.bound, "arm" if kind.of_arm else None, "baseline" if kind.against else None}
    yield from (f"takes no {name}" for name, value in claim if name not in known and value is not None)
    if kind.bound and (bound is None or not kind.lowest <= bound <= kind.highest):
        yield f"{kind.bound} is {bound}, not a number from {kind.lowest:g} to {kind.highest:g}"
    if arm is not None:
        # A missing oracle is CONTROL_MISSING; one of another role cannot be compared with.
        needed = kind.against == "baseline" or (kind.against == "oracle" and claim.baseline is not None)
        if needed and (other is None or other.role != kind.against):
            yield f"there is no {kind.against} {shown(claim.baseline or 'of that role')}"
        yield from _unlike_prompts(case, claim.name, arm, other)
    elif kind.of_arm:
        yield f"there is no arm {shown(claim.arm)}" if claim.arm else "no single arm is under test"
    if kind.bound and figure is None:
        yield "the rows give no such figure"
    sign = -1 if kind.bound == "at_most" else 1
    if figure is not None and bound is not None and sign * figure < sign * bound:
        yield f"claimed {kind.bound} {bound:g}, but the rows give {figure:.6g}"


def _not_configured(case: Case, claim: ReportClaim) -> Iterator[str]:
    """Why `eval throughput`, with the switches that the report states, would not have made a claim."""
    stated, speed = case.configuration, claim.name in SPEED_CLAIMS
    asked, reason = stated.get("claim"), stated.get("speed_not_claimed")
    least = stated.get("min_speedup", claim.at_least)
    barred = {"none": {*SPEED_CLAIMS, "identical_output"}, "identity": SPEED_CLAIMS}.get(str(asked), ())
    unclaimed, other = speed and reason is not None, claim.name == "speedup" and least != claim.at_least
    return faults(
        (unclaimed, f"configuration.speed_not_claimed says why none was claimed: {shown(reason)}"),
        (claim.name in barred, f"configuration.claim is {shown(asked)}"),
        (other, f"claims at_least {shown(claim.at_least)}, but configuration.min_speedup is {shown(least)}"),
    )


def _unlike_prompts(case: Case, name: str, arm: Arm, baseline: Arm | None) -> Iterator[str]:
    """Sameness needs plain decoding of the same prompts; identity but for ties, the rounding error too.

    A share over fewer prompts than its references ran: the others may be those that failed.
    """
    if name == "identical_output" and case.report.rounding is None:
        yield "the rounding error of this model was not measured"
    same, of_all = name in SAMENESS, name in SAMENESS | {"acceptance_length", "natural_stops"}
    # The baseline of a kv report is the system itself with native caches; KIND_MISMATCH judges it.
    if same and baseline is not None and case.kind != "kv" and not baseline.system.is_plain:
        yield f"the baseline {baseline.label} is no plain decoding"
    references = (baseline,) if same else case.baselines if of_all else case.references
    for reference in references if same or name in claims.SHARES else ():
        ours, theirs = (
            {row.prompt_id for row in each.samples if of_all or row.needle is not None} if each else set()
            for each in (arm, reference)
        )
        if reference is not None and (ours != theirs if theirs else same):
            yield f"{arm.label} and {reference.label} did not run the same prompts"
    if name == "natural_stops":
        # A text that goes on past the token that ends another one by `stop`: that is no stop token. So a text
        # that was cut at `max_tokens` cannot call that a stop.
        ends = {s.tokens[-1]: s.prompt_id for s in arm.samples if s.finish_reason == "stop" and s.tokens}
        for other, sample, where in case.rows:
            inside = sample.tokens if sample.finish_reason == "length" else sample.tokens[:-1]
            found = ends.keys() & set(inside)
            if found and other.control != "ignore_stops":
                yield f"token {min(found)} ends {shown(ends[min(found)])}, but {where} continues after it"


def speedup_samples(case: Case) -> Iterator[str]:
    """A speed is claimed with fewer than 5 samples, or different prompts, in an arm."""
    for arm in case.speed_arms:
        prompts = len({sample.prompt_sha256 for sample in arm.samples})
        if prompts < claims.FEWEST_SAMPLES:
            yield f"arm {arm.label} ran {prompts} different prompts, a speed needs {claims.FEWEST_SAMPLES}"


def speedup_tokens(case: Case) -> Iterator[str]:
    """A speed is claimed with a median of fewer than 32 decoded tokens."""
    for arm in case.speed_arms:
        middle, fewest = case.figures.arms[arm.name].median_decoded_tokens, claims.FEWEST_TOKENS
        if middle < fewest:
            yield f"arm {arm.label} decoded {middle:g} tokens in the median, fewer than {fewest}"


def speedup_subset(case: Case) -> Iterator[str]:
    """The compared arms did not keep the same prompts."""
    for arm, baseline in case.speed_pairs:
        if alone := sorted(arm.prompts ^ baseline.prompts):
            yield f"only one of {arm.label} and {baseline.label} has: {several(alone)}"


def speedup_scope(case: Case) -> Iterator[str]:
    """The arms are timed over different scopes, or not decode-only."""
    for arm in case.speed_arms:
        if arm.timing_scope != "decode":
            yield f"{arm.label} is timed {arm.timing_scope}, so the headline is no decode-only figure"


def speedup_baseline_loop(case: Case) -> Iterator[str]:
    """The plain arm is not mlx-lm's asynchronous generate_step, or a preset promises one and has none."""
    for _, baseline in case.speed_pairs:
        if not baseline.system.is_plain or baseline.system.block is not None:
            yield f"baseline {baseline.label} is {shown(baseline.system.loop)}, not {PLAIN_LOOP} alone"


def speedup_not_interleaved(case: Case) -> Iterator[str]:
    """The arms ran one after the other, or one of them always went first."""
    for arm, baseline in case.speed_pairs:
        runs = [run for run in case.report.order if run[0] in (arm.name, baseline.name)]
        place = {run: index for index, run in enumerate(runs)}
        both = [((arm.name, each), (baseline.name, each)) for each in arm.prompts & baseline.prompts]
        steps = [place[theirs] - place[ours] for ours, theirs in both if ours in place and theirs in place]
        apart = sum(abs(step) != 1 for step in steps)
        if apart or (len(steps) >= 2 and len({step > 0 for step in steps}) == 1):
            pair = f"{arm.label} and {baseline.label}"
            yield f"{pair}: {apart} of {len(steps)} prompts ran apart, or one always went first"


def speedup_prefill_spread(case: Case) -> Iterator[str]:
    """Identical prefills varied more than threefold (and by more than 25 ms)."""
    alike: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for pair in case.speed_pairs:
        for samples in pair_samples(*pair):
            alike[*(arm.name for arm in pair), samples[0].prompt_id] = [s.prefill_s or 0.0 for s in samples]
    for arm in case.speed_arms:
        for sample in arm.samples:
            length = round(math.log(sample.prompt_tokens) / math.log(claims.SAME_LENGTH))
            alike[arm.name, length].append(sample.prefill_s or 0.0)
    for of, times in alike.items():
        low, high = min(times), max(times)
        if high > claims.LARGEST_SPREAD * low and high - low > claims.SPREAD_S:
            yield f"equal prefills ({several([*map(str, of)])}) took {low:.4f} to {high:.4f} s"


def speedup_decode_spread(case: Case) -> Iterator[str]:
    """The plain arm's time per token varied more than threefold between rows of 16 tokens or more whose
    contexts are alike, within a factor of two.
    """
    for _, baseline in case.speed_pairs:
        alike: dict[int, list[float]] = defaultdict(list)
        for sample in baseline.samples:
            if sample.decoded >= claims.SPREAD_TOKENS and sample.step_s is not None:
                alike[sample.context_class].append(1e3 * sample.step_s)
        for times in alike.values():
            if max(times) > claims.LARGEST_SPREAD * min(times):
                took = f"{min(times):.3f} to {max(times):.3f} ms"
                yield f"arm {baseline.label}: one token took {took}, by the row"


def speedup_impossible(case: Case) -> Iterator[str]:
    """The ratio exceeds the mean tokens per forward of the target, plain steps included, by more than a
    tenth; held against the same loop at block 1 where the report has that arm, else against plain
    decoding.
    """
    for arm, baseline in case.speed_pairs:
        ratio, timed = max(_gains(case, arm, own_steps(case, arm) or baseline)), case.timed(arm)
        most = quotient(sum(sample.decoded for sample in timed.samples), len(timed.rounds))
        if most is not None and ratio > most * RATIO_TOLERANCE:
            yield f"{arm.label} is {ratio:.3f} times as fast, but its forwards gave {most:.3f} tokens each"


def own_steps(case: Case, arm: Arm) -> Arm | None:
    """The same loop at block 1 over the same prompts: a control, or the arm itself where it never drafts."""
    if arm.system.drafter is None:
        return arm
    for other in case.report.arms:
        same = (other.system.loop, other.system.kv) == (arm.system.loop, arm.system.kv)
        if other.control == "block_1" and same and other.prompts == arm.prompts:
            return other
    return None


def _gains(case: Case, arm: Arm, baseline: Arm) -> tuple[float, float]:  # in all, and in the median row
    figures = case.compare(arm, baseline)
    return figures.decode_ratio or 0.0, figures.median_decode_ratio or 0.0


def baseline_slow(case: Case) -> Iterator[str]:
    """A plain step took more than 1.25 times its whole prefill, or more than twice (in total 2.25 times) as
    long as the same loop at block 1.
    """
    for arm, baseline in case.speed_pairs:
        if not baseline.steps_s:
            continue
        step = 1e3 * median(baseline.steps_s)
        prefill = 1e3 * median([sample.prefill_s or 0.0 for sample in baseline.samples])
        if step > MOST_STEP_TO_PREFILL * prefill:
            yield f"a plain step of {baseline.label} took {step:.3f} ms, its whole prefill {prefill:.3f} ms"
        if (own := own_steps(case, arm)) is not None:
            total, middle = _gains(case, own, baseline)
            if total > claims.MOST_TOTAL_LOOP_GAIN or middle > claims.MOST_LOOP_GAIN:
                times = f"{total:.2f} times as long as those of {own.label}, {middle:.2f} in the median row"
                yield f"plain steps of {baseline.label} took {times}"
