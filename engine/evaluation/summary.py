"""The figures derived from a report's rows.

They are computed from the rows as they stand in the file, so that a reader who recomputes them gets the same
numbers. Only the drafter's forwards are not: they were counted where its network ran, so that a drafter that
drafts without it is seen. What the figures may claim is for others.
"""

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from evidence_format.text import degeneration

if TYPE_CHECKING:
    from engine.evaluation.report import Arm


FIRST_BLOCKS = 8


def summarise(arms: Sequence["Arm"], *, one_graph: bool = False) -> dict[str, Any]:
    """All derived figures, from the rows alone; with ``one_graph`` the times of blocks, too.

    Systems under test are compared with the baseline, or where there is none, with the oracle.
    """
    baselines = [arm for arm in arms if arm.role == "baseline"]
    references = baselines or [arm for arm in arms if arm.role == "oracle"]
    systems = [arm for arm in arms if arm.role == "sut"]
    figures = {arm.name: _arm_summary(arm.samples) for arm in arms}
    for arm in arms if one_graph else ():
        figures[arm.name]["block_s"] = _block_times(arm.samples)
    return {
        "arms": figures,
        "comparisons": [_comparison(arm, reference) for reference in references[:1] for arm in systems],
    }


def _block_times(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Seconds of draft and verification of the blocks, in the order of the rows; None without any."""
    seconds = [item["draft_s"] + item["verify_s"] for row in rows for item in row["rounds"]]
    if not seconds:
        return None
    return {"first": seconds[:FIRST_BLOCKS], "max": max(seconds), "mean": sum(seconds) / len(seconds)}


def _arm_summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    decoded = [len(row["tokens"]) - 1 for row in rows]
    verified = [item for row in rows for item in row["rounds"] if item["block"] >= 2]
    needles = [row["needle"]["hit"] for row in rows if "needle" in row]
    coded = [row["kv"] for row in rows if "kv" in row]
    return {
        "samples": len(rows),
        "generated_tokens": sum(decoded) + len(rows),
        "decoded_tokens": sum(decoded),
        "median_decoded_tokens": median(decoded) if decoded else 0,
        "decode_tokens_per_s": _ratio(sum(decoded), sum(row["decode_s"] for row in rows)),
        "end_to_end_tokens_per_s": _ratio(
            sum(decoded) + len(rows), sum(row["prefill_s"] + row["decode_s"] for row in rows)
        ),
        "verify_rounds": len(verified),
        "acceptance_length": _ratio(sum(item["accepted"] + 1 for item in verified), len(verified)),
        "recall": _ratio(sum(needles), len(needles)),
        "max_resident_bytes": max((row["cache"]["resident_bytes"] for row in rows), default=None),
        "stored_bits_per_value": _ratio(
            8 * sum(kv["bytes"] for kv in coded), sum(kv["values"] for kv in coded)
        ),
        "key_distortion": _mean([kv["key_distortion"] for kv in coded]),
        "value_distortion": _mean([kv["value_distortion"] for kv in coded]),
        "runaway_samples": sum(degeneration(row["tokens"]) is not None for row in rows),
    }


def parity_summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a comparison with a reference, from its rounds."""
    rows = sum(item["rows"] for item in rounds)
    paths = [item["path_equal"] for item in rounds if item["path_equal"] is not None]
    return {
        "cases": len({item["case"] for item in rounds}),
        "rounds": len(rounds),
        "rows": rows,
        "hidden_max_abs": _largest([item["hidden_max_abs"] for item in rounds]),
        "logits_max_abs": _largest([item["logits_max_abs"] for item in rounds]),
        "argmax_agreement": _ratio(sum(item["argmax_agreement"] * item["rows"] for item in rounds), rows),
        "paths_equal": sum(paths),
        "paths_compared": len(paths),
    }


def _largest(figures: Sequence[float | None]) -> float | None:
    """The largest figure, or None where there is none or one is missing."""
    known = [figure for figure in figures if figure is not None]
    return max(known) if known and len(known) == len(figures) else None


def _mean(figures: Sequence[float | None]) -> float | None:
    """Mean of the figures that are there."""
    known = [figure for figure in figures if figure is not None]
    return _ratio(sum(known), len(known))


def _comparison(arm: "Arm", baseline: "Arm") -> dict[str, Any]:
    """The arm against the baseline over the prompts both ran."""
    plain = {row["prompt_id"]: row for row in baseline.samples}
    ours = [row for row in arm.samples if row["prompt_id"] in plain]
    theirs = [plain[row["prompt_id"]] for row in ours]
    ours_summary, theirs_summary = _arm_summary(ours), _arm_summary(theirs)
    pairs = list(zip(ours, theirs, strict=True))
    ratios = [
        (b["decode_s"] / (len(b["tokens"]) - 1)) / (a["decode_s"] / (len(a["tokens"]) - 1))
        for a, b in pairs
        if len(a["tokens"]) > 1 and len(b["tokens"]) > 1 and a["decode_s"] > 0
    ]
    return {
        "arm": arm.name,
        "baseline": baseline.name,
        "decode_ratio": _ratio(ours_summary["decode_tokens_per_s"], theirs_summary["decode_tokens_per_s"]),
        "median_decode_ratio": median(ratios) if ratios else None,
        "end_to_end_ratio": _ratio(
            ours_summary["end_to_end_tokens_per_s"], theirs_summary["end_to_end_tokens_per_s"]
        ),
        "identical_samples": sum(a["tokens"] == b["tokens"] for a, b in pairs),
        "compared_samples": len(pairs),
    }


def liveness(arms: Sequence["Arm"]) -> dict[str, Any]:
    """What ran behind the rows: forwards of our loop, and those of the drafter's network."""
    rounds = [item for arm in arms for row in arm.samples for item in row["rounds"]]
    restored = sum(row.get("restored_positions", 0) for arm in arms for row in arm.samples)
    return {
        "rounds": len(rounds),
        "drafter_forwards": sum(arm.drafter_forwards for arm in arms),
        "restored_positions": restored,
        "fallbacks": [],
    }


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
