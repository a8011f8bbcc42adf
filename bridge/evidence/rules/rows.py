"""Do the rows agree with themselves, with the order they ran in, and with the summary?"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from statistics import median

from pydantic import BaseModel

from bridge.evidence.case import Case
from bridge.evidence.figures import hit, paired, per_token
from bridge.evidence.report import Arm, Sample
from bridge.evidence.rules.answers import answer_problems, answers_differ
from bridge.evidence.rules.parity import round_problems
from bridge.evidence.rules.speed import own_steps
from bridge.evidence.shown import several, shown

OUR_LOOP = "kakeya.decode"
RELATIVE = 1e-9
ROUNDS_SLACK = 1.005  # clocks are read at slightly different moments
ROUNDS_SLACK_S = 0.0005
# A block's verification is a forward of the target, too. mlx-lm's plain step, against which it is held, takes
# up to twice as long as one of our loop (see `speed.MOST_LOOP_GAIN`), and a clock may read short.
LEAST_VERIFY = 0.5  # of a plain step, in the median
LEAST_VERIFY_ROUND = 0.25  # … and in every single round
LEAST_STEP = 0.4  # … of a spell of plain steps, which overlap with each other
LEAST_VERIFY_OWN = 0.9  # of a step of the same loop at block 1, in the median
FEWEST_STEPS = 8
REPORT_SLACK_S = 1.0  # the report's own times may be whole seconds


def row_inconsistent(case: Case) -> Iterator[str]:
    """A row contradicts itself, the switches or the models: digest, tokens, rounds, hit, text."""
    most = case.report.configuration.get("max_tokens")
    models = case.report.environment.models
    known = models["target"].vocab_size if "target" in models else None
    longest = models["drafter"].largest_block if "drafter" in models else None
    for arm in case.report.arms:
        for sample in arm.samples:
            where = f"{shown(arm.name)}/{shown(sample.prompt_id)}"
            yield from (f"{where}: {problem}" for problem in _row_problems(arm, sample))
            if known is not None and sample.tokens and max(sample.tokens) >= known:
                yield f"{where}: token {max(sample.tokens)} is outside the vocabulary of {known}"
            block = max((turn.block for turn in sample.rounds), default=0)
            if longest is not None and arm.system.drafter is not None and block > longest:
                yield f"{where}: a block of {block}, but the drafter takes {longest} at most"
            if most is not None and not _within(len(sample.tokens), most):
                yield f"{where}: {len(sample.tokens)} tokens, but configuration.max_tokens is {shown(most)}"
    arms = case.report.arms
    for i, arm in enumerate(arms):
        for other in arms[i + 1 :]:
            for ours, theirs in paired(arm, other):
                if ours.tokens == theirs.tokens and ours.text != theirs.text:
                    pair = f"{shown(arm.name)} and {shown(other.name)}"
                    yield f"{pair} have equal tokens but different texts for {shown(ours.prompt_id)}"
    yield from answers_differ(case.report)
    if case.report.parity is not None:
        yield from round_problems(case.report.parity)


def _within(count: int, most: object) -> bool:
    return isinstance(most, int | float) and count <= most


def _row_problems(arm: Arm, sample: Sample) -> Iterator[str]:
    if not sample.tokens:
        yield "no token was generated, but the prefill always gives one"
        return
    if token_digest(sample.tokens) != sample.tokens_sha256:
        yield "tokens_sha256 is not the digest of the tokens"
    if sample.needle is not None and sample.needle.hit != hit(sample):
        yield f"needle.hit is {sample.needle.hit}, but the text says {hit(sample)}"
    yield from answer_problems(sample)
    for turn in sample.rounds:
        if turn.accepted >= turn.block:
            yield f"a round of block {turn.block} accepted {turn.accepted} drafts"
            return
    if not sample.rounds:
        if arm.system.loop == OUR_LOOP and sample.decoded:
            yield f"{sample.decoded} tokens were decoded in no round"
        return
    confirmed = [turn.accepted + 1 for turn in sample.rounds]
    before_last = sum(confirmed[:-1])
    if not before_last < sample.decoded <= before_last + confirmed[-1]:
        yield (
            f"{sample.decoded} decoded tokens cannot come from rounds that confirmed "
            f"{before_last} + {confirmed[-1]}"
        )


def token_digest(tokens: tuple[int, ...]) -> str:
    """sha256 of the tokens as ASCII decimals joined by single spaces."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode("ascii")).hexdigest()


def order_mismatch(case: Case) -> Iterator[str]:
    """`order` and the rows do not name the same runs, each once: rows were added, dropped or repeated."""
    rows = Counter((arm.name, sample.prompt_id) for arm in case.report.arms for sample in arm.samples)
    runs = Counter(case.report.order)
    for what, counts in (("the rows hold", rows), ("`order` names", runs)):
        repeated = [f"{arm}/{prompt}" for (arm, prompt), count in counts.items() if count > 1]
        if repeated:
            yield f"{what} more than once: {several(repeated)}"
    dropped = [f"{arm}/{prompt}" for arm, prompt in runs if (arm, prompt) not in rows]
    if dropped:
        yield f"runs without a row: {several(dropped)}"
    added = [f"{arm}/{prompt}" for arm, prompt in rows if (arm, prompt) not in runs]
    if added:
        yield f"rows of runs that `order` does not name: {several(added)}"


def missing_stage_timings(case: Case) -> Iterator[str]:
    """A row lacks its prefill or decode time, or says that work took no time."""
    for arm in case.report.arms:
        for sample in arm.samples:
            where = f"{shown(arm.name)}/{shown(sample.prompt_id)}"
            if not sample.prefill_s:
                yield f"{where}: prefill_s is {sample.prefill_s}"
            if sample.decode_s is None or (sample.decode_s == 0 and sample.decoded):
                yield f"{where}: decode_s is {sample.decode_s} for {sample.decoded} decoded tokens"


def timings_impossible(case: Case) -> Iterator[str]:
    """The rounds of a row take longer than the row, the rows longer than the report, or a verify no time."""
    total = 0.0
    for arm in case.report.arms:
        for sample in arm.samples:
            where = f"{shown(arm.name)}/{shown(sample.prompt_id)}"
            total += (sample.prefill_s or 0.0) + (sample.decode_s or 0.0)
            rounds_s = sum(turn.draft_s + turn.verify_s for turn in sample.rounds)
            if sample.decode_s and rounds_s > sample.decode_s * ROUNDS_SLACK + ROUNDS_SLACK_S:
                yield f"{where}: rounds of {rounds_s:.4f} s inside a decode time of {sample.decode_s:.4f} s"
            if any(turn.verify_s == 0 or (turn.block > 1 and turn.draft_s == 0) for turn in sample.rounds):
                yield f"{where}: a forward has zero seconds"
    lasted = (case.report.finished_at - case.report.started_at).total_seconds()
    if total > max(lasted, 0.0) + REPORT_SLACK_S and lasted >= 0:
        yield f"the rows took {total:.3f} s, but the whole report {lasted:.3f} s"
    for arm, baseline in case.speed_pairs():
        yield from _verified_too_fast(arm, baseline)
        yield from _faster_than_a_step(arm, own_steps(case, arm))


def _verified_too_fast(arm: Arm, baseline: Arm) -> Iterator[str]:
    """Forwards that took a fraction of what a plain step of the same run takes."""
    steps = [seconds for sample in baseline.samples if (seconds := per_token(sample)) is not None]
    if not steps:
        return
    step = median(steps)
    than = f"where a plain step of {shown(baseline.name)} took {1e3 * step:.4f} ms"
    verified = [turn.verify_s for sample in arm.samples for turn in sample.rounds if turn.block >= 2]
    if verified and median(verified) < LEAST_VERIFY * step:
        yield f"{shown(arm.name)} verified blocks in {1e3 * median(verified):.4f} ms in the median, {than}"
    if verified and min(verified) < LEAST_VERIFY_ROUND * step:
        yield f"{shown(arm.name)} verified a block in {1e3 * min(verified):.4f} ms, {than}"
    alone = [turn.verify_s for sample in arm.samples for turn in sample.rounds if turn.block == 1]
    if len(alone) >= FEWEST_STEPS and sum(alone) < LEAST_STEP * step * len(alone):
        yield f"{shown(arm.name)} took {1e3 * sum(alone) / len(alone):.4f} ms a plain step, {than}"


def _faster_than_a_step(arm: Arm, own: Arm | None) -> Iterator[str]:
    """Blocks that took less than one token does in the same loop."""
    verified = [turn.verify_s for sample in arm.samples for turn in sample.rounds if turn.block >= 2]
    steps = [seconds for sample in own.samples if (seconds := per_token(sample)) is not None] if own else []
    if own is not None and verified and steps and median(verified) < LEAST_VERIFY_OWN * median(steps):
        yield (
            f"{shown(arm.name)} verified blocks in {1e3 * median(verified):.4f} ms in the median, where a "
            f"step of {shown(own.name)} took {1e3 * median(steps):.4f} ms"
        )


def summary_mismatch(case: Case) -> Iterator[str]:
    """A figure of the summary is not what the rows give."""
    stated, figures = case.report.summary, case.figures
    for name in sorted(stated.arms.keys() ^ figures.arms.keys()):
        yield f"summary.arms and the arms disagree about {shown(name)}"
    for name in figures.arms.keys() & stated.arms.keys():
        # A figure made of unmeasured bytes is MEMORY_ANALYTIC_AS_MEASURED.
        skip = set() if _all_measured(case.report.arm(name)) else {"max_resident_bytes"}
        yield from _differences(f"summary.arms.{shown(name)}", stated.arms[name], figures.arms[name], skip)
    expected = {(item.arm, item.baseline): item for item in figures.comparisons}
    found = {(item.arm, item.baseline): item for item in stated.comparisons}
    if len(found) != len(stated.comparisons) or found.keys() != expected.keys():
        yield f"summary.comparisons must compare {sorted(expected)}, not {several([str(k) for k in found])}"
    for key in expected.keys() & found.keys():
        yield from _differences(f"comparison {shown(key[0])}", found[key], expected[key], set())
    if stated.parity is not None and figures.parity is not None:
        yield from _differences("summary.parity", stated.parity, figures.parity, set())
    elif stated.parity is not figures.parity:
        yield "summary.parity does not belong to a comparison, or is missing"


def _all_measured(arm: Arm | None) -> bool:
    return arm is not None and all(sample.cache.measured for sample in arm.samples)


def _differences(where: str, stated: BaseModel, computed: BaseModel, skip: set[str]) -> Iterator[str]:
    for field in type(computed).model_fields:
        a, b = getattr(stated, field), getattr(computed, field)
        if field not in skip and not same_figure(a, b):
            yield f"{where}.{field} is {shown(a)}, but the rows give {shown(b)}"


def same_figure(stated: object, computed: object) -> bool:
    """Equal, or equal within 1e-9 where both are numbers."""
    if isinstance(stated, BaseModel) and type(stated) is type(computed):
        return all(
            same_figure(getattr(stated, name), getattr(computed, name)) for name in type(stated).model_fields
        )
    if isinstance(stated, tuple) and isinstance(computed, tuple):
        return len(stated) == len(computed) and all(map(same_figure, stated, computed))
    if isinstance(stated, int | float) and isinstance(computed, int | float):
        return math.isclose(stated, computed, rel_tol=RELATIVE)
    return stated == computed
