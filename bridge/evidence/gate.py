"""The gate: a pure function from a report's bytes to a judgement. No warnings, no modes, no clock.

Parse, recompute every figure from the rows, apply every rule of the registry. A report is accepted when no
rule is broken; whatever the gate does not know is a broken rule. It cannot tell whether a program that was
free to write any rows wrote true ones: see `request.engine_source` and the signature of the result.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from bridge.errors import EvidenceError
from bridge.evidence.figures import Binding, Case, summarise
from bridge.evidence.model import Report, Summary
from bridge.evidence.parse import MAX_BYTES, is_report, parse
from bridge.evidence.rules import RULES
from bridge.evidence.rules.claims import ClaimFigure, claim_figures
from bridge.protocol.result import Violation

__all__ = ["Binding", "Judgement", "judge", "judge_file"]

MESSAGES_PER_RULE = 10
MESSAGE_CHARACTERS = 2000


@dataclass(frozen=True)
class Judgement:
    """What the gate says of one report; `figures` is recomputed from the rows.

    Without a kind, claims, figures and a report where it could not be read.
    """

    accepted: bool
    kind: str | None
    violations: tuple[Violation, ...]
    claims: tuple[ClaimFigure, ...] = ()
    figures: Summary | None = None
    report: Report | None = None

    def to_document(self) -> dict[str, object]:
        """The judgement as plain JSON values, without the report's rows."""
        return {
            "accepted": self.accepted,
            "kind": self.kind,
            "violations": [each.model_dump(include={"code", "message"}) for each in self.violations],
            "claims": [asdict(claim) for claim in self.claims],
            "figures": None if self.figures is None else self.figures.model_dump(mode="json"),
        }


def judge(report: bytes, *, binding: Binding | None = None) -> Judgement:
    """Judge a report, by itself or as that of a request. Hostile bytes give violations, no exception."""
    parsed, violations = parse(report)
    if parsed is None:
        return Judgement(accepted=False, kind=None, violations=violations)
    case = Case(parsed, binding, summarise(parsed))
    broken: list[Violation] = []
    for code, rule in RULES.items():
        messages = list(islice(rule.check(case), MESSAGES_PER_RULE + 1))
        if len(messages) > MESSAGES_PER_RULE:
            messages[-1] = "... and more of the same"
        broken += [Violation(code=code, message=message[:MESSAGE_CHARACTERS]) for message in messages]
    return Judgement(not broken, parsed.kind, tuple(broken), claim_figures(case), case.figures, parsed)


def find_reports(folder: Path) -> tuple[list[Path], list[Path]]:
    """The reports among the JSON files of a folder and its subfolders, and the other JSON files, sorted."""
    found = {path: is_report(_read(path)) for path in sorted(folder.rglob("*.json")) if path.is_file()}
    return [path for path in found if found[path]], [path for path in found if not found[path]]


def judge_file(path: Path, *, binding: Binding | None = None) -> Judgement:
    """Judge a report file; EvidenceError where it cannot be read."""
    return judge(_read(path), binding=binding)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)  # one byte too many is enough to refuse it
    except OSError as error:
        message = f"cannot read the report {str(path)!r}: {error.strerror or error}"
        raise EvidenceError(message, "Give the path of an evidence report.") from None
