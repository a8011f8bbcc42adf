"""The figures of a report, computed from its rows alone (see docs/evidence.md), and the rules' `Case`.

A rate without seconds is null. A missing time counts as zero seconds here: MISSING_STAGE_TIMINGS rejects it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median

from bridge.evidence.model import (
    Arm,
    ArmSummary,
    BlockTimes,
    Comparison,
    Model,
    Parity,
    ParitySummary,
    Report,
    ReportClaim,
    Sample,
    Summary,
    quotient,
)
from bridge.evidence.text import degeneration, shown

FIRST_BLOCKS = 8
SPEED_CLAIMS = frozenset({"speedup", "no_slowdown"})


@dataclass(frozen=True)
class Binding:
    """What a report must belong to; None is not checked. The times are those of the job's command (aware)."""

    nonce: str
    workload_sha: str | None = None
    preset_digest: str | None = None
    engine_source: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None


@dataclass(frozen=True)
class Case:
    """One report before the rules. `figures` is recomputed from the rows, never read from the report."""

    report: Report
    binding: Binding | None
    figures: Summary

    @property
    def tested(self) -> tuple[Arm, ...]:
        """The arms under test."""
        return self.report.with_role("sut")

    @property
    def baselines(self) -> tuple[Arm, ...]:
        """The arms that others are compared with for speed and sameness."""
        return self.report.with_role("baseline")

    @property
    def references(self) -> tuple[Arm, ...]:
        """The arms that others are compared with."""
        return self.baselines + self.report.with_role("oracle")

    @property
    def target(self) -> Model | None:
        """The model whose tokens these are."""
        return self.report.environment.models.get("target")

    @property
    def drafter(self) -> Model | None:
        """The drafter that has weights."""
        return self.report.environment.models.get("drafter")

    def rows(self) -> Iterator[tuple[Arm, Sample, str]]:
        """Every row with its arm and a text that names both."""
        for arm in self.report.arms:
            for sample in arm.samples:
                yield arm, sample, f"{arm.label}/{shown(sample.prompt_id)}"

    def claims(self, *names: str) -> Iterator[tuple[ReportClaim, Arm]]:
        """The claims of these names about an arm that is there, and the arm."""
        for claim in self.report.claims:
            if claim.name in names and (arm := self.arm_of(claim)) is not None:
                yield claim, arm

    def claimed(self, arm: Arm) -> frozenset[str]:
        """The names of the claims about an arm."""
        return frozenset(claim.name for claim in self.report.claims if self.arm_of(claim) is arm)

    def arm_of(self, claim: ReportClaim) -> Arm | None:
        """The arm a claim is about: the one it names, else the only system under test."""
        return self._one(claim.arm, "sut")

    def other_of(self, claim: ReportClaim, role: str = "baseline") -> Arm | None:
        """The arm a claim compares with: the one it names, else the only one of the role."""
        return self._one(claim.baseline, role)

    def speed_pairs(self) -> list[tuple[Arm, Arm]]:
        """Each (arm, baseline) whose speed is claimed, once, as far as both exist."""
        pairs = [(arm, self.other_of(claim)) for claim, arm in self.claims(*SPEED_CLAIMS)]
        return list({(arm.name, other.name): (arm, other) for arm, other in pairs if other}.values())

    def speed_arms(self) -> list[Arm]:
        """Each arm that takes part in a speed claim, once."""
        return list({arm.name: arm for pair in self.speed_pairs() for arm in pair}.values())

    def _one(self, name: str | None, role: str) -> Arm | None:
        arms = self.report.with_role(role)
        return self.report.arm(name) if name is not None else arms[0] if len(arms) == 1 else None


def summarise(report: Report) -> Summary:
    """What `report.summary` must say: every arm, and each system under test against the reference.

    The reference is the baseline, or where a report has none, the oracle.
    """
    one_graph = report.configuration.get("single_graph") is True
    references = report.with_role("baseline") or report.with_role("oracle")
    return Summary(
        arms={arm.name: summarise_arm(arm, one_graph=one_graph) for arm in report.arms},
        comparisons=tuple(compare(arm, other) for arm in report.with_role("sut") for other in references),
        **({} if report.parity is None else {"parity": summarise_parity(report.parity)}),
    )


def summarise_arm(arm: Arm, *, one_graph: bool = False) -> ArmSummary:
    """The figures of one arm; with ``one_graph`` the times of its blocks, too."""
    samples = arm.samples
    accepted = [turn.accepted for turn in arm.rounds if turn.block >= 2]
    blocks = [turn.draft_s + turn.verify_s for turn in arm.rounds] if one_graph else []
    kept = [sample.kv for sample in samples if sample.kv is not None]
    return ArmSummary(
        samples=len(samples),
        generated_tokens=sum(len(sample.tokens) for sample in samples),
        decoded_tokens=sum(sample.decoded for sample in samples),
        median_decoded_tokens=median([sample.decoded for sample in samples] or [0]),
        decode_tokens_per_s=decode_rate(samples),
        end_to_end_tokens_per_s=end_to_end_rate(samples),
        verify_rounds=len(accepted),
        acceptance_length=quotient(sum(accepted) + len(accepted), len(accepted)),
        recall=recall(arm),
        max_resident_bytes=max((sample.cache.resident_bytes for sample in samples), default=None),
        stored_bits_per_value=quotient(8 * sum(kv.bytes for kv in kept), sum(kv.values for kv in kept)),
        key_distortion=_mean([kv.key_distortion for kv in kept]),
        value_distortion=_mean([kv.value_distortion for kv in kept]),
        runaway_samples=sum(degeneration(sample.tokens) is not None for sample in samples),
        block_s=_block_times(blocks) if blocks else None,
    )


def _block_times(seconds: list[float]) -> BlockTimes:
    return BlockTimes(first=tuple(seconds[:FIRST_BLOCKS]), max=max(seconds), mean=sum(seconds) / len(seconds))


def compare(arm: Arm, baseline: Arm) -> Comparison:
    """The figures of `arm` relative to `baseline` over the prompts both ran."""
    pairs = paired(arm, baseline)
    ours, theirs = [sample for sample, _ in pairs], [sample for _, sample in pairs]
    ratios = [quotient(plain.step_s, sample.step_s) for sample, plain in pairs]
    known = [ratio for ratio in ratios if ratio is not None]
    return Comparison(
        arm=arm.name,
        baseline=baseline.name,
        decode_ratio=quotient(decode_rate(ours), decode_rate(theirs)),
        median_decode_ratio=median(known) if known else None,
        end_to_end_ratio=quotient(end_to_end_rate(ours), end_to_end_rate(theirs)),
        identical_samples=sum(sample.tokens == plain.tokens for sample, plain in pairs),
        compared_samples=len(pairs),
    )


def paired(arm: Arm, other: Arm) -> list[tuple[Sample, Sample]]:
    """The samples of the prompts both arms ran, in the order of `arm`."""
    by_prompt = {sample.prompt_id: sample for sample in other.samples}
    return [(sample, by_prompt[sample.prompt_id]) for sample in arm.samples if sample.prompt_id in by_prompt]


def hit(sample: Sample) -> bool:
    """Whether the sample's answer occurs in what it answered; an empty answer is never a hit.

    It must occur in the whole text, too: what is left when reasoning is cut out may not join to an answer.
    """
    answer = sample.needle.answer if sample.needle is not None else ""
    return answer != "" and answer in sample.answer and answer in sample.text


def recall(arm: Arm) -> float | None:
    """Share of the samples with a needle whose answer came back, or None when there is none."""
    hits = [hit(sample) for sample in arm.samples if sample.needle is not None]
    return quotient(sum(hits), len(hits))


def parity_difference(parity: Parity | None) -> float | None:
    """The largest difference of a hidden state or a logit, or None where one is not finite."""
    if parity is None:
        return None
    found = [turn.logits_max_abs for turn in parity.rounds]
    if parity.compares_hidden:
        found += [turn.hidden_max_abs for turn in parity.rounds if turn.tokens_equal is None] or [None]
    return _largest(found)


def summarise_parity(parity: Parity) -> ParitySummary:
    """The figures of a comparison with a reference."""
    turns = parity.rounds
    rows = sum(turn.rows for turn in turns)
    paths = [turn.path_equal for turn in turns if turn.path_equal is not None]
    return ParitySummary(
        cases=len({turn.case for turn in turns}),
        rounds=len(turns),
        rows=rows,
        hidden_max_abs=_largest([turn.hidden_max_abs for turn in turns]),
        logits_max_abs=_largest([turn.logits_max_abs for turn in turns]),
        argmax_agreement=quotient(sum(turn.argmax_agreement * turn.rows for turn in turns), rows),
        paths_equal=sum(paths),
        paths_compared=len(paths),
    )


def _largest(figures: Sequence[float | None]) -> float | None:
    """The largest figure, or None where there is none or one is missing."""
    known = [figure for figure in figures if figure is not None]
    return max(known) if known and len(known) == len(figures) else None


def decode_rate(samples: Sequence[Sample]) -> float | None:
    """Tokens per second after the first token."""
    return quotient(sum(sample.decoded for sample in samples), sum(s.decode_s or 0.0 for s in samples))


def end_to_end_rate(samples: Sequence[Sample]) -> float | None:
    """Tokens per second, the prefill included."""
    return quotient(sum(len(sample.tokens) for sample in samples), sum(s.seconds for s in samples))


def _mean(figures: Sequence[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return quotient(sum(known), len(known))
