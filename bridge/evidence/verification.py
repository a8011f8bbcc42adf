"""The verification record, ``kakeya.verification/1``: what a replay of a report found. Types, strict parsing.

``kakeya_engine verify`` writes it. It says which report was replayed (by sha256), which rows were drawn, what
was found, on which machine; whether its author may be believed is for the signature around it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bridge.errors import EvidenceError, ManifestError
from bridge.protocol.manifest import Nonce, Sha, first_fault, load_strict
from bridge.protocol.result import Digest
from bridge.protocol.sanitize import unsafe_character

SCHEMA_ID = "kakeya.verification/1"
NAME = "verification.json"
SIGNATURE_NAME = "verification.json.sig"
MAX_BYTES = 8 * 1024 * 1024

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Size = Annotated[float, Field(ge=0)]
Moment = Annotated[str, Field(pattern=r"^[0-9]{4}(-[0-9]{2}){2}T([0-9]{2}:){2}[0-9]{2}(\.[0-9]{1,6})?Z$")]
Word = Annotated[str, Field(min_length=1, max_length=400)]
Text = Annotated[str, Field(max_length=4000)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Subject(_Frozen):
    """The report that was replayed: sha256 of its bytes, kind, request, and the engine that wrote it."""

    sha256: Digest
    kind: Word
    nonce: Nonce | None
    source_sha256: Digest


class Draw(_Frozen):
    """How rows were drawn: the number that repeats it, where that came from, how many, of how many."""

    seed: Count
    source: Literal["os", "given"]
    sample: Annotated[int, Field(ge=1)]
    rows: Count


class Tolerances(_Frozen):
    """What may differ without a finding.

    `rounds`: share of rounds that confirm another number of drafts, one of a row in any case. `rounding`: how
    many times the measured rounding error a token may lie below the best. `resident`: the share by which
    resident bytes may fall short. `distortion`: relative. `accepted`: the share by which an arm's rounds may
    claim more accepted drafts than were found, plus one block.
    """

    rounds: Size
    rounding: Size
    resident: Size
    distortion: Size
    accepted: Size


class Request(_Frozen):
    """The request that was answered with this record."""

    nonce: Nonce
    workload_sha: Sha
    preset_digest: Digest
    engine_source: Literal["installed", "workload"]


class Tokens(_Frozen):
    """A row's tokens against the target: how many, by one forward or along the rounds, the largest gap to the
    best logit, where, and what was allowed.
    """

    checked: Count
    forward: Literal["one", "rounds"]
    largest_gap: float
    at: Count
    allowed: Size


class Rounds(_Frozen):
    """A row's rounds drafted again; a `reason` says why they were not."""

    replayed: Count
    differing: Count
    claimed_accepted: Count
    accepted: Count
    reason: Word | None


class Row(_Frozen):
    """A row that the models were run for; `drawn`, or looked at beside those."""

    arm: Word
    prompt_id: Word
    drawn: bool
    tokens: Tokens
    rounds: Rounds


class Finding(_Frozen):
    """What the report says and the replay does not; `where` is ``arm/prompt_id`` or a model's role."""

    where: Annotated[str, Field(min_length=1, max_length=1000)]
    check: Literal["models", "prompts", "rows", "text", "tokens", "rounds", "memory"]
    message: Text


class Verification(_Frozen):
    """The whole record. `environment` is the block of an evidence report, of the machine that verified."""

    schema_id: Annotated[Literal["kakeya.verification/1"], Field(alias="schema")]
    verdict: Literal["confirmed", "refuted"]
    started_at: Moment
    finished_at: Moment
    report: Subject
    draw: Draw
    tolerances: Tolerances
    environment: dict[str, Any]
    request: Request | None
    rows: Annotated[tuple[Row, ...], Field(max_length=20_000)]
    findings: Annotated[tuple[Finding, ...], Field(max_length=20_000)]
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
    """Read a record.

    Raises:
        EvidenceError: The bytes are no record of this schema, or say two things at once.
    """
    try:
        document = load_strict(data, what=NAME, limit=MAX_BYTES)
        _refuse_unsafe(document)
        record = Verification.model_validate_json(json.dumps(document), strict=True)
    except ManifestError as error:
        raise EvidenceError(error.message) from None
    except ValidationError as error:
        raise EvidenceError(f"{NAME}: {first_fault(error, NAME)}") from None
    if (record.verdict == "refuted") != bool(record.findings):
        raise EvidenceError(f"{NAME}: the verdict is {record.verdict} with {len(record.findings)} findings")
    return record


def _refuse_unsafe(value: object) -> None:
    """Raise EvidenceError for a text that does not show as it is."""
    if isinstance(value, str) and (found := unsafe_character(value)) is not None:
        raise EvidenceError(f"{NAME}: the character U+{ord(found):04X} is not allowed in a text")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _refuse_unsafe(inner)
