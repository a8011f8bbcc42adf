"""What a runner answers: status, reason, and the record that lets a reader check both.

Every text of a result is one line without control and bidirectional characters (written so, refused
otherwise); only a command's argv is kept as it ran, so it is never shown uncleaned.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, Field

from bridge.errors import ResultError
from bridge.protocol import manifest
from bridge.protocol.sanitize import one_line

RESULT_ROOT = ".mac-bridge/results"
RESULT_NAME = "result.json"
RESULT_SIGNATURE_NAME = "result.json.sig"
STATUS_NAME = "status.json"
STATUS_SIGNATURE_NAME = "status.json.sig"
# DSSE envelopes next to a result, which cannot list them because they name its digest.
ATTESTATIONS = "attestations"
ATTESTATION_NAMES = tuple(f"{ATTESTATIONS}/{name}.json" for name in ("svr", "test-result", "provenance"))
SCHEMA_VERSION = 1
MAX_BYTES = 4 * 1024 * 1024
# Facts of a runner's machine by which a client tells what ran: a digest of the engine's source, and the
# weights' digest of a model, behind its name in the preset.
ENGINE_FACT = "engine_sha256"
WEIGHTS_FACT = "weights:"
# The Ed25519 public key of the attestations next to a result, 64 hex digits.
ATTESTATION_KEY_FACT = "attestation_key"

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
    Status.REFUSED: 8,  # not 2, which is a wrong command line
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
    QUOTA = "quota"
    MODEL_MISSING = "model_missing"
    MACHINE_UNFIT = "machine_unfit"
    BAD_WORKLOAD = "bad_workload"
    OUTSIDE_HOURS = "outside_hours"
    # failed
    EXIT_CODE = "exit_code"
    TIMEOUT = "timeout"
    OUTPUT_LIMIT = "output_limit"
    RESOURCE_LIMIT = "resource_limit"
    NO_EVIDENCE = "no_evidence"
    RUNNER_ERROR = "runner_error"
    # rejected
    EVIDENCE = "evidence"
    TAMPERED = "tampered"
    UNTRUSTED = "untrusted"
    BINDING = "binding"
    # cancelled, lost
    REQUESTED = "requested"
    SHUTDOWN = "shutdown"
    LEASE_LOST = "lease_lost"
    ATTEMPTS = "attempts"
    RUN_LOST = "run_lost"
    NO_RUNNER = "no_runner"


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
    model_config = manifest.RECORD


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

    done: Annotated[int, Field(ge=0, le=1 << 53)]
    total: Annotated[int, Field(ge=0, le=1 << 53)]
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
    """A file next to ``result.json``, by its path relative to it."""

    path: Annotated[
        str, Field(max_length=200, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*$")
    ]
    sha256: manifest.Digest
    bytes: Annotated[int, Field(ge=0)]
    role: Annotated[str, Field(pattern=r"^(evidence|log|report|other)$")] = "other"


class Result(_Record):
    """The answer to one request; ``result.json`` on the result branch."""

    schema_version: manifest.SchemaVersion = SCHEMA_VERSION
    nonce: manifest.Nonce
    request_commit: manifest.Sha
    workload_sha: manifest.Sha | None
    preset: manifest.PresetName | None
    preset_digest: manifest.Digest | None
    params: dict[manifest.ParamName, manifest.ParamValue] = {}
    engine_source: Annotated[str, Field(pattern=r"^(installed|workload)$")] | None
    runner: RunnerFacts
    attempt: Annotated[int, Field(ge=1, le=1_000_000)]
    started_at: manifest.Moment
    finished_at: manifest.Moment
    phase_seconds: dict[str, float] = {}
    commands: tuple[Command, ...] = ()
    files: Annotated[tuple[File, ...], Field(max_length=1000)] = ()
    verdict: Verdict
    tools: dict[str, str] = {}

    def to_bytes(self) -> bytes:
        """The exact bytes that are committed and signed. Texts are brought onto one line without controls."""
        return _json_bytes(manifest.with_texts(self.model_dump(mode="json"), one_line))


class RunStatus(_Record):
    """A claim's heartbeat: who holds it, since when, and how far the job is."""

    schema_version: manifest.SchemaVersion = SCHEMA_VERSION
    nonce: manifest.Nonce
    request_commit: manifest.Sha
    runner: Annotated[str, Field(max_length=64)]
    runner_id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    pid: Annotated[int, Field(ge=0, le=1 << 32)]
    unique: Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")]
    attempt: Annotated[int, Field(ge=1, le=1_000_000)]
    beat: Annotated[int, Field(ge=0, le=1 << 53)]
    lease_s: Annotated[float, Field(gt=0)]
    session: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$", description="the runner process")]
    updated_at: manifest.Moment
    phase: Phase
    elapsed_s: Annotated[float, Field(ge=0)]
    progress: Progress | None = None
    log_tail: Annotated[tuple[Annotated[str, Field(max_length=500)], ...], Field(max_length=40)] = ()

    def to_bytes(self) -> bytes:
        """The exact bytes of the claim's ``status.json``."""
        return _json_bytes(self.model_dump(mode="json"))


def parse_result(data: bytes) -> Result:
    """Read a ``result.json`` from the bus; a `ResultError` says what is wrong with it."""
    return manifest.parse_document(Result, data, what=RESULT_NAME, limit=MAX_BYTES, error=ResultError)


def parse_status(data: bytes) -> RunStatus:
    """Read a claim's ``status.json``; a `ResultError` says what is wrong. Clean its texts before use."""
    return manifest.parse_document(
        RunStatus, data, what=STATUS_NAME, limit=MAX_BYTES, error=ResultError, plain=False
    )


def _json_bytes(document: Any) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
