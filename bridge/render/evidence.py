"""Judged evidence as tables, for a terminal and for the Markdown summary of a workflow run.

Figures come from the gate's recomputation, never from a report's own summary. Names and messages were written
on the other side of the bus: `as_rich` shows them as plain text, never as markup. In `summary` they can be no
Markdown, no HTML and no link: whatever is not a plain character of them is written as its number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bridge.client.fetch import Judged
from bridge.evidence.figures import Case
from bridge.evidence.gate import Judgement
from bridge.evidence.model import Arm, ArmSummary, Comparison, Report, Summary
from bridge.evidence.rules.claims import ClaimFigure
from bridge.protocol.result import Status, Verdict
from bridge.protocol.sanitize import clean_line
from bridge.render.outcome import outcome_lines
from bridge.render.terminal import bare_table, plain

if TYPE_CHECKING:
    from rich.table import Table

MISSING = "-"
# GitHub shows no more than 1 MiB of a step's summary, and then none of it.
MOST_CHARACTERS = 500_000
_LONGEST = 1000
# A point may be between digits: anywhere else it could be part of an address.
_OTHERS = re.compile(r"[^A-Za-z0-9 ,/()=+\x80-\U0010ffff.-]|(?<![0-9])\.|\.(?![0-9])")
_SIGNS = {
    Status.PASSED: "✅",
    Status.FAILED: "❌",
    Status.REFUSED: "⛔",
    Status.REJECTED: "⛔",
    Status.CANCELLED: "⏹️",
    Status.LOST: "❓",
}
_BLAS_HINT = "apt install libopenblas0-pthread"


@dataclass(frozen=True)
class EvidenceTable:
    """Headings and rows of cells; `broken`: how many of the last rows name a broken rule."""

    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]
    broken: int = 0


@dataclass(frozen=True)
class _ArmFigures:
    arm: Arm
    figures: ArmSummary
    pair: Comparison | None
    is_claimed: bool  # the gate judged this ratio


def number_text(value: float | None) -> str:
    """Three or more significant digits, e.g. ``143.2``, ``3.84``, ``0.950``."""
    if value is None:
        return MISSING
    if abs(value) >= 100:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def ratio_text(value: float | None) -> str:
    """A ratio to a baseline, e.g. ``2.13x``."""
    return MISSING if value is None else f"{value:.2f}x"


def bytes_text(value: float | None) -> str:
    """Bytes in binary units, e.g. ``1.5 MiB``."""
    if value is None:
        return MISSING
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def claim_figure_text(claim: ClaimFigure) -> str:
    """A claim's figure and its bound, e.g. ``2.13x (claimed: 1.00x)``, and whether the rows reach it."""
    text = _CLAIM_TEXTS.get(claim.name, number_text)
    shown = [] if claim.figure is None else [text(claim.figure)]
    if claim.bound is not None:
        shown.append(f"(claimed: {text(claim.bound)})")
    return " ".join([*shown, "met" if claim.met else "NOT MET"])


def evidence_tables(judgement: Judgement) -> Iterator[EvidenceTable]:
    """The tables that show a judged report: its figures, then the claims and broken rules.

    A report that could not be read has no figures; its broken rules are in the last table all the same.
    """
    report, figures = judgement.report, judgement.figures
    if report is not None and figures is not None:
        if report.kind in _COLUMNS:
            yield _arms(report, figures)
        elif report.kind == "parity":
            yield EvidenceTable(("parity", ""), list(_parity_facts(report, figures).items()))
        else:
            yield EvidenceTable(("machine", ""), list(_machine_facts(report).items()))
    yield _verdict(judgement)


def as_rich(table: EvidenceTable) -> Table:
    """A table as rich draws it on a terminal."""
    shown = bare_table()
    for number, heading in enumerate(table.headings):
        is_text = number == 0 or len(table.headings) == 2
        shown.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    for number, row in enumerate(table.rows):
        is_broken = number >= len(table.rows) - table.broken
        shown.add_row(*plain(*row), style="red" if is_broken else None)
    return shown


def _arms(report: Report, figures: Summary) -> EvidenceTable:
    """One row an arm, with the columns of the report's kind."""
    compared = {pair.arm: pair for pair in figures.comparisons}
    claimed = {(arm.name, baseline.name) for arm, baseline in Case(report, None, figures).speed_pairs()}
    headings = _COLUMNS[report.kind]
    rows = []
    for arm in report.arms:
        pair = compared.get(arm.name)
        is_claimed = pair is not None and (pair.arm, pair.baseline) in claimed
        row = _ArmFigures(arm, figures.arms[arm.name], pair, is_claimed)
        rows.append((arm.name, *(_CELLS[heading](row) for heading in headings)))
    return EvidenceTable(("arm", *headings), rows)


def _parity_facts(report: Report, figures: Summary) -> dict[str, str]:
    """What was compared with what, how much of it, and the largest differences."""
    parity, found = report.parity, figures.parity
    if parity is None or found is None:
        return {}
    return {
        "subject": parity.subject.implementation,
        "reference": parity.reference.implementation,
        "compared": f"{found.cases} cases, {found.rounds} rounds, {found.rows} rows in {parity.dtype}",
        "hidden states": _difference_text(found.hidden_max_abs),
        "logits": f"{_difference_text(found.logits_max_abs)} (tolerance {parity.tolerance:.2g})",
        "equal choices": number_text(found.argmax_agreement),
        "equal paths": f"{found.paths_equal}/{found.paths_compared}",
    }


def _machine_facts(report: Report) -> dict[str, str]:
    environment = report.environment
    return {
        "system": f"{environment.system} {environment.os_release} on {environment.machine}",
        "chip": f"{environment.chip}, {environment.cpu_count} cores",
        "memory": bytes_text(environment.memory_bytes),
        "device": f"{environment.device}, BLAS {environment.blas}",
        "power, thermal": f"{environment.power_source}, {environment.thermal_state}",
        "versions": ", ".join(f"{name} {version}" for name, version in environment.versions),
    }


def _verdict(judgement: Judgement) -> EvidenceTable:
    """The gate's verdict: each claim with the figure that decides it, then each rule broken."""
    report = judgement.report
    rows: list[tuple[str, ...]] = [(claim.name, claim_figure_text(claim)) for claim in judgement.claims]
    for restart in report.restarts if report else ():
        rows.append(("measured again", f"after {restart.after_samples} samples: {restart.reason}"))
    if report is not None and (reason := report.configuration.get("speed_not_claimed")):
        rows.append(("no speed claimed", str(reason)))
    if report is not None and _lacks_blas(report):
        rows.append(("hint", f"no fast BLAS on the runner, so blocks are slow there: {_BLAS_HINT}"))
    rows += [(violation.code, violation.message) for violation in judgement.violations]
    headings = ("gate", "accepted" if judgement.accepted else "REJECTED")
    return EvidenceTable(headings, rows, broken=len(judgement.violations))


def _lacks_blas(report: Report) -> bool:
    """Whether a speed was measured on a Linux CPU with nothing but mlx's own matrix products."""
    machine = report.environment
    is_slow = machine.system == "Linux" and not machine.metal and machine.blas == "reference"
    return is_slow and report.kind == "throughput"


def _difference_text(value: float | None) -> str:
    """A difference of outputs, e.g. ``2.6e-05``."""
    return MISSING if value is None else f"{value:.2g}"


def _speed_text(row: _ArmFigures) -> str:
    """A decode ratio; one that no claim covers says so, lest it pass for a judged one."""
    if row.pair is None:
        return ""
    text = ratio_text(row.pair.decode_ratio)
    return text if row.is_claimed else f"{text} not claimed"


def summary(
    nonce: str,
    verdict: Verdict | None,
    judged: Judged | None,
    *,
    place: tuple[str, str] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """What a run's page shows of one request; without a verdict it is left to a runner's daemon.

    `judged` is a runner's result, `place` the result commit and its ref, where they exist.
    """
    if verdict is None:
        why = "It asks for the transport `embedded`: a runner's daemon takes it, not a workflow."
        return f"## kakeya-mac: {escaped(nonce)} is left alone\n\n{why}\n"
    preset = "" if judged is None else escaped(judged.believed.result.preset or "")
    lines = [f"## {_SIGNS[verdict.status]} {verdict.status.upper()} {preset}".rstrip(), ""]
    commit, ref = place or ("", "none")
    if judged is None:
        said = [f"request {nonce}", f"verdict {verdict.status}/{verdict.reason}: {verdict.message}"]
        said += [f"{violation.code}: {violation.message}" for violation in verdict.violations]
        said += [f"result {commit} on {ref}"] if place else []
    else:
        believed = replace(judged.believed, commit=commit, ref=ref)
        said = list(outcome_lines(replace(judged, believed=believed, verdict=verdict)))
    lines += [f"- {escaped(line)}" for line in (*said, *notes)]
    for path, judgement in ({} if judged is None else judged.judgements).items():
        lines += ["", f"### Evidence: {escaped(path)}", ""]
        for table in evidence_tables(judgement):
            lines += [_row(table.headings), f"|{' --- |' * len(table.headings)}", *map(_row, table.rows), ""]
    text = "\n".join([*lines, ""])
    if len(text) <= MOST_CHARACTERS:
        return text
    return text[:MOST_CHARACTERS].rpartition("\n")[0] + "\n\n... cut here; the whole is in the result\n"


def escaped(text: str, *, limit: int = _LONGEST) -> str:
    """A text from the bus as one line of Markdown that shows it and does nothing else."""
    line = clean_line(text, limit=limit)
    return _OTHERS.sub(lambda match: f"&#{ord(match[0])};", line)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(escaped(cell) for cell in cells)} |"


_CELLS: dict[str, Callable[[_ArmFigures], str]] = {
    "role": lambda row: row.arm.role,
    "kind": lambda row: row.arm.control or row.arm.role,
    "prompts": lambda row: str(row.figures.samples),
    "decode tok/s": lambda row: number_text(row.figures.decode_tokens_per_s),
    "end to end": lambda row: number_text(row.figures.end_to_end_tokens_per_s),
    "ratio": _speed_text,
    "acceptance length": lambda row: number_text(row.figures.acceptance_length),
    "identical": lambda row: f"{row.pair.identical_samples}/{row.pair.compared_samples}" if row.pair else "",
    "runaway": lambda row: str(row.figures.runaway_samples),
    "recall": lambda row: number_text(row.figures.recall),
    "bits": lambda row: number_text(row.figures.stored_bits_per_value),
    "KV resident": lambda row: bytes_text(row.figures.max_resident_bytes),
    "distortion K": lambda row: number_text(row.figures.key_distortion),
    "V": lambda row: number_text(row.figures.value_distortion),
}
_COLUMNS = {
    "throughput": ("decode tok/s", "end to end", "ratio", "acceptance length", "identical", "KV resident"),
    "recall": ("role", "prompts", "recall", "ratio", "acceptance length", "KV resident"),
    "quality": ("role", "prompts", "identical", "runaway", "acceptance length"),
    "kv": ("kind", "bits", "KV resident", "distortion K", "V", "recall", "acceptance length", "ratio"),
}
_CLAIM_TEXTS: dict[str, Callable[[float | None], str]] = {
    "speedup": ratio_text,
    "no_slowdown": ratio_text,
    "resident_bytes": bytes_text,
    "parity": _difference_text,
}
