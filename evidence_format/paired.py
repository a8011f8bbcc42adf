"""The record of a paired run, ``kakeya.paired/1``: two workloads by turns in one job. Types, strict parsing.

The runner, which starts and times every run, writes it. Everything in `summary` follows from the runs
(`bridge.evidence.paired`).
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError

from evidence_format.model import Digest, Frozen, ReportRequest, Sha, Word
from evidence_format.parse import Unreadable, check_values, faults_of, load

NAME = "paired.json"
SCHEMA_ID = "kakeya.paired/1"
MAX_BYTES = 1024 * 1024
_START = 200  # bytes among which a record names its schema

SideName = Literal["workload", "against"]
Metric = Literal["command_s", "decode_s_per_token"]
Outcome = Literal["faster", "slower", "no_difference", "inconclusive"]
Value = Annotated[float, Field(ge=1e-9, le=1e9)]
Moment = Annotated[
    str,
    Field(pattern=r"^[0-9]{4}(-[0-9]{2}){2}T([0-9]{2}:){2}[0-9]{2}(\.[0-9]{1,6})?Z$"),
    AfterValidator(lambda text: text if datetime.fromisoformat(text) else ""),
]


class PairedSide(Frozen):
    """What one side ran: a commit and the preset's parameters, defaults included."""

    workload_sha: Sha
    params: Annotated[
        dict[Word, bool | int | float | Annotated[str, Field(max_length=4096)]], Field(max_length=64)
    ]


class PairedRun(Frozen):
    """One run of the preset's command: when it started, how long it took (s), what was measured.

    `value` is that of the record's metric, in seconds. `report_sha256` is that of the report that the run
    wrote, which the gate accepted; null where the preset promises none.
    """

    side: SideName
    warm_up: bool
    started_at: Moment
    seconds: Value
    value: Value
    exit_code: int
    report_sha256: Digest | None


class PairedSummary(Frozen):
    """What the runs show. `ratio`: time of the workload over that of the other side; above 1 it is slower.

    `interval` has the ratio with the stated `confidence`. `smallest_effect` is the relative difference that a
    run with this noise finds 99 times in 100. Both are null where the blocks are too few to tell.
    """

    blocks: Annotated[int, Field(ge=0)]
    ratio: Value | None
    interval: tuple[Value, Value] | None
    confidence: float
    smallest_effect: Value | None
    verdict: Outcome


class Paired(Frozen):
    """The whole record: `workload` is what was asked for, `against` what it is compared with."""

    schema_id: Annotated[Literal["kakeya.paired/1"], Field(alias="schema")]
    request: ReportRequest
    preset: Word
    metric: Metric
    workload: PairedSide
    against: PairedSide
    runs: Annotated[tuple[PairedRun, ...], Field(max_length=1000)]
    summary: PairedSummary


def is_paired(data: bytes) -> bool:
    """Whether a file is meant as a paired record, of any version."""
    return b'"kakeya.paired/' in data[:_START]


def parse_paired(data: bytes) -> Paired:
    """Read a record; Unreadable where the bytes are none of this schema, or say two things at once."""
    check_values(load(data, MAX_BYTES))
    try:
        return Paired.model_validate_json(data)
    except ValidationError as error:
        raise Unreadable(*faults_of(error)) from None
