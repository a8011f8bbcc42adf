"""What a runner answers: status, reason, and the record that lets a reader check both.

Every text of a result is one line without control and bidirectional characters (written so, refused
otherwise); only a command's argv is kept as it ran, so it is never shown uncleaned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

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


class Meaning(NamedTuple):
    """What a reason says: the status it goes with, when it is given, what to do about it."""

    status: Status
    when: str
    remedy: str


REASONS: dict[Reason, Meaning] = {
    Reason.OK: Meaning(
        Status.PASSED, "The job ended with exit code 0, and the gate accepted its report if it has one.", ""
    ),
    Reason.BAD_COMMIT: Meaning(
        Status.REFUSED,
        "The commit of the branch is no request, or changes more than a request does.",
        "Submit with `kakeya_mac run`; do not push to the branch of a request.",
    ),
    Reason.BAD_MANIFEST: Meaning(
        Status.REFUSED,
        "`request.json` breaks its schema, or is dated more than a day ahead of the Mac.",
        "Use a client of the Mac's version, and set the clock that is wrong.",
    ),
    Reason.UNKNOWN_PRESET: Meaning(
        Status.REFUSED,
        "The Mac has no preset of that name.",
        "`kakeya_mac presets --remote` lists what each Mac offers.",
    ),
    Reason.BAD_PARAMETER: Meaning(
        Status.REFUSED,
        "A value is missing, unknown or out of the preset's bounds, or names a file that the commit lacks.",
        "`kakeya_mac presets NAME` shows types, bounds and defaults.",
    ),
    Reason.POLICY: Meaning(
        Status.REFUSED,
        "The owner's `policy.toml` does not allow it: the preset, the values, the requester or the branch.",
        "Ask for what `kakeya_mac presets --remote` offers, or ask the owner, whom `kakeya_mac runner policy"
        " explain` tells which setting it was.",
    ),
    Reason.BAD_SIGNATURE: Meaning(
        Status.REFUSED,
        "The signature does not verify, or the Mac takes only requests of listed signers.",
        "`kakeya_mac key` shows your key; the owner adds it with `kakeya_mac runner signers add`.",
    ),
    Reason.EXPIRED: Meaning(
        Status.REFUSED,
        "No runner took it before `expires_at`.",
        "Submit it again (`kakeya_mac again HANDLE`), with a later `--expires` if the Mac is often busy.",
    ),
    Reason.WRONG_AUDIENCE: Meaning(
        Status.REFUSED,
        "It was made for another remote, or another spelling of this one.",
        "Have clients and runners use the same kind of address, and submit it again.",
    ),
    Reason.REPLAYED: Meaning(
        Status.REFUSED,
        "A request of this handle was answered before.",
        "Read that answer (`kakeya_mac result HANDLE`), or submit a new request.",
    ),
    Reason.QUOTA: Meaning(
        Status.REFUSED,
        "The requester has as many waiting as the owner allows.",
        "Wait for some to end, or cancel some.",
    ),
    Reason.MODEL_MISSING: Meaning(
        Status.REFUSED,
        "A model of the preset is not on the Mac, or its files are not whole.",
        "On the Mac: `kakeya_mac runner models check`, and `runner models add`.",
    ),
    Reason.MACHINE_UNFIT: Meaning(
        Status.REFUSED,
        "The machine cannot run the preset (system, sandbox, tools), or does not meet `--on`.",
        "The message names what it lacks; ask for another machine with `--on`.",
    ),
    Reason.BAD_WORKLOAD: Meaning(
        Status.REFUSED,
        "The files of the commit cannot be laid out: too many, too large, unsafe links or paths, Git LFS"
        " pointers.",
        "The message names the file; ask for a commit without it.",
    ),
    Reason.OUTSIDE_HOURS: Meaning(
        Status.REFUSED,
        "It came outside the owner's `hours`, and no request waits for them there.",
        "Submit it again at the time that the message names.",
    ),
    Reason.EXIT_CODE: Meaning(
        Status.FAILED,
        "The job ended with another exit code than 0.",
        "Read its log: `kakeya_mac logs HANDLE`.",
    ),
    Reason.TIMEOUT: Meaning(
        Status.FAILED,
        "The job did not end within the preset's time.",
        "Ask for less (fewer prompts, fewer tokens), or ask the owner for a longer `timeout_s`.",
    ),
    Reason.OUTPUT_LIMIT: Meaning(
        Status.FAILED, "The job printed more than the preset allows.", "Have it print less."
    ),
    Reason.RESOURCE_LIMIT: Meaning(
        Status.FAILED,
        "The job used more memory, disk, processes or file size than the preset allows.",
        "Ask for less; the message names the limit.",
    ),
    Reason.NO_EVIDENCE: Meaning(
        Status.FAILED,
        "The job ended with exit code 0 and left no report that can be read.",
        "Read its log: `kakeya_mac logs HANDLE`.",
    ),
    Reason.RUNNER_ERROR: Meaning(
        Status.FAILED,
        "The runner failed, not the job: disk, supervisor, or a result that the server never took.",
        "Submit it again; if it fails again, the owner finds the cause in the runner's log.",
    ),
    Reason.EVIDENCE: Meaning(
        Status.REJECTED,
        "The gate rejected the report.",
        "Look up the rule that is named: `kakeya_mac gate --explain CODE`.",
    ),
    Reason.TAMPERED: Meaning(
        Status.REJECTED,
        "What was published is not what the workflow run signed.",
        "Do not use it; find out who pushed to the branch, and submit it again.",
    ),
    Reason.UNTRUSTED: Meaning(
        Status.REJECTED,
        "The result passed, and no key of `KAKEYA_TRUSTED_RUNNERS` signed it.",
        "Add the line that the workflow prints, if that runner is yours.",
    ),
    Reason.BINDING: Meaning(
        Status.REJECTED,
        "The result answers something else than was asked; both values are named.",
        "Do not use it; submit it again, and check which runner answered.",
    ),
    Reason.REQUESTED: Meaning(
        Status.CANCELLED,
        "The request or its workflow run was cancelled.",
        "`kakeya_mac again HANDLE` asks once more.",
    ),
    Reason.SHUTDOWN: Meaning(
        Status.CANCELLED, "The runner was told to stop.", "`kakeya_mac again HANDLE` when it serves again."
    ),
    Reason.LEASE_LOST: Meaning(Status.LOST, "Reserved: a runner that loses its claim publishes nothing.", ""),
    Reason.ATTEMPTS: Meaning(
        Status.LOST,
        "Every attempt lost its runner (crash, power, network), and there are no more.",
        "See why in the runner's log, then `kakeya_mac again HANDLE`.",
    ),
    Reason.RUN_LOST: Meaning(
        Status.LOST,
        "The workflow run ended without a result.",
        "Open the run's page (the message has it), then `kakeya_mac again HANDLE`.",
    ),
    Reason.NO_RUNNER: Meaning(
        Status.LOST,
        "No machine took the workflow job in time.",
        "Check that the Mac's runner is online in the repository's settings, then `kakeya_mac again HANDLE`.",
    ),
}


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


def weights_of(machine: Mapping[str, manifest.Fact]) -> dict[str, manifest.Fact]:
    """The digests of weights among the facts of a runner's machine, by the model's name in the preset."""
    return {
        name.removeprefix(WEIGHTS_FACT): digest
        for name, digest in machine.items()
        if name.startswith(WEIGHTS_FACT)
    }


def _json_bytes(document: Any) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
