"""Rows from samples: medians over repetitions, ratios to plain decoding of the same repetition. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from peerbench.measure import Sample, Setting
from peerbench.script import MODES

LAST = 10**9  # where block `auto` stands


def summarise(samples: Sequence[Sample], size: str, baseline: Setting) -> list[dict[str, Any]]:
    """One row an arm, the baseline's excepted.

    Every row has ``engine``, ``size``, ``block``, ``mode``, ``ratio_to_plain`` (median over repetitions of
    this arm's tokens a second, total tokens over total time, by the baseline's in the same repetition), its
    least and greatest value, ``ratio_of_best`` (fastest repetition by the baseline's fastest, which a busy
    machine disturbs least), ``tokens_per_s`` (median) and ``identical`` (all tokens those of the baseline).
    Where an engine records its rounds, also ``tokens_per_round``, ``draft_s`` and ``verify_s`` (means of
    rounds at the block asked for, median over runs), ``outside_s`` (what else a round takes, on average) and,
    with full acceptance at a fixed block, ``share_of_limit``: measured speed by what the stages of the same
    run allow, block / (draft + verify), median over runs. Of an engine that was measured at an earlier commit
    too, ``ratio_to_earlier``: median over prompts and repetitions of its speed by the earlier one's.

    Raises:
        ValueError: there is no sample of the baseline.
    """
    plain = _speeds(samples, baseline)
    if not plain:
        raise ValueError("nothing to compare with: the baseline was not measured")
    rows = []
    for setting in dict.fromkeys(sample.setting for sample in samples):
        if setting == baseline:
            continue
        speeds = _speeds(samples, setting)
        ratios = [speeds[repetition] / plain[repetition] for repetition in speeds]
        row: dict[str, Any] = {
            "engine": setting.engine,
            "size": size,
            "block": setting.block,
            "mode": setting.mode,
            "ratio_to_plain": median(ratios),
            "ratio_least": min(ratios),
            "ratio_greatest": max(ratios),
            "ratio_of_best": max(speeds.values()) / max(plain.values()),
            "tokens_per_s": median(speeds.values()),
            "plain_tokens_per_s": median(plain.values()),
            "identical": all(sample.identical for sample in samples if sample.setting == setting),
        }
        before = [s.run for s in samples if s.setting == replace(setting, engine=f"{setting.engine}-earlier")]
        if before:
            now = [s.run for s in samples if s.setting == setting]
            pairs = zip(now, before, strict=True)
            row["ratio_to_earlier"] = median(a.timed / a.seconds * b.seconds / b.timed for a, b in pairs)
        rows.append(row | _stages(samples, setting))
    return rows


def _speeds(samples: Sequence[Sample], setting: Setting) -> dict[int, float]:
    """Tokens a second by repetition: total tokens over total time."""
    tokens: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for sample in samples:
        if sample.setting == setting:
            tokens[sample.repetition] = tokens.get(sample.repetition, 0) + sample.run.timed
            seconds[sample.repetition] = seconds.get(sample.repetition, 0.0) + sample.run.seconds
    return {repetition: tokens[repetition] / seconds[repetition] for repetition in tokens}


def _stages(samples: Sequence[Sample], setting: Setting) -> dict[str, Any]:
    """What the rounds of an arm say about where its time goes."""
    runs = [sample.run for sample in samples if sample.setting == setting and sample.run.rounds]
    if not runs:
        return {}
    rounds = [record for run in runs for record in run.rounds]
    inside = sum(record.draft_s + record.verify_s for record in rounds)
    figures: dict[str, Any] = {
        "tokens_per_round": sum(run.timed for run in runs) / len(rounds),
        "outside_s": (sum(run.seconds for run in runs) - inside) / len(rounds),
    }
    if isinstance(setting.block, int):
        whole = [[record for record in run.rounds if record.block == setting.block] for run in runs]
        stages = [(fmean(r.draft_s for r in some), fmean(r.verify_s for r in some)) for some in whole if some]
        figures["draft_s"] = median(draft_s for draft_s, _ in stages)
        figures["verify_s"] = median(verify_s for _, verify_s in stages)
        if setting.mode == "oracle":
            figures["share_of_limit"] = median(
                run.timed / run.seconds * sum(both) / setting.block
                for run, both in zip(runs, stages, strict=True)
            )
    return figures


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people, best first within a mode and block."""
    ratios = ("ratio_to_plain", "ratio_least", "ratio_greatest", "ratio_of_best")
    lines = [
        "mode    block  engine       × plain  least   most   best    tok/s  same"
        "  tok/round  outside ms  draft ms  verify ms  of limit"
    ]
    for row in sorted(rows, key=_place):
        line = f"{row['mode']:<7} {row['block']:>5}  {row['engine']:<11} "
        line += " ".join(f"{row[name]:{8 if place == 0 else 6}.2f}" for place, name in enumerate(ratios))
        line += f" {row['tokens_per_s']:8.1f}  {'yes' if row['identical'] else 'NO ':<4}"
        if "outside_s" in row:
            line += f" {row['tokens_per_round']:9.2f}  {1e3 * row['outside_s']:10.3f}"
        if "draft_s" in row:
            line += f"  {1e3 * row['draft_s']:8.2f}  {1e3 * row['verify_s']:9.2f}"
        if "share_of_limit" in row:
            line += f"  {row['share_of_limit']:8.3f}"
        if "ratio_to_earlier" in row:
            line += f"  {row['ratio_to_earlier']:.3f} × earlier"
        lines.append(line.rstrip())
    return "\n".join(lines)


def _place(row: dict[str, Any]) -> tuple[int, int, float]:
    block = row["block"]
    return MODES.index(row["mode"]), block if isinstance(block, int) else LAST, -row["ratio_to_plain"]
