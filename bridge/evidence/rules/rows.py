"""Do the rows agree with themselves, with the order they ran in, and with the summary?"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations
from statistics import median

from pydantic import BaseModel

from bridge.evidence.figures import Case, hit, paired
from bridge.evidence.model import Arm, Parity, Report, Sample
from bridge.evidence.rules.output import prompt_set
from bridge.evidence.rules.speed import own_steps
from bridge.evidence.text import opened_variants, several, shown, without_reasoning

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
    """A row contradicts itself (token digest, rounds that cannot give its tokens, hit, text, an answer that
    is not the text without its reasoning), holds more tokens than configuration.max_tokens or tokens
    outside the target's vocabulary, decoded tokens without a forward, or ran a block longer than the
    drafter takes.
    """
    report, models = case.report, case.report.environment.models
    most = report.configuration.get("max_tokens")
    known = models["target"].vocab_size if "target" in models else None
    longest = models["drafter"].largest_block if "drafter" in models else None
    for arm, sample, where in case.rows():
        yield from (f"{where}: {problem}" for problem in _row_problems(arm, sample))
        if known is not None and max(sample.tokens, default=0) >= known:
            yield f"{where}: token {max(sample.tokens)} is outside the vocabulary of {known}"
        block = max((turn.block for turn in sample.rounds), default=0)
        if longest is not None and arm.system.drafter is not None and block > longest:
            yield f"{where}: a block of {block}, but the drafter takes {longest} at most"
        if most is not None and not (isinstance(most, int | float) and len(sample.tokens) <= most):
            yield f"{where}: {len(sample.tokens)} tokens, but configuration.max_tokens is {shown(most)}"
    for arm, other in combinations(report.arms, 2):
        for ours, theirs in paired(arm, other):
            if ours.tokens == theirs.tokens and ours.text != theirs.text:
                pair = f"{arm.label} and {other.label}"
                yield f"{pair} have equal tokens but different texts for {shown(ours.prompt_id)}"
    yield from _answers_differ(report)
    if report.parity is not None:
        yield from _parity_problems(report.parity)


def _row_problems(arm: Arm, sample: Sample) -> Iterator[str]:
    if not sample.tokens:
        yield "no token was generated, but the prefill always gives one"
        return
    if token_digest(sample.tokens) != sample.tokens_sha256:
        yield "tokens_sha256 is not the digest of the tokens"
    if sample.needle is not None and sample.needle.hit != hit(sample):
        yield f"needle.hit is {sample.needle.hit}, but the text says {hit(sample)}"
    if (problem := _answer_problem(sample)) is not None:
        yield problem
    for turn in sample.rounds:
        if turn.accepted >= turn.block:
            yield f"a round of block {turn.block} accepted {turn.accepted} drafts"
            return
    if not sample.rounds:
        if arm.system.loop == OUR_LOOP and sample.decoded:
            yield f"{sample.decoded} tokens were decoded in no round"
        return
    confirmed = sum(turn.accepted + 1 for turn in sample.rounds)
    last = sample.rounds[-1].accepted + 1
    if not confirmed - last < sample.decoded <= confirmed:
        yield f"{sample.decoded} tokens cannot come from rounds that confirmed {confirmed - last} + {last}"


def token_digest(tokens: tuple[int, ...]) -> str:
    """sha256 of the tokens as ASCII decimals joined by single spaces."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode("ascii")).hexdigest()


def _answer_problem(sample: Sample) -> str | None:
    """An answer_text that the text does not leave, or one that is missing where a needle is sought."""
    if sample.answer_text is None:
        hidden = sample.needle is not None and without_reasoning(sample.text) != sample.text
        return "the text holds reasoning, but no answer_text says what it leaves" if hidden else None
    if sample.answer_text == sample.text:
        return "answer_text is the text itself"
    if sample.answer_text not in {without_reasoning(sample.text), *opened_variants(sample.text)}:
        return "answer_text is not what the text leaves without its reasoning"
    return None


def _answers_differ(report: Report) -> Iterator[str]:
    """Rows of one set of prompts: the chat template opens reasoning for all of them or for none.

    Were it open to choose, an answer could be called reasoning to make a reference look deaf.
    """
    opened: dict[str, set[bool]] = defaultdict(set)
    for arm in report.arms:
        for sample in arm.samples:
            if sample.needle is None:
                continue
            inside = sample.answer in opened_variants(sample.text)
            if not inside or sample.answer != without_reasoning(sample.text):  # else it makes no difference
                opened[prompt_set(sample.prompt_id)].add(inside)
    if mixed := [name for name, found in opened.items() if len(found) > 1]:
        yield f"some rows start inside reasoning and some do not in the sets {several(mixed)}"


def _parity_problems(parity: Parity) -> Iterator[str]:
    """Rounds that contradict themselves or are not those of a case, one after the other from the first."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for turn in parity.rounds:
        numbers[turn.case].append(turn.round)
        same = turn.argmax_agreement * turn.rows
        if abs(same - round(same)) > 1e-4:
            share = f"{turn.argmax_agreement:.6g} of {turn.rows} rows"
            yield f"{shown(turn.case)} round {turn.round}: argmax_agreement of {share} is no count"
    if odd := [case for case, found in numbers.items() if found != list(range(1, len(found) + 1))]:
        yield f"the rounds are not numbered from 1 on in {several(odd)}"


def order_mismatch(case: Case) -> Iterator[str]:
    """`order` and the rows do not name the same runs, each once."""
    rows = Counter((arm.name, sample.prompt_id) for arm, sample, _ in case.rows())
    runs = Counter(case.report.order)
    for what, runs_found in (
        ("the rows repeat", [run for run, count in rows.items() if count > 1]),
        ("`order` repeats", [run for run, count in runs.items() if count > 1]),
        ("the rows lack what `order` names:", [run for run in runs if run not in rows]),
        ("`order` lacks what the rows hold:", [run for run in rows if run not in runs]),
    ):
        if runs_found:
            yield f"{what} {several([f'{arm}/{prompt}' for arm, prompt in runs_found])}"


def missing_stage_timings(case: Case) -> Iterator[str]:
    """A row lacks its prefill or decode time."""
    for _, sample, where in case.rows():
        if not sample.prefill_s:
            yield f"{where}: prefill_s is {sample.prefill_s}"
        if sample.decode_s is None or (sample.decode_s == 0 and sample.decoded):
            yield f"{where}: decode_s is {sample.decode_s} for {sample.decoded} decoded tokens"


def timings_impossible(case: Case) -> Iterator[str]:
    """Rounds take longer than their row, rows longer than the report, or a forward no time; or, where a speed
    is claimed, verifications less than half of a plain step in the median, a single one less than a quarter,
    plain steps within the loop less than two fifths on average, or verifications less than nine tenths of a
    step of the same loop at block 1.
    """
    total = 0.0
    for _, sample, where in case.rows():
        total += (sample.prefill_s or 0.0) + (sample.decode_s or 0.0)
        rounds_s = sum(turn.draft_s + turn.verify_s for turn in sample.rounds)
        if sample.decode_s and rounds_s > sample.decode_s * ROUNDS_SLACK + ROUNDS_SLACK_S:
            yield f"{where}: rounds of {rounds_s:.4f} s inside a decode time of {sample.decode_s:.4f} s"
        if any(turn.verify_s == 0 or (turn.block > 1 and turn.draft_s == 0) for turn in sample.rounds):
            yield f"{where}: a forward has zero seconds"
    lasted = (case.report.finished_at - case.report.started_at).total_seconds()
    if total > lasted + REPORT_SLACK_S and lasted >= 0:
        yield f"the rows took {total:.3f} s, but the whole report {lasted:.3f} s"
    for arm, baseline in case.speed_pairs():
        yield from (f"{arm.label} {problem}" for problem in _too_fast(arm, baseline, own_steps(case, arm)))


def _too_fast(arm: Arm, baseline: Arm, own: Arm | None) -> Iterator[str]:
    """Forwards that took a fraction of what a step takes, plain or of the same loop at block 1."""
    verified = [turn.verify_s for turn in arm.rounds if turn.block >= 2]
    alone = [turn.verify_s for turn in arm.rounds if turn.block == 1]
    middle = median(verified) if verified else math.inf
    if steps := baseline.steps_s:
        step = median(steps)
        than = f"where a plain step of {baseline.label} took {_ms(step)}"
        if middle < LEAST_VERIFY * step:
            yield f"verified blocks in {_ms(middle)} in the median, {than}"
        if min(verified, default=math.inf) < LEAST_VERIFY_ROUND * step:
            yield f"verified a block in {_ms(min(verified))}, {than}"
        if len(alone) >= FEWEST_STEPS and sum(alone) < LEAST_STEP * step * len(alone):
            yield f"took {_ms(sum(alone) / len(alone))} a plain step, {than}"
    if own is not None and own.steps_s and middle < LEAST_VERIFY_OWN * median(own.steps_s):
        than = f"where a step of {own.label} took {_ms(median(own.steps_s))}"
        yield f"verified blocks in {_ms(middle)} in the median, {than}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4f} ms"


def summary_mismatch(case: Case) -> Iterator[str]:
    """A summary figure is not what its rows give (relative 1e-9)."""
    stated, figures = case.report.summary, case.figures
    for name in sorted(stated.arms.keys() ^ figures.arms.keys()):
        yield f"summary.arms and the arms disagree about {shown(name)}"
    for name in figures.arms.keys() & stated.arms.keys():
        arm = case.report.arm(name)
        measured = arm is not None and all(sample.cache.measured for sample in arm.samples)
        # A figure made of unmeasured bytes is MEMORY_ANALYTIC_AS_MEASURED.
        skip = "" if measured else "max_resident_bytes"
        yield from _differences(f"summary.arms.{shown(name)}", stated.arms[name], figures.arms[name], skip)
    expected = {(item.arm, item.baseline): item for item in figures.comparisons}
    found = {(item.arm, item.baseline): item for item in stated.comparisons}
    if len(found) != len(stated.comparisons) or found.keys() != expected.keys():
        yield f"summary.comparisons must compare {sorted(expected)}, not {several([str(k) for k in found])}"
    for key in expected.keys() & found.keys():
        yield from _differences(f"comparison {shown(key[0])}", found[key], expected[key])
    if stated.parity is not None and figures.parity is not None:
        yield from _differences("summary.parity", stated.parity, figures.parity)
    elif stated.parity is not figures.parity:
        yield "summary.parity does not belong to a comparison, or is missing"


def _differences(where: str, stated: BaseModel, computed: BaseModel, skip: str = "") -> Iterator[str]:
    for field in type(computed).model_fields:
        a, b = getattr(stated, field), getattr(computed, field)
        if field != skip and not same_figure(a, b):
            yield f"{where}.{field} is {shown(a)}, but the rows give {shown(b)}"


def same_figure(stated: object, computed: object) -> bool:
    """Equal, or equal within 1e-9 where both are numbers."""
    if isinstance(stated, BaseModel) and isinstance(computed, BaseModel):
        return same_figure(tuple(dict(stated).values()), tuple(dict(computed).values()))
    if isinstance(stated, tuple) and isinstance(computed, tuple):
        return len(stated) == len(computed) and all(map(same_figure, stated, computed))
    if isinstance(stated, int | float) and isinstance(computed, int | float):
        return math.isclose(stated, computed, rel_tol=RELATIVE)
    return stated == computed
