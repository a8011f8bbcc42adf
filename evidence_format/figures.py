"""The figures of a report, computed from its rows alone (see docs/evidence.md), and the rules' `Case`.

A rate without seconds is null. A missing time counts as zero seconds here: MISSING_STAGE_TIMINGS rejects it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import NormalDist, fmean, median, stdev
from typing import Any

from evidence_format import model
from evidence_format.claims import FEWEST_CHUNKS, SPEED_CLAIMS
from evidence_format.model import Arm, Report, Sample, quotient
from evidence_format.text import degeneration, shown

FIRST_BLOCKS = 8
CONFIDENCE = 0.95  # of an interval of perplexity


def faults(*found: tuple[object, str]) -> Iterator[str]:
    """The messages whose condition holds."""
    return (message for condition, message in found if condition)


@dataclass(frozen=True)
class Binding:
    """What a report must belong to; None is not checked. The times are those of the job's command (aware)."""

    nonce: str
    workload_sha: str | None = None
    preset_digest: str | None = None
    engine_source: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None


class Case:
    """One report before the rules. `figures` is recomputed from the rows, never read from the report."""

    def __init__(self, report: Report, binding: Binding | None = None) -> None:
        one_graph = report.configuration.get("single_graph") is True
        self.report, self.binding = report, binding
        self.figures = summarise(
            report.arms, report.parity, report.perplexity, one_graph=one_graph, cut=report.cuts_loops
        )
        self.kind, self.configuration, self.claims = report.kind, report.configuration, report.claims
        self.tested, self.baselines = report.with_role("sut"), report.with_role("baseline")
        self.references = self.baselines + report.with_role("oracle")  # what others are compared with
        models = report.environment.models
        self.target, self.drafter = models.get("target"), models.get("drafter")
        # Every row with its arm and a text that names both.
        self.rows = [
            (arm, s, f"{arm.label}/{shown(s.prompt_id)}") for arm in report.arms for s in arm.samples
        ]
        # Each (arm, baseline) whose speed is claimed, once, as far as both exist; and their arms.
        pairs = [(arm, self.other_of(claim)) for claim, arm in self.claims_of(*SPEED_CLAIMS)]
        unique = {(arm.name, other.name): (arm, other) for arm, other in pairs if other}
        self.speed_pairs = list(unique.values())
        self.speed_arms = list({arm.name: arm for pair in self.speed_pairs for arm in pair}.values())

    def compare(self, arm: Arm, other: Arm) -> model.Comparison:
        """The figures of one arm relative to another, loops cut where the report says so."""
        return compare(arm, other, cut=self.report.cuts_loops)

    def timed(self, arm: Arm) -> Arm:
        """The part of an arm that counts for its speed and acceptance."""
        return arm.before_loops if self.report.cuts_loops else arm

    def claims_of(self, *names: str) -> Iterator[tuple[model.ReportClaim, Arm]]:
        """The claims of these names about an arm that is there, and the arm."""
        for claim in self.claims:
            if claim.name in names and (arm := self.arm_of(claim)) is not None:
                yield claim, arm

    def claimed(self, arm: Arm) -> frozenset[str]:
        """The names of the claims about an arm."""
        return frozenset(claim.name for claim in self.claims if self.arm_of(claim) is arm)

    def arm_of(self, claim: model.ReportClaim) -> Arm | None:
        """The arm a claim is about: the one it names, else the only system under test."""
        return self._one(claim.arm, "sut")

    def other_of(self, claim: model.ReportClaim, role: str = "baseline") -> Arm | None:
        """The arm a claim compares with: the one it names, else the only one of the role."""
        return self._one(claim.baseline, role)

    def _one(self, name: str | None, role: str) -> Arm | None:
        arms = self.report.with_role(role)
        return self.report.arm(name) if name is not None else arms[0] if len(arms) == 1 else None


def summarise(
    arms: Sequence[Arm],
    parity: model.ParityComparison | None = None,
    perplexity: model.PerplexityComparison | None = None,
    *,
    one_graph: bool = False,
    cut: bool = False,
) -> model.Summary:
    """What `summary` must say: each arm; those under test against the baseline, or else the oracle."""
    tested = [arm for arm in arms if arm.role == "sut"]
    references = [arm for arm in arms if arm.role == "baseline"] or [a for a in arms if a.role == "oracle"]
    blocks: dict[str, Any] = {} if parity is None else {"parity": _summarise_parity(parity)}
    if perplexity is not None:
        blocks["perplexity"] = _summarise_perplexity(perplexity)
    return model.Summary(
        arms={arm.name: _summarise_arm(arm, one_graph, cut) for arm in arms},
        comparisons=tuple(compare(arm, other, cut=cut) for arm in tested for other in references),
        **blocks,
    )


def _summarise_arm(arm: Arm, one_graph: bool, cut: bool) -> model.ArmSummary:
    timed, samples = arm.before_loops if cut else arm, arm.samples
    decode_rate, end_to_end_rate = _rates(timed.samples)
    accepted = [turn.accepted for turn in timed.rounds if turn.block >= 2]
    kept = [sample.kv for sample in samples if sample.kv is not None]
    tasks = [sample.task for sample in samples if sample.task is not None]
    optional: dict[str, Any] = {"block_s": _block_times(arm) if arm.rounds else None} if one_graph else {}
    if tasks:
        optional["pass_at_1"] = _mean([task.solved for task in tasks])
        optional["compiled"] = _mean([task.compiles for task in tasks])
    return model.ArmSummary(
        samples=len(samples),
        generated_tokens=sum(len(sample.tokens) for sample in samples),
        decoded_tokens=sum(sample.decoded for sample in samples),
        median_decoded_tokens=median([sample.decoded for sample in timed.samples] or [0]),
        decode_tokens_per_s=decode_rate,
        end_to_end_tokens_per_s=end_to_end_rate,
        verify_rounds=len(accepted),
        acceptance_length=quotient(sum(accepted) + len(accepted), len(accepted)),
        recall=recall(arm),
        max_resident_bytes=max((sample.cache.resident_bytes for sample in samples), default=None),
        stored_bits_per_value=quotient(8 * sum(kv.bytes for kv in kept), sum(kv.values for kv in kept)),
        key_distortion=_mean([kv.key_distortion for kv in kept]),
        value_distortion=_mean([kv.value_distortion for kv in kept]),
        runaway_samples=sum(degeneration(sample.tokens) is not None for sample in samples),
        **optional,
    )


def _block_times(arm: Arm) -> model.BlockTimes:
    seconds = [turn.draft_s + turn.verify_s for turn in arm.rounds]
    return model.BlockTimes(
        first=tuple(seconds[:FIRST_BLOCKS]), max=max(seconds), mean=sum(seconds) / len(seconds)
    )


def compare(arm: Arm, baseline: Arm, *, cut: bool = False) -> model.Comparison:
    """The figures of `arm` relative to `baseline` over the prompts both ran; `cut`: speeds before loops."""
    pairs = pair_samples(arm, baseline)
    timed = [(ours.before_loop, plain.before_loop) for ours, plain in pairs] if cut else pairs
    ours, theirs = [sample for sample, _ in timed], [sample for _, sample in timed]
    ratios = [quotient(plain.step_s, sample.step_s) for sample, plain in timed]
    known = [ratio for ratio in ratios if ratio is not None]
    (decode, end_to_end), (plain_decode, plain_end_to_end) = _rates(ours), _rates(theirs)
    return model.Comparison(
        arm=arm.name,
        baseline=baseline.name,
        decode_ratio=quotient(decode, plain_decode),
        median_decode_ratio=median(known) if known else None,
        end_to_end_ratio=quotient(end_to_end, plain_end_to_end),
        identical_samples=sum(sample.tokens == plain.tokens for sample, plain in pairs),
        compared_samples=len(pairs),
    )


def pair_samples(arm: Arm, other: Arm) -> list[tuple[Sample, Sample]]:
    """The samples of the prompts both arms ran, in the order of `arm`."""
    by_prompt = {sample.prompt_id: sample for sample in other.samples}
    return [(sample, by_prompt[sample.prompt_id]) for sample in arm.samples if sample.prompt_id in by_prompt]


def hit(sample: Sample) -> bool:
    """Whether the sample's answer occurs in what it answered; an empty answer is never a hit."""
    # It must occur in the whole text, too: what is left when reasoning is cut out may not join to an answer.
    answer = sample.needle.answer if sample.needle is not None else ""
    return answer != "" and answer in sample.answer and answer in sample.text


def recall(arm: Arm) -> float | None:
    """Share of the samples with a needle whose answer came back, or None when there is none."""
    hits = [hit(sample) for sample in arm.samples if sample.needle is not None]
    return quotient(sum(hits), len(hits))


def parity_difference(parity: model.ParityComparison | None) -> float | None:
    """The largest difference of a hidden state or a logit, or None where one is not finite."""
    if parity is None:
        return None
    found = [turn.logits_max_abs for turn in parity.rounds]
    if parity.compares_hidden:
        found += [turn.hidden_max_abs for turn in parity.rounds if turn.tokens_equal is None] or [None]
    return _largest(found)


def _summarise_parity(parity: model.ParityComparison) -> model.ParitySummary:
    turns = parity.rounds
    rows, paths = sum(turn.rows for turn in turns), [turn.path_equal for turn in turns]
    return model.ParitySummary(
        cases=len({turn.case for turn in turns}),
        rounds=len(turns),
        rows=rows,
        hidden_max_abs=_largest([turn.hidden_max_abs for turn in turns]),
        logits_max_abs=_largest([turn.logits_max_abs for turn in turns]),
        argmax_agreement=quotient(sum(turn.argmax_agreement * turn.rows for turn in turns), rows),
        paths_equal=paths.count(True),
        paths_compared=len(paths) - paths.count(None),
    )


def _summarise_perplexity(found: model.PerplexityComparison) -> model.PerplexitySummary:
    chunks = found.chunks
    native, policy = _mean([each.native_nll for each in chunks]), _mean([each.policy_nll for each in chunks])
    increases = [each.policy_nll - each.native_nll for each in chunks]
    kept = [each.kv for each in chunks if each.kv is not None]
    return model.PerplexitySummary(
        chunks=len(chunks),
        tokens=sum(each.tokens for each in chunks),
        native_nll=native,
        policy_nll=policy,
        native_perplexity=None if native is None else math.exp(native),
        policy_perplexity=None if policy is None else math.exp(policy),
        nll_increase=_mean(increases),
        nll_interval=mean_interval(increases) if len(chunks) >= FEWEST_CHUNKS else None,
        stored_bits_per_value=quotient(8 * sum(kv.bytes for kv in kept), sum(kv.values for kv in kept)),
        native_bytes=max((each.native_bytes for each in chunks), default=None),
        policy_bytes=max((each.policy_bytes for each in chunks), default=None),
    )


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval of a mean by Student's t with n - 1 degrees of freedom, of 8 values or more.

    The quantile comes from the normal one by the series of Fisher and Cornish, exact to 1e-4 from 7 on.
    """
    z, degrees = NormalDist().inv_cdf((1 + CONFIDENCE) / 2), len(values) - 1
    t = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    middle, half = fmean(values), t * stdev(values) / math.sqrt(len(values))
    return middle - half, middle + half


def _largest(figures: Sequence[float | None]) -> float | None:
    """The largest figure, or None where there is none or one is missing."""
    known = [figure for figure in figures if figure is not None]
    return max(known) if known and len(known) == len(figures) else None


def _rates(samples: Sequence[Sample]) -> tuple[float | None, float | None]:
    """Tokens per second after the first token; and of all tokens, the prefill included."""
    decoding = quotient(sum(sample.decoded for sample in samples), sum(s.decode_s or 0.0 for s in samples))
    return decoding, quotient(sum(len(s.tokens) for s in samples), sum(s.seconds for s in samples))


def _mean(figures: Sequence[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return quotient(sum(known), len(known))
