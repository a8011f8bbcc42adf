"""Judged evidence as tables, for a terminal and for the Markdown summary of a workflow run.

Figures come from the gate's recomputation. Names and messages came over the bus, and are shown as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from bridge.client.fetch import Judged
from bridge.evidence.gate import Judgement
from bridge.protocol.result import Status
from bridge.protocol.sanitize import clean_line
from bridge.render.outcome import bare_table, outcome_lines, paired_lines, plain
from evidence_format.claims import SPEED_CLAIMS
from evidence_format.model import Arm, ArmSummary, Report, Summary
from evidence_format.rules.claims import ClaimFigure

MISSING = "-"
# GitHub shows no more than 1 MiB of a step's summary, and then none of it.
MOST_CHARACTERS = 500_000
# A point may be between digits: anywhere else it could be part of an address.
_OTHERS = re.compile(r"[^A-Za-z0-9 ,/()=+\x80-\U0010ffff.-]|(?<![0-9])\.|\.(?![0-9])")
_SIGNS = {Status.PASSED: "✅", Status.FAILED: "❌", Status.CANCELLED: "⏹️", Status.LOST: "❓"}


@dataclass(frozen=True)
class EvidenceTable:
    """Headings and rows of cells; `broken`: how many of the last rows name a broken rule."""

    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]
    broken: int = 0


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
    rows: list[tuple[str, ...]] = [(claim.name, claim_figure_text(claim)) for claim in judgement.claims]
    if judgement.paired is not None:
        facts = [line.strip().partition("  ") for line in paired_lines(judgement.paired)]
        yield EvidenceTable(("paired", ""), [(name, value) for name, _, value in facts])
    if report is not None and figures is not None:
        if report.kind in _COLUMNS:
            yield _arms(judgement, report, figures)
        elif report.kind == "parity":
            yield EvidenceTable(("parity", ""), list(_parity_facts(report, figures).items()))
        elif report.kind == "perplexity":
            yield EvidenceTable(("perplexity", ""), list(_perplexity_facts(report, figures).items()))
        else:
            yield EvidenceTable(("machine", ""), list(_machine_facts(report).items()))
        for restart in report.restarts:
            rows.append(("measured again", f"after {restart.after_samples} samples: {restart.reason}"))
        if reason := report.configuration.get("speed_not_claimed"):
            rows.append(("no speed claimed", str(reason)))
        for arm in report.arms:
            if arm.system.drafter and arm.samples and not arm.drafted_blocks:
                plain_alone = f"{arm.label}: drafting never promised to pay, so every step was plain"
                rows.append(("nothing drafted", plain_alone))
    rows += [(violation.code, violation.message) for violation in judgement.violations]
    headings = ("gate", "accepted" if judgement.accepted else "REJECTED")
    yield EvidenceTable(headings, rows, broken=len(judgement.violations))


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


def _arms(judgement: Judgement, report: Report, figures: Summary) -> EvidenceTable:
    """One row an arm, with the columns of the report's kind; a ratio that no claim covers says so."""
    compared = {pair.arm: pair for pair in figures.comparisons}
    claimed = {(claim.arm, claim.against) for claim in judgement.claims if claim.name in SPEED_CLAIMS}
    headings = _COLUMNS[report.kind]
    rows = []
    for arm in report.arms:
        pair = compared.get(arm.name)
        cells = {name: cell(arm, figures.arms[arm.name]) for name, cell in _CELLS.items()}
        if pair is not None:
            is_claimed = (pair.arm, pair.baseline) in claimed
            cells["ratio"] = ratio_text(pair.decode_ratio) + ("" if is_claimed else " not claimed")
            cells["identical"] = f"{pair.identical_samples}/{pair.compared_samples}"
        rows.append((arm.name, *(cells.get(heading, "") for heading in headings)))
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


def _perplexity_facts(report: Report, figures: Summary) -> dict[str, str]:
    """What was compared, and how much more a token costs."""
    of, found = report.perplexity, figures.perplexity
    if of is None or found is None:
        return {}
    low, high = found.nll_interval or (None, None)
    interval = "" if low is None else f" (95 %: {low:+.4f} to {high:+.4f})"
    increase = MISSING if found.nll_increase is None else f"{found.nll_increase:+.4f}{interval}"
    return {
        "kv": of.kv,
        "weights": f"packed {of.quantize}" if of.quantize else "as stored",
        "text": f"{found.tokens} tokens in {found.chunks} chunks, read {of.piece} at a time",
        "perplexity": number_text(found.policy_perplexity),
        "native perplexity": number_text(found.native_perplexity),
        "increase, nats a token": increase,
        "bits a coded value": number_text(found.stored_bits_per_value),
        "KV cache": f"{bytes_text(found.policy_bytes)}, native {bytes_text(found.native_bytes)}",
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


def _difference_text(value: float | None) -> str:
    """A difference of outputs, e.g. ``2.6e-05``."""
    return MISSING if value is None else f"{value:.2g}"


def summary(nonce: str, judged: Judged | None) -> str:
    """What a run's page shows of one request; without a result it is left to a runner's daemon."""
    if judged is None:
        why = "It asks for the transport `embedded`: a runner's daemon takes it, not a workflow."
        return f"## kakeya-mac: {escaped(nonce)} is left alone\n\n{why}\n"
    status, preset = judged.verdict.status, escaped(judged.believed.result.preset or "")
    lines = [f"## {_SIGNS.get(status, '⛔')} {status.upper()} {preset}".rstrip(), ""]
    lines += [f"- {escaped(line)}" for line in outcome_lines(judged)]
    lines += markdown_evidence(judged.judgements)
    return "\n".join([*lines, ""])


def markdown_evidence(judgements: Mapping[str, Judgement]) -> Iterator[str]:
    """Judged reports, by path, as lines of Markdown."""
    for path, judgement in judgements.items():
        yield from ("", f"### Evidence: {escaped(path)}", "")
        for table in evidence_tables(judgement):
            yield markdown_table(table.headings, table.rows)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, with an empty line at its end."""
    rule = f"|{' --- |' * len(headings)}"
    return "\n".join([_row(headings), rule, *map(_row, rows), ""])


def shortened(text: str, most: int) -> str:
    """A Markdown text of at most `most` characters; one that is cut says so."""
    note = "\n\n... cut here; the whole is in the result\n"
    return text if len(text) <= most else text[: most - len(note)].rpartition("\n")[0] + note


def escaped(text: str) -> str:
    """A text from the bus as one line of Markdown; what is not a plain character is written as its number."""
    line = clean_line(text, limit=1000)
    return _OTHERS.sub(lambda match: f"&#{ord(match[0])};", line)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(escaped(cell) for cell in cells)} |"


_CELLS: dict[str, Callable[[Arm, ArmSummary], str]] = {
    "role": lambda arm, _: arm.role,
    "kind": lambda arm, _: arm.control or arm.role,
    "prompts": lambda _, figures: str(figures.samples),
    "decode tok/s": lambda _, figures: number_text(figures.decode_tokens_per_s),
    "end to end": lambda _, figures: number_text(figures.end_to_end_tokens_per_s),
    "acceptance length": lambda _, figures: number_text(figures.acceptance_length),
    "runaway": lambda _, figures: str(figures.runaway_samples),
    "recall": lambda _, figures: number_text(figures.recall),
    "bits": lambda _, figures: number_text(figures.stored_bits_per_value),
    "KV resident": lambda _, figures: bytes_text(figures.max_resident_bytes),
    "distortion K": lambda _, figures: number_text(figures.key_distortion),
    "V": lambda _, figures: number_text(figures.value_distortion),
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
