"""The figures of a report, computed from its rows alone. Pure arithmetic; what they may claim is elsewhere.

Definitions, for an arm's samples with n_i generated tokens: decoded_i = n_i - 1 (the prefill gives the
first), decode rate = sum decoded_i / sum decode_s_i, end-to-end rate = sum n_i / sum (prefill_s_i +
decode_s_i), acceptance length = mean of (accepted + 1) over the rounds of at least two tokens. A rate without
seconds is null. A missing time counts as zero seconds here: MISSING_STAGE_TIMINGS rejects such a row.
Stored bits per value = 8 sum bytes_i / sum values_i over the rows that carry `kv`; distortions are means over
the rows that have them. A sample runs away by the definition of `bridge.evidence.runaway`. The seconds of a
block are those of its draft and its verification; they are summarised where one graph holds both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from bridge.evidence.report import (
    Arm,
    ArmSummary,
    BlockTimes,
    Comparison,
    Parity,
    ParitySummary,
    Report,
    Sample,
    Summary,
)
from bridge.evidence.runaway import degeneration

FIRST_BLOCKS = 8


def summarise(report: Report) -> Summary:
    """What `report.summary` must say: every arm, and each system under test against the reference.

    The reference is the baseline, or where a report has none, the oracle.
    """
    one_graph = report.configuration.get("single_graph") is True
    return Summary(
        arms={arm.name: summarise_arm(arm, one_graph=one_graph) for arm in report.arms},
        comparisons=tuple(
            compare(arm, reference)
            for arm in report.with_role("sut")
            for reference in report.with_role("baseline") or report.with_role("oracle")
        ),
        parity=None if report.parity is None else summarise_parity(report.parity),
    )


def summarise_arm(arm: Arm, *, one_graph: bool = False) -> ArmSummary:
    """The figures of one arm; with ``one_graph`` the times of its blocks, too."""
    samples = arm.samples
    accepted = [turn.accepted for sample in samples for turn in sample.rounds if turn.block >= 2]
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
        key_distortion=mean([kv.key_distortion for kv in kept]),
        value_distortion=mean([kv.value_distortion for kv in kept]),
        runaway_samples=sum(degeneration(sample.tokens) is not None for sample in samples),
        block_s=block_times(samples) if one_graph else None,
    )


def block_times(samples: Sequence[Sample]) -> BlockTimes | None:
    """Seconds of the blocks in the order of the rows, or None where there are none."""
    seconds = [turn.draft_s + turn.verify_s for sample in samples for turn in sample.rounds]
    if not seconds:
        return None
    return BlockTimes(first=tuple(seconds[:FIRST_BLOCKS]), max=max(seconds), mean=sum(seconds) / len(seconds))


def compare(arm: Arm, baseline: Arm) -> Comparison:
    """The figures of `arm` relative to `baseline` over the prompts both ran."""
    pairs = paired(arm, baseline)
    ours = tuple(sample for sample, _ in pairs)
    theirs = tuple(sample for _, sample in pairs)
    per_prompt = [
        ratio
        for sample, plain in pairs
        if (ratio := quotient(per_token(plain), per_token(sample))) is not None
    ]
    return Comparison(
        arm=arm.name,
        baseline=baseline.name,
        decode_ratio=quotient(decode_rate(ours), decode_rate(theirs)),
        median_decode_ratio=median(per_prompt) if per_prompt else None,
        end_to_end_ratio=quotient(end_to_end_rate(ours), end_to_end_rate(theirs)),
        identical_samples=sum(sample.tokens == plain.tokens for sample, plain in pairs),
        compared_samples=len(pairs),
    )


def paired(arm: Arm, other: Arm) -> list[tuple[Sample, Sample]]:
    """The samples of the prompts both arms ran, in the order of `arm`."""
    by_prompt = {sample.prompt_id: sample for sample in other.samples}
    return [(sample, by_prompt[sample.prompt_id]) for sample in arm.samples if sample.prompt_id in by_prompt]


def hit(sample: Sample) -> bool:
    """Whether the sample's answer stands in what it answered; an empty answer is never a hit.

    It must stand in the whole text, too: what reasoning was taken out between may not join to an answer.
    """
    needle = sample.needle
    if needle is None or needle.answer == "":
        return False
    return needle.answer in sample.answer and needle.answer in sample.text


def recall(arm: Arm) -> float | None:
    """Share of the samples with a needle whose answer came back, or None when there is none."""
    hits = [hit(sample) for sample in arm.samples if sample.needle is not None]
    return sum(hits) / len(hits) if hits else None


def parity_difference(parity: Parity) -> float | None:
    """The largest difference of a hidden state or a logit, or None where one is not finite."""
    logits = largest([turn.logits_max_abs for turn in parity.rounds])
    if not parity.compares_hidden or logits is None:
        return logits
    hidden = largest([turn.hidden_max_abs for turn in parity.rounds if turn.tokens_equal is None])
    return None if hidden is None else max(hidden, logits)


def summarise_parity(parity: Parity) -> ParitySummary:
    """The figures of a comparison with a reference."""
    turns = parity.rounds
    rows = sum(turn.rows for turn in turns)
    paths = [turn.path_equal for turn in turns if turn.path_equal is not None]
    return ParitySummary(
        cases=len({turn.case for turn in turns}),
        rounds=len(turns),
        rows=rows,
        hidden_max_abs=largest([turn.hidden_max_abs for turn in turns]),
        logits_max_abs=largest([turn.logits_max_abs for turn in turns]),
        argmax_agreement=quotient(sum(turn.argmax_agreement * turn.rows for turn in turns), rows),
        paths_equal=sum(paths),
        paths_compared=len(paths),
    )


def largest(figures: Sequence[float | None]) -> float | None:
    """The largest figure, or None where there is none or one is missing."""
    known = [figure for figure in figures if figure is not None]
    return max(known) if known and len(known) == len(figures) else None


def decode_rate(samples: tuple[Sample, ...]) -> float | None:
    """Tokens per second after the first token."""
    return quotient(sum(sample.decoded for sample in samples), sum(s.decode_s or 0.0 for s in samples))


def end_to_end_rate(samples: tuple[Sample, ...]) -> float | None:
    """Tokens per second, the prefill included."""
    seconds = sum((sample.prefill_s or 0.0) + (sample.decode_s or 0.0) for sample in samples)
    return quotient(sum(len(sample.tokens) for sample in samples), seconds)


def per_token(sample: Sample) -> float | None:
    """Seconds of one decoded token."""
    return quotient(sample.decode_s, sample.decoded)


def quotient(numerator: float | None, denominator: float | None) -> float | None:
    """`numerator / denominator`, or None where one is missing or the result is no finite number."""
    if numerator is None or not denominator:
        return None
    result = numerator / denominator
    return result if math.isfinite(result) else None


def mean(figures: Sequence[float | None]) -> float | None:
    """Mean of the figures that are there, or None when none is."""
    known = [figure for figure in figures if figure is not None]
    return sum(known) / len(known) if known else None


def first_divergence(ours: tuple[int, ...], plain: tuple[int, ...]) -> int | None:
    """The first position at which two token sequences differ, or None when they are equal.

    A sequence that is a proper prefix of the other differs at its own length.
    """
    if ours == plain:
        return None
    for position, (a, b) in enumerate(zip(ours, plain, strict=False)):
        if a != b:
            return position
    return min(len(ours), len(plain))
