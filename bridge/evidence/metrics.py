"""The figures that are followed over many results: names, units, and which way is better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from bridge.evidence.gate import Judgement

Source = Literal["arm", "comparison", "parity", "perplexity", "paired", "result"]


@dataclass(frozen=True)
class Metric:
    """One figure: its unit, whether more of it is better, what it is, and which part of a result has it."""

    unit: str
    higher_is_better: bool
    text: str
    source: Source = "arm"


@dataclass(frozen=True)
class Figure:
    """One value, perhaps with an interval; `of` names the arm under test, and what it is compared with."""

    metric: str
    of: str
    value: float
    low: float | None = None
    high: float | None = None


METRICS = {
    "decode_ratio": Metric("times", True, "decoding speed over the baseline's", "comparison"),
    "median_decode_ratio": Metric("times", True, "the same, the median over prompts", "comparison"),
    "end_to_end_ratio": Metric("times", True, "the same with the prefill", "comparison"),
    "decode_tokens_per_s": Metric("tokens/s", True, "decoding speed"),
    "end_to_end_tokens_per_s": Metric("tokens/s", True, "speed with the prefill"),
    "acceptance_length": Metric("tokens", True, "tokens for each verified block"),
    "recall": Metric("share", True, "needles found"),
    "max_resident_bytes": Metric("bytes", False, "largest KV cache"),
    "stored_bits_per_value": Metric("bits", False, "of the KV cache"),
    "key_distortion": Metric("share", False, "error of stored keys"),
    "value_distortion": Metric("share", False, "error of stored values"),
    "argmax_agreement": Metric("share", True, "equal choices in a parity report", "parity"),
    "logits_max_abs": Metric("logits", False, "largest difference in a parity report", "parity"),
    "nll_increase": Metric("nats", False, "of a token of text, over native caches", "perplexity"),
    "native_perplexity": Metric("", False, "of a text, native caches", "perplexity"),
    "policy_perplexity": Metric("", False, "of a text, under the policy", "perplexity"),
    "paired_ratio": Metric("times", False, "time of a paired run over the other side's", "paired"),
    "command_s": Metric("s", False, "seconds of the job's command, by the runner's clock", "result"),
}


def figures(judgements: Mapping[str, Judgement], command_s: float) -> Iterator[Figure]:
    """Every figure of a passed result whose reports, by path, the gate accepted.

    A paired run gives `paired_ratio` alone: what else it holds is of one of its many runs.
    """
    record = next((each.paired for each in judgements.values() if each.paired is not None), None)
    if record is not None:
        if record.summary.ratio is not None:
            low, high = record.summary.interval or (None, None)
            yield Figure("paired_ratio", "against the other side", record.summary.ratio, low, high)
        return
    yield Figure("command_s", "command", command_s)
    for judgement in judgements.values():
        yield from _of_report(judgement)


def _of_report(judgement: Judgement) -> Iterator[Figure]:
    found, report = judgement.figures, judgement.report
    if found is None or report is None:
        return
    for arm in report.with_role("sut"):
        yield from _of_part("arm", arm.name, vars(found.arms[arm.name]))
    for each in found.comparisons:
        yield from _of_part("comparison", f"{each.arm} against {each.baseline}", vars(each))
    if found.parity is not None:
        yield from _of_part("parity", "parity", vars(found.parity))
    if found.perplexity is not None:
        yield from _of_part("perplexity", "perplexity", vars(found.perplexity))


def _of_part(source: Source, of: str, values: Mapping[str, object]) -> Iterator[Figure]:
    for name, metric in METRICS.items():
        value = values.get(name) if metric.source == source else None
        if isinstance(value, int | float):
            yield Figure(name, of, float(value))
