"""Paired runs: which of two sides is faster, computed from the runs; and the gate's rules for their record.

Runs come in blocks of four, workload, against, against, workload, so that a machine that gets slower or
faster at an even rate favours neither. A block gives one number, the mean log time of its workload's runs
less that of the other side's. Its 20 % trimmed mean over the blocks, which a few disturbed runs do not move,
is bounded by a symmetric bootstrap-t interval (R. Wilcox, Introduction to Robust Estimation and Hypothesis
Testing, 4.4; P. Hall, The Bootstrap and Edgeworth Expansion, 3.5).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import pairwise

from evidence_format.figures import Binding, faults, pair_samples
from evidence_format.model import Report
from evidence_format.paired import Outcome, Paired, PairedRun, PairedSummary, SideName
from evidence_format.text import shown

BLOCK: tuple[SideName, ...] = ("workload", "against", "against", "workload")
FEWEST_BLOCKS, MOST_BLOCKS = 10, 100
CONFIDENCE = 0.99
MARGIN = 0.05  # only a run that would have seen so small a difference may say that there is none
# Sampling ends when the smallest detectable effect is this small: less than MARGIN, because a look after
# every block tends to stop at one that has underestimated the noise.
PRECISE = 0.04
_TRIMMED = 0.2
_RESAMPLES = 2000
_MAX_LOG_EFFECT = 5.0  # as a log ratio; the interval would hold everything, or too much to write down
_CLOCK_SLACK_S = 2.0
_SUMMARY_SLACK = 1e-9


@dataclass(frozen=True)
class Estimate:
    """A log ratio, half the width of its interval, and the least that would have been found."""

    center: float
    half: float
    smallest: float

    @property
    def is_different(self) -> bool:
        """Whether the interval leaves out that there is no difference."""
        return abs(self.center) > self.half


def estimate(differences: Sequence[float], seed: str) -> Estimate:
    """The trimmed mean of log ratios with its interval; `seed` decides the resamples, so it can be repeated.

    `smallest` is infinite where the resamples cannot tell.
    """
    center, error = _trimmed(differences)
    draw = random.Random(seed)  # noqa: S311 - resamples, not secrets
    found = []
    for _ in range(_RESAMPLES):
        there, spread = _trimmed(draw.choices(differences, k=len(differences)))
        moved = abs(there - center)
        found.append(moved / spread if spread else math.inf if moved else 0.0)
    found.sort()
    # 99 % power is one-sided, so it is the 98 % quantile of the absolute value.
    reach, power = found[int(CONFIDENCE * _RESAMPLES)], found[int(0.98 * _RESAMPLES)]
    return Estimate(center, reach * error if error else 0.0, (reach + power) * error if error else 0.0)


def _trimmed(values: Sequence[float]) -> tuple[float, float]:
    """The trimmed mean, and its standard error from the winsorized variance."""
    ordered, count = sorted(values), len(values)
    cut = int(_TRIMMED * count)
    kept = ordered[cut : count - cut]
    winsorized = [kept[0]] * cut + kept + [kept[-1]] * cut
    mean = math.fsum(winsorized) / count
    variance = math.fsum((value - mean) ** 2 for value in winsorized) / (count - 1)
    return math.fsum(kept) / len(kept), math.sqrt(variance / count) / (1 - 2 * cut / count)


def judge_difference(differences: Sequence[float], seed: str) -> PairedSummary:
    """What some log ratios show; with fewer than `FEWEST_BLOCKS` it is inconclusive."""
    count = len(differences)
    summary = partial(PairedSummary, blocks=count, confidence=CONFIDENCE)
    unknown = partial(summary, interval=None, smallest_effect=None, verdict="inconclusive")
    if count < FEWEST_BLOCKS:
        return unknown(ratio=math.exp(_trimmed(differences)[0]) if count > 1 else None)
    found = estimate(differences, seed)
    ratio = math.exp(found.center)
    if found.smallest > _MAX_LOG_EFFECT:
        return unknown(ratio=ratio)
    smallest = math.expm1(found.smallest)
    verdict: Outcome = "no_difference" if smallest <= MARGIN else "inconclusive"
    if found.is_different:
        verdict = "slower" if found.center > 0 else "faster"
    interval = (math.exp(found.center - found.half), math.exp(found.center + found.half))
    # Runs that are all alike give 0, and a record takes no value below this.
    return summary(ratio=ratio, interval=interval, smallest_effect=max(smallest, 1e-9), verdict=verdict)


def block_ratios(runs: Sequence[PairedRun]) -> list[tuple[list[PairedRun], float]]:
    """The whole blocks of the runs that count, each with the log of its time ratio."""
    counted = [run for run in runs if not run.warm_up]
    size = len(BLOCK)
    blocks = [counted[first : first + size] for first in range(0, len(counted) - size + 1, size)]
    logs = [[math.log(run.value) for run in block] for block in blocks]
    return list(zip(blocks, [(a1 + a2 - b1 - b2) / 2 for a1, b1, b2, a2 in logs], strict=True))


def summarise(runs: Sequence[PairedRun], seed: str) -> PairedSummary:
    """What a record's `summary` must say; `seed` is the request's nonce."""
    return judge_difference([ratio for _, ratio in block_ratios(runs)], seed)


def compare_reports(report: Report, other: Report, seed: str) -> PairedSummary:
    """Compare two throughput reports of one machine, prompt by prompt; `blocks` counts the prompts.

    The machine was another one at the other time, so each side's step is taken in units of the plain step
    that its own report measured in turns with it. A ValueError: a report has no such arms.
    """
    own, others = _relative_steps(report), _relative_steps(other)
    shared = [prompt for prompt in own if prompt in others]
    return judge_difference([own[prompt] - others[prompt] for prompt in shared], seed)


def _relative_steps(report: Report) -> dict[tuple[str, str], float]:
    """The log of a step's time of the arm under test over the baseline's, by prompt."""
    tested, plain = report.with_role("sut"), report.with_role("baseline")
    if not tested or not plain:
        raise ValueError("it has no arm under test, or no baseline")
    return {
        (ours.prompt_id, ours.prompt_sha256): math.log(ours.step_s / theirs.step_s)
        for ours, theirs in pair_samples(tested[0], plain[0])
        if ours.step_s and theirs.step_s
    }


# Rules ----------------------------------------------------------------------------------------------------

Rule = Callable[[Paired, Binding | None], Iterator[str]]


def stale_report(record: Paired, binding: Binding | None) -> Iterator[str]:
    """A run lies outside the job's time, or begins before the one before it ended."""
    times = [(_moment(run), run.seconds) for run in record.runs]
    for number, ((begin, seconds), (following, _)) in enumerate(pairwise(times), 1):
        if (following - begin).total_seconds() < seconds - _CLOCK_SLACK_S:
            yield f"run {number + 1} began at {following}, before run {number} had ended"
    if binding is None or not times or not (binding.started_at and binding.finished_at):
        return
    last, seconds = times[-1]
    early = (binding.started_at - times[0][0]).total_seconds()
    late = (last - binding.finished_at).total_seconds() + seconds
    if max(early, late) > _CLOCK_SLACK_S:
        yield f"the runs are from {times[0][0]} to {last}, the job's time is another"


def wrong_request(record: Paired, binding: Binding | None) -> Iterator[str]:
    """Nonce, workload commit, preset digest or engine source are another request's."""
    if binding is None:
        return
    for field, stated in record.request:
        expected = getattr(binding, field)
        if expected not in (None, stated):
            yield f"request.{field} is {shown(stated)}, but this job's is {shown(expected)}"
    if record.workload.workload_sha != record.request.workload_sha:
        yield f"workload.workload_sha is {record.workload.workload_sha}, not the request's"


def paired_order(record: Paired, binding: Binding | None) -> Iterator[str]:  # noqa: ARG001
    """The runs are not a warm-up of each side and then whole blocks in the order A B B A."""
    sides = [run.side for run in record.runs]
    blocks, rest = divmod(len(sides) - 2, len(BLOCK))
    wanted = ["workload", "against", *BLOCK * blocks]
    warm = [run.warm_up for run in record.runs]
    yield from faults(
        (blocks < 1, f"{len(sides)} runs, which hold no whole block"),
        (blocks >= 1 and rest, f"{rest} runs are no whole block"),
        (blocks >= 1 and not rest and sides != wanted, "the sides do not take turns as A B B A"),
        (warm != [at < 2 for at in range(len(warm))], "the first run of each side warms up"),
    )


def paired_run(record: Paired, binding: Binding | None) -> Iterator[str]:  # noqa: ARG001
    """A run failed, or its value cannot be that of the metric."""
    for number, run in enumerate(record.runs, 1):
        of_report = record.metric == "decode_s_per_token"
        yield from faults(
            (run.exit_code != 0, f"run {number} ended with exit code {run.exit_code}"),
            (not of_report and run.value != run.seconds, f"run {number}: the value is not its seconds"),
            (of_report and run.report_sha256 is None, f"run {number} names no report"),
            (of_report and run.value > run.seconds, f"run {number} took {run.seconds} s for many tokens"),
        )


def summary_mismatch(record: Paired, binding: Binding | None) -> Iterator[str]:  # noqa: ARG001
    """The summary is not what the runs give."""
    computed = summarise(record.runs, record.request.nonce)
    for field, stated in record.summary:
        found = getattr(computed, field)
        if not _equal(stated, found):
            yield f"summary.{field} is {shown(stated)}, the runs give {shown(found)}"


RULES: dict[str, Rule] = {
    each.__name__.upper(): each
    for each in (stale_report, wrong_request, paired_order, paired_run, summary_mismatch)
}


def _moment(run: PairedRun) -> datetime:
    return datetime.fromisoformat(run.started_at)


def _equal(stated: object, found: object) -> bool:
    if isinstance(stated, tuple) and isinstance(found, tuple):
        return all(map(_equal, stated, found))
    if isinstance(stated, float) and isinstance(found, float):
        return math.isclose(stated, found, rel_tol=_SUMMARY_SLACK)  # math libraries round differently
    return stated == found
