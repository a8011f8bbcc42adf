"""The verification record, ``kakeya.verification/1``, while a replay fills it; the format has its parts."""

from dataclasses import dataclass, field
from typing import Any, Literal

from evidence_format.model import ReportRequest
from evidence_format.verification import Draw, ReplayedRow, ReplayFinding, Subject, Tolerances

SCHEMA = "kakeya.verification/1"
LONGEST = 4000  # characters of a finding's message
Check = Literal["models", "prompts", "rows", "text", "tokens", "rounds", "memory"]


def finding(where: str, check: Check, message: str) -> ReplayFinding:
    """What the report says of a row (``arm/prompt_id``) or a model (its role), and the replay does not."""
    return ReplayFinding(where=where, check=check, message=message[:LONGEST])


@dataclass
class Record:
    """The whole record; ``request`` binds it to the request that a runner answers with it."""

    started_at: str
    report: Subject
    draw: Draw
    tolerances: Tolerances
    environment: dict[str, Any]
    request: ReportRequest | None = None
    rows: list[ReplayedRow] = field(default_factory=list)
    findings: list[ReplayFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    finished_at: str = ""

    def document(self) -> dict[str, Any]:
        """As it is in the file."""
        return {
            "schema": SCHEMA,
            "verdict": "refuted" if self.findings else "confirmed",
            "started_at": self.started_at,
            "report": self.report.model_dump(),
            "draw": self.draw.model_dump(),
            "tolerances": self.tolerances.model_dump(),
            "environment": self.environment,
            "request": self.request and self.request.model_dump(),
            "rows": [row.model_dump() for row in self.rows],
            "findings": [each.model_dump() for each in self.findings],
            "notes": self.notes,
            "finished_at": self.finished_at,
        }
