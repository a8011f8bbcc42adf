"""May a speed be claimed? These rules apply to the two arms of each speedup or no_slowdown claim only."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import median

from bridge.evidence.case import Case
from bridge.evidence.figures import compare, paired, per_token, quotient
from bridge.evidence.report import Arm
from bridge.evidence.rules.paths import PLAIN_LOOP, is_plain
from bridge.evidence.shown import several, shown

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
BLOCK_1 = "block_1"


def speedup_samples(case: Case) -> Iterator[str]:
    """Fewer than five samples in an arm, or than five different prompts."""
    for arm in case.speed_arms():
        prompts = len({sample.prompt_sha256 for sample in arm.samples})
        if len(arm.samples) < FEWEST_SAMPLES:
            yield f"arm {shown(arm.name)} has {len(arm.samples)} samples, a speed needs {FEWEST_SAMPLES}"
        elif prompts < FEWEST_SAMPLES:
            yield f"arm {shown(arm.name)} ran {prompts} different prompts, a speed needs {FEWEST_SAMPLES}"


def speedup_tokens(case: Case) -> Iterator[str]:
    """The median output of an arm is too short to time."""
    for arm in case.speed_arms():
        middle = median([sample.decoded for sample in arm.samples] or [0])
        if middle < FEWEST_TOKENS:
            yield f"arm {shown(arm.name)} decoded {middle:g} tokens in the median, fewer than {FEWEST_TOKENS}"


def speedup_subset(case: Case) -> Iterator[str]:
    """The compared arms did not keep the same prompts, so the headline leaves runs out."""
    for arm, baseline in case.speed_pairs():
        ours = {sample.prompt_id for sample in arm.samples}
        theirs = {sample.prompt_id for sample in baseline.samples}
        if ours != theirs:
            alone = several(sorted(ours ^ theirs))
            yield f"only one of {shown(arm.name)} and {shown(baseline.name)} has: {alone}"


def speedup_scope(case: Case) -> Iterator[str]:
    """The arms are timed over different scopes, or without a decode-only figure."""
    for arm, baseline in case.speed_pairs():
        if arm.timing_scope != baseline.timing_scope:
            yield f"{shown(arm.name)} is timed {arm.timing_scope}, the baseline {baseline.timing_scope}"
        elif arm.timing_scope != "decode":
            yield f"both arms are timed {arm.timing_scope}, so the headline is no decode-only figure"


def speedup_baseline_loop(case: Case) -> Iterator[str]:
    """The plain arm is not mlx-lm's own asynchronous loop."""
    for _, baseline in case.speed_pairs():
        system = baseline.system
        if not is_plain(system) or system.block is not None:
            yield f"baseline {shown(baseline.name)} is {shown(system.loop)}, not {PLAIN_LOOP} alone"


def speedup_not_interleaved(case: Case) -> Iterator[str]:
    """The arms ran one after the other, or one always went first."""
    for arm, baseline in case.speed_pairs():
        pair = (arm.name, baseline.name)
        runs = [(name, prompt) for name, prompt in case.report.order if name in pair]
        place = {run: index for index, run in enumerate(runs)}
        steps = [
            place[arm.name, sample.prompt_id] - place[baseline.name, sample.prompt_id]
            for sample, _ in paired(arm, baseline)
            if (arm.name, sample.prompt_id) in place and (baseline.name, sample.prompt_id) in place
        ]
        apart = sum(abs(step) != 1 for step in steps)
        if apart:
            yield f"{apart} of {len(steps)} prompts did not run in {pair} back to back"
        elif len(steps) >= 2 and len(set(steps)) == 1:
            yield f"{shown(arm.name if steps[0] < 0 else baseline.name)} went first at every prompt"


def speedup_prefill_spread(case: Case) -> Iterator[str]:
    """One prompt's prefill differs more than threefold between the arms, or equal lengths' within one arm."""
    for arm, baseline in case.speed_pairs():
        for ours, theirs in paired(arm, baseline):
            low, high = sorted((ours.prefill_s or 0.0, theirs.prefill_s or 0.0))
            if _spreads(low, high):
                yield f"the prefill of {shown(ours.prompt_id)} took {low:.4f} and {high:.4f} s"
    for arm in case.speed_arms():
        for times in _prefills_of_equal_length(arm):
            if _spreads(min(times), max(times)):
                yield (
                    f"arm {shown(arm.name)}: prefills of about equal length took "
                    f"{min(times):.4f} to {max(times):.4f} s"
                )


def _prefills_of_equal_length(arm: Arm) -> Iterable[list[float]]:
    """Prefill times grouped by prompt lengths that lie within a tenth of each other."""
    groups: dict[int, list[float]] = defaultdict(list)
    for sample in arm.samples:
        groups[round(math.log(sample.prompt_tokens) / math.log(SAME_LENGTH))].append(sample.prefill_s or 0.0)
    return groups.values()


def _spreads(low: float, high: float) -> bool:
    return high > LARGEST_SPREAD * low and high - low > SPREAD_S


def speedup_decode_spread(case: Case) -> Iterator[str]:
    """The plain arm's time per decoded token varies more than threefold between prompts."""
    for _, baseline in case.speed_pairs():
        times = [
            seconds
            for sample in baseline.samples
            if sample.decoded >= SPREAD_TOKENS and (seconds := per_token(sample)) is not None
        ]
        if times and max(times) > LARGEST_SPREAD * min(times):
            yield (
                f"arm {shown(baseline.name)}: one token took {1e3 * min(times):.3f} ms "
                f"in one row, {1e3 * max(times):.3f} ms in another"
            )


def speedup_impossible(case: Case) -> Iterator[str]:
    """A ratio exceeds what the rounds allow: a forward costs a plain step at least, whatever its width.

    Held against our own loop at block 1 where the report has that arm, else against plain decoding itself.
    """
    for arm, baseline in case.speed_pairs():
        own = own_steps(case, arm)
        plain = own or baseline
        rounds = sum(len(sample.rounds) for sample in arm.samples)
        most = quotient(sum(sample.decoded for sample in arm.samples), rounds)
        if most is None:
            continue
        figures = compare(arm, plain)
        for what, ratio in (("", figures.decode_ratio), (" in the median", figures.median_decode_ratio)):
            if ratio is not None and ratio > most * RATIO_TOLERANCE:
                yield (
                    f"{shown(arm.name)} decodes {ratio:.3f} times as fast as {shown(plain.name)}{what}, but "
                    f"its forwards gave {most:.3f} tokens each"
                )


def own_steps(case: Case, arm: Arm) -> Arm | None:
    """The same loop at block 1 over the same prompts: a control, or the arm itself where it never drafts."""
    if arm.system.drafter is None:
        return arm
    prompts = {sample.prompt_id for sample in arm.samples}
    for other in case.report.arms:
        same = (other.system.loop, other.system.kv) == (arm.system.loop, arm.system.kv)
        if other.control == BLOCK_1 and same and {sample.prompt_id for sample in other.samples} == prompts:
            return other
    return None


def baseline_slow(case: Case) -> Iterator[str]:
    """Plain decoding took longer than it can have: a step beside its own prefill, or beside other arms."""
    for arm, baseline in case.speed_pairs():
        step = _step(baseline)
        if step is None:
            continue
        prefill = median([sample.prefill_s or 0.0 for sample in baseline.samples])
        if step > MOST_STEP_TO_PREFILL * prefill:
            yield (
                f"a plain step of {shown(baseline.name)} took {1e3 * step:.3f} ms, its whole prefill "
                f"{1e3 * prefill:.3f} ms"
            )
        own = own_steps(case, arm)
        if own is None:
            continue
        gains = compare(own, baseline)
        for what, gain, limit in (
            ("in total", gains.decode_ratio, MOST_TOTAL_LOOP_GAIN),
            ("in the median row", gains.median_decode_ratio, MOST_LOOP_GAIN),
        ):
            if gain is not None and gain > limit:
                yield (
                    f"plain steps of {shown(baseline.name)} took {gain:.2f} times as long as those of "
                    f"{shown(own.name)} {what} (limit {limit:g})"
                )


def _step(arm: Arm) -> float | None:
    """Seconds of a token in the median row of an arm."""
    times = [seconds for sample in arm.samples if (seconds := per_token(sample)) is not None]
    return median(times) if times else None
