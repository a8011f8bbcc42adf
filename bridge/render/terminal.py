"""Judged evidence as rich tables: figures, claims, broken rules. Nothing here prints.

Figures come from the gate's recomputation, never from a report's own summary. Names and messages were written
on the other side of the bus: each passes `plain` and is shown as plain text, never as markup. Where
there is no terminal rich draws the same tables without colour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from bridge.evidence.case import Case
from bridge.render.figures import bytes_text, claim_text, difference_text, number_text, ratio_text
from bridge.render.tables import bare_table, plain

if TYPE_CHECKING:
    from rich.table import Table

    from bridge.evidence.gate import Judgement
    from bridge.evidence.report import Comparison, Report, Summary

_BLAS_HINT = "apt install libopenblas0-pthread"


def evidence_tables(judgement: Judgement) -> Iterator[Table]:
    """The tables that show a judged report: its figures, then the claims and broken rules.

    A report that could not be read has no figures; its broken rules are in the last table all the same.
    """
    report, figures = judgement.report, judgement.figures
    if report is not None and figures is not None:
        yield _TABLES[report.kind](report, figures)
    yield verdict_table(judgement)


def throughput_table(report: Report, figures: Summary) -> Table:
    """One row an arm: rates, ratio to the baseline, acceptance length, identical outputs, resident bytes."""
    headings = ["decode tok/s", "end to end", "ratio", "acceptance length", "identical", "KV resident"]
    table = _table("arm", *headings)
    compared = {pair.arm: pair for pair in figures.comparisons}
    claimed = _claimed_speeds(report, figures)
    for arm in report.arms:
        row, pair = figures.arms[arm.name], compared.get(arm.name)
        table.add_row(
            *plain(
                arm.name,
                number_text(row.decode_tokens_per_s),
                number_text(row.end_to_end_tokens_per_s),
                _speed_text(pair, claimed),
                "" if row.acceptance_length is None else number_text(row.acceptance_length),
                "" if pair is None else f"{pair.identical_samples}/{pair.compared_samples}",
                bytes_text(row.max_resident_bytes),
            )
        )
    return table


def recall_table(report: Report, figures: Summary) -> Table:
    """One row an arm: role, prompts, share of answers found, speed beside the oracle, KV bytes."""
    table = _table("arm", "role", "prompts", "recall", "ratio", "acceptance length", "KV resident")
    compared = {pair.arm: pair for pair in figures.comparisons}
    claimed = _claimed_speeds(report, figures)
    for arm in report.arms:
        row = figures.arms[arm.name]
        table.add_row(
            *plain(
                arm.name,
                arm.role,
                str(row.samples),
                number_text(row.recall),
                _speed_text(compared.get(arm.name), claimed),
                "" if row.acceptance_length is None else number_text(row.acceptance_length),
                bytes_text(row.max_resident_bytes),
            )
        )
    return table


def quality_table(report: Report, figures: Summary) -> Table:
    """One row an arm: prompts, outputs that equal the baseline's, outputs that run away."""
    table = _table("arm", "role", "prompts", "identical", "runaway", "acceptance length")
    compared = {pair.arm: pair for pair in figures.comparisons}
    for arm in report.arms:
        row, pair = figures.arms[arm.name], compared.get(arm.name)
        table.add_row(
            *plain(
                arm.name,
                arm.role,
                str(row.samples),
                "" if pair is None else f"{pair.identical_samples}/{pair.compared_samples}",
                str(row.runaway_samples),
                "" if row.acceptance_length is None else number_text(row.acceptance_length),
            )
        )
    return table


def kv_table(report: Report, figures: Summary) -> Table:
    """One row an arm: bits and bytes, distortion, recall, acceptance length, speed against native caches."""
    headings = ["role", "bits", "KV resident", "distortion K", "V", "recall", "acceptance length", "ratio"]
    table = _table("arm", *headings)
    compared = {pair.arm: pair for pair in figures.comparisons}
    claimed = _claimed_speeds(report, figures)
    for arm in report.arms:
        row, pair = figures.arms[arm.name], compared.get(arm.name)
        table.add_row(
            *plain(
                arm.name,
                arm.control or arm.role,
                number_text(row.stored_bits_per_value),
                bytes_text(row.max_resident_bytes),
                number_text(row.key_distortion),
                number_text(row.value_distortion),
                number_text(row.recall),
                number_text(row.acceptance_length),
                _speed_text(pair, claimed),
            )
        )
    return table


def _claimed_speeds(report: Report, figures: Summary) -> set[tuple[str, str]]:
    """Arm and baseline of each speed claim: the gate judged these ratios, and no others."""
    return {(arm.name, baseline.name) for arm, baseline in Case(report, None, figures).speed_pairs()}


def _speed_text(pair: Comparison | None, claimed: set[tuple[str, str]]) -> str:
    """A decode ratio; one that no claim covers says so, lest it pass for a judged one."""
    if pair is None:
        return ""
    text = ratio_text(pair.decode_ratio)
    return text if (pair.arm, pair.baseline) in claimed else f"{text} not claimed"


def parity_table(report: Report, figures: Summary) -> Table:
    """What was compared with what, how much of it, and the largest differences."""
    table = _table("parity", "")
    parity, found = report.parity, figures.parity
    if parity is None or found is None:
        return table
    facts = {
        "subject": parity.subject.implementation,
        "reference": parity.reference.implementation,
        "compared": f"{found.cases} cases, {found.rounds} rounds, {found.rows} rows in {parity.dtype}",
        "hidden states": difference_text(found.hidden_max_abs),
        "logits": f"{difference_text(found.logits_max_abs)} (tolerance {difference_text(parity.tolerance)})",
        "equal choices": number_text(found.argmax_agreement),
        "equal paths": f"{found.paths_equal}/{found.paths_compared}",
    }
    for name, fact in facts.items():
        table.add_row(*plain(name, fact))
    return table


def machine_table(report: Report, _figures: Summary) -> Table:
    """The machine of a probe, one fact a row."""
    environment = report.environment
    table = _table("machine", "")
    facts = {
        "system": f"{environment.system} {environment.os_release} on {environment.machine}",
        "chip": f"{environment.chip}, {environment.cpu_count} cores",
        "memory": bytes_text(environment.memory_bytes),
        "device": f"{environment.device}, BLAS {environment.blas}",
        "power, thermal": f"{environment.power_source}, {environment.thermal_state}",
        "versions": ", ".join(f"{name} {version}" for name, version in environment.versions),
    }
    for name, fact in facts.items():
        table.add_row(*plain(name, fact))
    return table


_TABLES: dict[str, Callable[[Report, Summary], Table]] = {
    "throughput": throughput_table,
    "recall": recall_table,
    "quality": quality_table,
    "kv": kv_table,
    "parity": parity_table,
    "probe": machine_table,
}


def verdict_table(judgement: Judgement) -> Table:
    """The gate's verdict: each claim beside the figure that decides it, then each rule broken."""
    table = _table("gate", "accepted" if judgement.accepted else "REJECTED")
    for claim in judgement.claims:
        table.add_row(*plain(claim.name, claim_text(claim)))
    for restart in judgement.report.restarts if judgement.report else ():
        table.add_row(*plain("measured again", f"after {restart.after_samples} samples: {restart.reason}"))
    if judgement.report is not None and (reason := judgement.report.configuration.get("speed_not_claimed")):
        table.add_row(*plain("no speed claimed", str(reason)))
    if judgement.report is not None and _lacks_blas(judgement.report):
        table.add_row(*plain("hint", f"no fast BLAS on the runner, so blocks are dear there: {_BLAS_HINT}"))
    for violation in judgement.violations:
        table.add_row(*plain(violation.code, violation.message), style="red")
    return table


def _lacks_blas(report: Report) -> bool:
    """Whether a speed was measured on a Linux CPU with nothing but mlx's own matrix products."""
    machine = report.environment
    slow = machine.system == "Linux" and not machine.metal and machine.blas == "reference"
    return slow and report.kind == "throughput"


def _table(first: str, *others: str) -> Table:
    shown = bare_table()
    shown.add_column(first, overflow="fold")
    for heading in others:
        shown.add_column(heading, justify="left" if len(others) == 1 else "right", overflow="fold")
    return shown
