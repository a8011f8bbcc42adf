"""What a runner answers: status, reason, and the record that lets a reader check both.

`Result` is the content of ``result.json``; `RunStatus` is the content of a claim's ``status.json``. Both are
read back from a remote that anyone with push rights can write to, so parsing is as strict as a manifest's.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bridge.errors import ManifestError, ResultError
from bridge.manifest import Nonce, ParamName, ParamValue, Sha, load_strict

RESULT_ROOT = ".mac-bridge/results"
RESULT_NAME = "result.json"
RESULT_SIGNATURE_NAME = "result.json.sig"
STATUS_NAME = "status.json"
SCHEMA_VERSION = 1
MAX_BYTES = 4 * 1024 * 1024

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Record = TypeVar("Record", bound=BaseModel)
Text = Annotated[str, Field(max_length=4000)]


class Status(StrEnum):
    """How a request ended. A closed set."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    LOST = "lost"


EXIT_CODES: dict[Status, int] = {
    Status.PASSED: 0,
    Status.FAILED: 1,
    Status.REFUSED: 2,
    Status.REJECTED: 3,
    Status.CANCELLED: 5,
    Status.LOST: 5,
}


class Reason(StrEnum):
    """Why a request ended as it did. A closed set."""

    OK = "ok"
    # refused
    BAD_COMMIT = "bad_commit"
    BAD_MANIFEST = "bad_manifest"
    UNKNOWN_PRESET = "unknown_preset"
    BAD_PARAMETER = "bad_parameter"
    POLICY = "policy"
    BAD_SIGNATURE = "bad_signature"
    EXPIRED = "expired"
    WRONG_AUDIENCE = "wrong_audience"
    REPLAYED = "replayed"
    MODEL_MISSING = "model_missing"
    MACHINE_UNFIT = "machine_unfit"
    BAD_WORKLOAD = "bad_workload"
    # failed
    EXIT_CODE = "exit_code"
    TIMEOUT = "timeout"
    OUTPUT_LIMIT = "output_limit"
    NO_EVIDENCE = "no_evidence"
    RUNNER_ERROR = "runner_error"
    # rejected
    EVIDENCE = "evidence"
    # cancelled, lost
    REQUESTED = "requested"
    SHUTDOWN = "shutdown"
    LEASE_LOST = "lease_lost"
    ATTEMPTS = "attempts"


class Phase(StrEnum):
    """Where a request is, as its heartbeat says. A closed set."""

    QUEUED = "queued"
    CLAIMED = "claimed"
    WORKSPACE = "workspace"
    RUNNING = "running"
    GATING = "gating"
    PUBLISHING = "publishing"
    DONE = "done"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Violation(_Record):
    """One gate rule that a report broke."""

    code: Annotated[str, Field(pattern=r"^[A-Z][A-Z_]{1,63}$")]
    message: Text
    file: str | None = None


class Verdict(_Record):
    """Status, reason, the sentence for people, and the rules broken (empty unless rejected)."""

    status: Status
    reason: Reason
    message: Text = ""
    violations: Annotated[tuple[Violation, ...], Field(max_length=1000)] = ()


class Progress(_Record):
    """Work done so far, as the child said in its ``progress N/M PHASE DETAIL`` lines."""

    done: Annotated[int, Field(ge=0)]
    total: Annotated[int, Field(ge=0)]
    step: Annotated[str, Field(max_length=200)] = ""


class RunnerFacts(_Record):
    """Who ran it: the runner's name, its id, and facts of the machine (strings, numbers, booleans)."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    version: Annotated[str, Field(max_length=64)]
    machine: Annotated[dict[str, str | int | float | bool | None], Field(max_length=64)] = {}


class Command(_Record):
    """One child process: fixed argv, exit code (negative: killed by that signal), seconds, log file."""

    argv: Annotated[tuple[str, ...], Field(max_length=256)]
    exit_code: int | None
    seconds: Annotated[float, Field(ge=0)]
    log: str
    timed_out: bool = False
    truncated: bool = False


class File(_Record):
    """A file beside ``result.json``, by its path relative to it."""

    path: Annotated[
        str, Field(max_length=200, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*$")
    ]
    sha256: Digest
    bytes: Annotated[int, Field(ge=0)]
    role: Annotated[str, Field(pattern=r"^(evidence|log|report|other)$")] = "other"


class Result(_Record):
    """The answer to one request; ``result.json`` on the result branch."""

    schema_version: Annotated[int, Field(ge=1, le=1)] = SCHEMA_VERSION
    nonce: Nonce
    request_commit: Sha
    workload_sha: Sha | None
    preset: Annotated[str, Field(max_length=64)] | None
    preset_digest: Digest | None
    params: dict[ParamName, ParamValue] = {}
    engine_source: Annotated[str, Field(pattern=r"^(installed|workload)$")] | None
    runner: RunnerFacts
    attempt: Annotated[int, Field(ge=1)]
    started_at: str
    finished_at: str
    phase_seconds: dict[str, float] = {}
    commands: tuple[Command, ...] = ()
    files: Annotated[tuple[File, ...], Field(max_length=1000)] = ()
    verdict: Verdict
    tools: dict[str, str] = {}

    def to_bytes(self) -> bytes:
        """The exact bytes that are committed and signed."""
        return to_json_bytes(self)


class RunStatus(_Record):
    """A claim's heartbeat: who holds it, since when, and how far the job is."""

    schema_version: Annotated[int, Field(ge=1, le=1)] = SCHEMA_VERSION
    nonce: Nonce
    request_commit: Sha
    runner: Annotated[str, Field(max_length=64)]
    runner_id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    pid: Annotated[int, Field(ge=0)]
    unique: Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")]
    attempt: Annotated[int, Field(ge=1)]
    beat: Annotated[int, Field(ge=0)]
    lease_s: Annotated[float, Field(gt=0)]
    updated_at: str
    phase: Phase
    elapsed_s: Annotated[float, Field(ge=0)]
    progress: Progress | None = None
    log_tail: Annotated[tuple[Annotated[str, Field(max_length=500)], ...], Field(max_length=40)] = ()

    def to_bytes(self) -> bytes:
        """The exact bytes of the claim's ``status.json``."""
        return to_json_bytes(self)


def to_json_bytes(record: BaseModel) -> bytes:
    """A record as UTF-8 JSON with sorted keys and one trailing newline."""
    return (json.dumps(record.model_dump(mode="json"), indent=2, sort_keys=True) + "\n").encode()


def parse_result(data: bytes) -> Result:
    """Read a ``result.json`` from the bus.

    Raises:
        ResultError: The bytes are not a result of this schema.
    """
    return _parse(Result, data, "result.json")


def parse_status(data: bytes) -> RunStatus:
    """Read a claim's ``status.json`` from the bus.

    Raises:
        ResultError: The bytes are not a status of this schema.
    """
    return _parse(RunStatus, data, "status.json")


def _parse(kind: type[Record], data: bytes, what: str) -> Record:
    try:
        document: dict[str, Any] = load_strict(data, what=what, limit=MAX_BYTES)
        return kind.model_validate(document)
    except ManifestError as error:
        raise ResultError(error.message) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or what
        raise ResultError(f"{what}: {where}: {first['msg']}") from None
