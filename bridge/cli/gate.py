"""``kakeya_mac gate``: judge evidence files, with the same gate a runner uses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from bridge.cli import show
from bridge.cli.options import json_option
from bridge.errors import EvidenceError, MachineError
from bridge.evidence.gate import Binding, Judgement, find_reports, judge_file
from bridge.evidence.threshold import Threshold, figures_of, parse_threshold
from bridge.render.evidence import as_rich, evidence_tables
from evidence_format.rules import ELSEWHERE, RULES


@click.command(
    epilog="""\b
Examples:
  kakeya_mac gate out/report.json benchmarks/results/ --json
  kakeya_mac gate report.json --nonce 20260301t120000z0123456789ab
  kakeya_mac gate out/ --threshold 'ratio>=1.5' --threshold 'recall>0.9'
  kakeya_mac gate --explain SPEEDUP_SAMPLES

A threshold is NAME OP NUMBER with >=, <=, > or <. NAME is a figure of what is tested, such as ratio (speed
against the baseline; of a paired run the time ratio), acceptance_length, decode_tokens_per_s, recall or
max_resident_bytes; each value of it must hold.

Exit code 0: every report accepted, every threshold met; 1: a threshold is not met; 3: at least one report
rejected or not readable, or a folder without any."""
)
@click.argument("paths", metavar="[FILE|FOLDER]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--nonce", metavar="NONCE", help="The request the reports must belong to.")
@click.option("--workload-sha", metavar="SHA", help="The workload commit they must belong to.")
@click.option(
    "--record", type=click.Path(path_type=Path), metavar="FILE", help="Write the judgement as JSON, too."
)
@click.option(
    "--threshold", "thresholds", multiple=True, metavar="TEXT", help="What a figure must reach; repeatable."
)
@click.option("--explain", "code", metavar="CODE", help="When a rule (or all) rejects, and what to do.")
@json_option
def gate(
    paths: tuple[Path, ...],
    nonce: str | None,
    workload_sha: str | None,
    record: Path | None,
    thresholds: tuple[str, ...],
    code: str | None,
    as_json: bool,
) -> int:
    """Judge evidence reports: recompute every claim from the rows, and name each rule that is broken.

    Of a folder every report in it and below it is judged; other JSON files there are skipped and counted.
    """
    if code is not None:
        return _explain(code, as_json)
    if not paths:
        raise click.UsageError("Give at least one report, or --explain CODE.")
    if workload_sha is not None and nonce is None:
        raise click.UsageError("--workload-sha needs --nonce: a report belongs to a request.")
    limits = [parse_threshold(text) for text in thresholds]
    binding = None if nonce is None else Binding(nonce=nonce, workload_sha=workload_sha)
    files, skipped = _expand_paths(paths)
    judgements = [(path, judge_file(path, binding=binding)) for path in files]
    lines: list[str | Table] = []
    for path, judgement in judgements:
        verdict = "accepted" if judgement.accepted else "REJECTED"
        lines.append(f"{path}: {verdict} ({judgement.kind or 'not a report'})")
        lines += map(as_rich, evidence_tables(judgement))
    if skipped:
        lines.append(f"skipped {len(skipped)} JSON files that are no evidence reports")
    found = [_reached(limit, [judgement for _, judgement in judgements]) for limit in limits]
    lines += [f"threshold {each['threshold']}: {each['finding']}" for each in found]
    missed = not all(each["met"] for each in found)
    accepted = all(judgement.accepted for _, judgement in judgements)
    document = {
        "status": "accepted" if accepted else "rejected",
        "files": [{"file": str(path), **judgement.to_document()} for path, judgement in judgements],
        "skipped": [str(path) for path in skipped],
        "thresholds": found,
    }
    if record is not None:
        try:
            record.write_text(json.dumps({"files": document["files"]}) + "\n", encoding="utf-8")
        except OSError as error:
            raise MachineError(f"cannot write {record}: {error.strerror or error}") from None
    show(as_json, document, lines, untrusted=("files", "skipped"))
    return 3 if not accepted else 1 if missed else 0


def _reached(limit: Threshold, judgements: Sequence[Judgement]) -> dict[str, Any]:
    """Whether a threshold is met: by each value of its figure, and there is one."""
    figures = [figures_of(judgement) for judgement in judgements]
    values = [value for each in figures for value in each.get(limit.name, ())]
    met = bool(values) and all(map(limit.holds, values))
    finding = f"{'met' if met else 'NOT MET'} by {', '.join(f'{value:.6g}' for value in values)}"
    if not values:
        known = sorted({name for each in figures for name in each})
        finding = f"NOT MET: no report has this figure; there are {', '.join(known) or 'none'}"
    return {"threshold": str(limit), "met": met, "values": values, "finding": finding}


def _expand_paths(paths: tuple[Path, ...]) -> tuple[list[Path], list[Path]]:
    """Files that are named, and reports of folders that are named; and what was skipped in these."""
    files: list[Path] = []
    skipped: list[Path] = []
    for path in paths:
        reports, others = find_reports(path) if path.is_dir() else ([path], [])
        if not reports:
            raise EvidenceError(
                f"no evidence report in the folder {str(path)!r} ({len(others)} other JSON files)",
                "Give the path of a report, or of a folder that holds one.",
            )
        files += reports
        skipped += others
    return list(dict.fromkeys(files)), skipped


def _explain(code: str, as_json: bool) -> int:
    known = {**ELSEWHERE, **RULES}
    name = code.strip().upper().replace("-", "_")
    if name not in (*known, "ALL"):
        near = get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"rules: {', '.join(known)}"
        raise click.BadParameter(f"no rule is called {code!r}; {hint}", param_hint="--explain")
    entries = [
        {"code": each, "rejected_when": known[each].rejected_when, "remedy": known[each].remedy}
        for each in (known if name == "ALL" else [name])
    ]
    lines = [f"{each['code']}: rejected when {each['rejected_when']}\n  {each['remedy']}" for each in entries]
    return show(as_json, {"rules": entries} if name == "ALL" else entries[0], lines)
