"""The verification record, ``kakeya.verification/1``: what a replay of a report found. Types, strict parsing.

``kakeya_engine verify`` writes it. It says which report was replayed (by sha256), which rows were drawn, what
was found, on which machine; whether its author may be believed is for the signature around it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from evidence_format.model import Amount, Digest, Frozen, Nonce, Positive, ReportRequest, Word
from evidence_format.parse import Fault, Unreadable, check_values, faults_of, load

NAME = "verification.json"
SIGNATURE_NAME = "verification.json.sig"
MAX_BYTES = 8 * 1024 * 1024

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Moment = Annotated[str, Field(pattern=r"^[0-9]{4}(-[0-9]{2}){2}T([0-9]{2}:){2}[0-9]{2}(\.[0-9]{1,6})?Z$")]
Text = Annotated[str, Field(max_length=4000)]
Check = Literal["models", "prompts", "rows", "text", "tokens", "rounds", "memory"]


class Subject(Frozen):
    """The report that was replayed: sha256 of its bytes, kind, request, and the engine that wrote it."""

    sha256: Digest
    kind: Word
    nonce: Nonce | None
    source_sha256: Digest


class Draw(Frozen):
    """How rows were drawn: the number that repeats it, where that came from, how many, of how many."""

    seed: Count
    source: Literal["os", "given"]
    sample: Positive
    rows: Count


class Tolerances(Frozen):
    """What may differ without a finding.

    `rounds`: share of rounds that confirm another number of drafts, one of a row in any case. `rounding`: how
    many times the measured rounding error a token may lie below the best. `resident`: the share by which
    resident bytes may fall short. `distortion`: relative. `accepted`: the share by which an arm's rounds may
    claim more accepted drafts than were found, plus one block.
    """

    rounds: Amount
    rounding: Amount
    resident: Amount
    distortion: Amount
    accepted: Amount


class Tokens(Frozen):
    """A row's tokens against the target: how many, the largest gap to the best logit, where, the limit."""

    checked: Count
    forward: Literal["one", "rounds"]
    largest_gap: float
    at: Count
    allowed: Amount


class Rounds(Frozen):
    """A row's rounds drafted again; a `reason` says why they were not."""

    replayed: Count
    differing: Count
    claimed_accepted: Count
    accepted: Count
    reason: Word | None


class ReplayedRow(Frozen):
    """A row that the models were run for; `drawn`, or checked in addition."""

    arm: Word
    prompt_id: Word
    drawn: bool
    tokens: Tokens
    rounds: Rounds


class ReplayFinding(Frozen):
    """What the report says and the replay does not; `where` is ``arm/prompt_id`` or a model's role."""

    where: Annotated[str, Field(min_length=1, max_length=1000)]
    check: Check
    message: Text


class Verification(Frozen):
    """The whole record. `environment` is the block of an evidence report, of the machine that verified."""

    schema_id: Annotated[Literal["kakeya.verification/1"], Field(alias="schema")]
    verdict: Literal["confirmed", "refuted"]
    started_at: Moment
    finished_at: Moment
    report: Subject
    draw: Draw
    tolerances: Tolerances
    environment: dict[str, Any]
    request: ReportRequest | None
    rows: Annotated[tuple[ReplayedRow, ...], Field(max_length=20_000)]
    findings: Annotated[tuple[ReplayFinding, ...], Field(max_length=20_000)]
    notes: Annotated[tuple[Text, ...], Field(max_length=100)]

    @property
    def confirmed(self) -> bool:
        """Whether nothing was found."""
        return self.verdict == "confirmed" and not self.findings

    @property
    def refuted_rows(self) -> tuple[str, ...]:
        """What something was found of, each once."""
        return tuple(dict.fromkeys(finding.where for finding in self.findings))


def parse_verification(data: bytes) -> Verification:
    """Read a record; Unreadable where the bytes are none of this schema, or say two things at once."""
    check_values(load(data, MAX_BYTES), largest=1 << 63)  # a seed may be so large
    try:
        record = Verification.model_validate_json(data)
    except ValidationError as error:
        raise Unreadable(*faults_of(error)) from None
    if (record.verdict == "refuted") != bool(record.findings):
        message = f"the verdict is {record.verdict} with {len(record.findings)} findings"
        raise Unreadable(Fault("SCHEMA", message))
    return record
