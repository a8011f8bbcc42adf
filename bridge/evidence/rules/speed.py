"""May a speed be claimed? These rules apply to the two arms of each speedup or no_slowdown claim only."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from bridge.evidence.figures import Case, compare, paired
from bridge.evidence.model import Arm, quotient
from bridge.evidence.rules.paths import PLAIN_LOOP, is_plain
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
BLOCK_1 = "block_1"


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
    for arm, baseline in case.speed_pairs():
        if arm.timing_scope != baseline.timing_scope:
            yield f"{arm.label} is timed {arm.timing_scope}, the baseline {baseline.timing_scope}"
        elif arm.timing_scope != "decode":
            yield f"both arms are timed {arm.timing_scope}, so the headline is no decode-only figure"


def speedup_baseline_loop(case: Case) -> Iterator[str]:
    """The plain arm is not mlx-lm's asynchronous generate_step, or a preset promises one and has none."""
    for _, baseline in case.speed_pairs():
        system = baseline.system
        if not is_plain(system) or system.block is not None:
            yield f"baseline {baseline.label} is {shown(system.loop)}, not {PLAIN_LOOP} alone"


def speedup_not_interleaved(case: Case) -> Iterator[str]:
    """The arms ran one after the other, or one of them always went first."""
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
            yield f"{arm.label if steps[0] < 0 else baseline.label} went first at every prompt"


def speedup_prefill_spread(case: Case) -> Iterator[str]:
    """Identical prefills varied more than threefold (and by more than 25 ms)."""
    for arm, baseline in case.speed_pairs():
        for ours, theirs in paired(arm, baseline):
            times = (ours.prefill_s or 0.0, theirs.prefill_s or 0.0)
            if _spreads(*times):
                yield f"the prefill of {shown(ours.prompt_id)} took {min(times):.4f} and {max(times):.4f} s"
    for arm in case.speed_arms():
        groups: dict[int, list[float]] = defaultdict(list)
        for sample in arm.samples:
            length = round(math.log(sample.prompt_tokens) / math.log(SAME_LENGTH))
            groups[length].append(sample.prefill_s or 0.0)
        for group in groups.values():
            if _spreads(*group):
                took = f"{min(group):.4f} to {max(group):.4f} s"
                yield f"arm {arm.label}: prefills of about equal length took {took}"


def _spreads(*times: float) -> bool:
    low, high = min(times), max(times)
    return high > LARGEST_SPREAD * low and high - low > SPREAD_S


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
        if most is None:
            continue
        figures = compare(arm, plain)
        for what, ratio in (("", figures.decode_ratio), (" in the median", figures.median_decode_ratio)):
            if ratio is not None and ratio > most * RATIO_TOLERANCE:
                times = f"{ratio:.3f} times as fast as {plain.label}{what}"
                yield f"{arm.label} decodes {times}, but its forwards gave {most:.3f} tokens each"


def own_steps(case: Case, arm: Arm) -> Arm | None:
    """The same loop at block 1 over the same prompts: a control, or the arm itself where it never drafts."""
    if arm.system.drafter is None:
        return arm
    for other in case.report.arms:
        same = (other.system.loop, other.system.kv) == (arm.system.loop, arm.system.kv)
        if other.control == BLOCK_1 and same and other.prompts == arm.prompts:
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
        own = own_steps(case, arm)
        if own is None:
            continue
        gains = compare(own, baseline)
        for what, gain, limit in (
            ("in total", gains.decode_ratio, MOST_TOTAL_LOOP_GAIN),
            ("in the median row", gains.median_decode_ratio, MOST_LOOP_GAIN),
        ):
            if gain is not None and gain > limit:
                times = f"{gain:.2f} times as long as those of {own.label} {what} (limit {limit:g})"
                yield f"plain steps of {baseline.label} took {times}"
