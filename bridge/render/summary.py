"""A judged result as the Markdown summary of a workflow run: verdict, evidence, broken rules.

The figures are those that `kakeya_mac gate` shows, in the same tables. Text from the bus can be no Markdown,
no HTML and no link: whatever is not a plain character of it is written as its number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bridge.protocol.result import Status, Verdict
from bridge.protocol.sanitize import clean_line
from bridge.render.evidence import evidence_tables

if TYPE_CHECKING:
    from bridge.client.fetch import Judged

# GitHub shows no more than 1 MiB of a step's summary, and then none of it.
MOST_CHARACTERS = 500_000
_LONGEST = 1000
_MOST_VIOLATIONS = 50
# A point may stand between digits: anywhere else it could be part of an address.
_OTHERS = re.compile(r"[^A-Za-z0-9 ,/()=+\x80-\U0010ffff.-]|(?<![0-9])\.|\.(?![0-9])")
_SIGNS = {
    Status.PASSED: "✅",
    Status.FAILED: "❌",
    Status.REFUSED: "⛔",
    Status.REJECTED: "⛔",
    Status.CANCELLED: "⏹️",
    Status.LOST: "❓",
}


def summary(
    nonce: str,
    verdict: Verdict | None,
    judged: Judged | None,
    *,
    place: tuple[str, str] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """What a run's page shows of one request.

    Args:
        nonce: The request.
        verdict: As it was judged where this is written; None: the request is left to an embedded runner.
        judged: The result; None: there is none of a runner.
        place: Result commit and the ref it stands on; None: nothing stands.
        notes: Sentences to add.
    """
    lines: list[str] = []
    if verdict is None:
        lines += [f"## kakeya-mac: {escaped(nonce)} is left alone", ""]
        lines += ["It asks for the transport `embedded`: a runner's daemon takes it, not a workflow.", ""]
        return "\n".join(lines)
    result = None if judged is None else judged.believed.result
    preset = "" if result is None or result.preset is None else f" {escaped(result.preset)}"
    lines += [f"## {_SIGNS[verdict.status]} {verdict.status.upper()}{preset}", ""]
    lines += _markdown(("kakeya-mac", ""), list(_facts(nonce, verdict, judged, place).items()))
    for note in notes:
        lines += [escaped(note), ""]
    if verdict.violations:
        lines += ["### Broken rules", ""]
        shown = verdict.violations[:_MOST_VIOLATIONS]
        rules = [(each.code, each.message, each.file or "") for each in shown]
        lines += _markdown(("rule", "what is wrong", "file"), rules)
        if len(verdict.violations) > len(shown):
            lines += [f"... and {len(verdict.violations) - len(shown)} more", ""]
    if judged is not None:
        for path, judgement in judged.judgements.items():
            lines += [f"### Evidence: {escaped(path)}", ""]
            for table in evidence_tables(judgement):
                lines += _markdown(table.headings, table.rows)
    text = "\n".join(lines)
    if len(text) <= MOST_CHARACTERS:
        return text
    return text[:MOST_CHARACTERS].rpartition("\n")[0] + "\n\n... cut here; the whole is in the result\n"


def escaped(text: str, *, limit: int = _LONGEST) -> str:
    """A text from the bus as one line of Markdown that shows it and does nothing else."""
    line = clean_line(text, limit=limit)
    return _OTHERS.sub(lambda match: f"&#{ord(match[0])};", line)


def _facts(
    nonce: str, verdict: Verdict, judged: Judged | None, place: tuple[str, str] | None
) -> dict[str, str]:
    facts = {"request": nonce, "verdict": f"{verdict.status}/{verdict.reason}"}
    if verdict.message:
        facts["message"] = verdict.message
    if judged is not None:
        result = judged.believed.result
        if result.verdict.status is not verdict.status:
            facts["the runner said"] = f"{result.verdict.status}/{result.verdict.reason}"
        facts |= {
            "parameters": ", ".join(f"{name} {value}" for name, value in result.params.items()) or "none",
            "workload": result.workload_sha or "not readable",
            "ran on": f"{result.runner.name} (kakeya-mac {result.runner.version}), attempt {result.attempt}",
            "took": ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.phase_seconds.items()),
            "written by": judged.believed.sentence,
        }
    if place is not None:
        facts["result"] = f"{place[0]} on {place[1].removeprefix('refs/heads/')}"
    return facts


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield _row(headings)
    yield f"|{' --- |' * len(headings)}"
    for row in rows:
        yield _row(row)
    yield ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(escaped(cell) for cell in cells)} |"
