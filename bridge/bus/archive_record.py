"""What the archive says of a retired request: ``archived.json``, and where its folder lies.

It holds what the branch said by its place (refs, commits, the commit message), so that a result is believed
out of the archive by the same checks as before, and what lists show. As strict as everything read from the
bus: anyone with push rights can write one.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bridge.errors import ManifestError, ResultError
from bridge.protocol.manifest import Nonce, PresetName, Sha, first_fault, load_strict
from bridge.protocol.result import Moment, Reason, Result, Status

RECORD_NAME = "archived.json"
RESULT_FOLDER = "result"
MAX_MESSAGE = 16 * 1024
MAX_RECORD_BYTES = 256 * 1024


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ArchivedRequest(_Record):
    """The request that a result answers, as it stood beside it."""

    commit: Sha
    workload_sha: Sha | None
    preset: PresetName | None


class Summary(_Record):
    """What a published result said of itself, for lists. Nobody judged it."""

    preset: PresetName | None
    status: Status
    reason: Reason
    runner: Annotated[str, Field(max_length=64)]
    attempt: Annotated[int, Field(ge=1)]
    started_at: Moment
    finished_at: Moment


class Archived(_Record):
    """``archived.json``: where a result stood before it was archived.

    Attributes:
        nonce: The request.
        preset: From the name of its branch; None: the branch was gone.
        ref: Where the result stood.
        result_commit: The commit it was.
        parents: That commit's parents: the request, or none where the result had a ref of its own.
        message: That commit's message.
        request: The request that was there; None: it was not.
        summary: From ``result.json``; None: that could not be read.
    """

    schema_version: Annotated[int, Field(ge=1, le=1)] = 1
    nonce: Nonce
    preset: PresetName | None
    ref: Annotated[str, Field(pattern=r"^refs/[A-Za-z0-9._/-]{1,250}$")]
    result_commit: Sha
    parents: Annotated[tuple[Sha, ...], Field(max_length=1)]
    message: Annotated[str, Field(max_length=MAX_MESSAGE)]
    request: ArchivedRequest | None
    summary: Summary | None

    def to_bytes(self) -> bytes:
        """The exact bytes of the file; the same for whoever archives it."""
        return (self.model_dump_json(indent=2) + "\n").encode()


def parse_archived(data: bytes, nonce: str) -> Archived:
    """Read an ``archived.json``.

    Raises:
        ResultError: The bytes are not of this schema, or about another request.
    """
    try:
        record = Archived.model_validate(load_strict(data, what=RECORD_NAME, limit=MAX_RECORD_BYTES))
    except ManifestError as error:
        raise ResultError(error.message) from None
    except ValidationError as error:
        raise ResultError(f"{RECORD_NAME}: {first_fault(error, RECORD_NAME)}") from None
    if record.nonce != nonce:
        raise ResultError(
            f"{RECORD_NAME} is about the request {record.nonce}, not {nonce}: it was copied here"
        )
    return record


def summary_of(result: Result) -> Summary:
    """What lists show of a result."""
    return Summary(
        preset=result.preset,
        status=result.verdict.status,
        reason=result.verdict.reason,
        runner=result.runner.name,
        attempt=result.attempt,
        started_at=result.started_at,
        finished_at=result.finished_at,
    )


def folder_of(nonce: str) -> tuple[str, str, str]:
    """The month, day and request folder of a nonce."""
    return f"{nonce[:4]}-{nonce[4:6]}", nonce[6:8], nonce
