"""A cancel request: the content of ``cancel.json``. Pure; pushing and checking it is `bridge.bus.cancels`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from bridge.errors import ManifestError
from bridge.protocol.manifest import (
    STRICT_RECORD,
    Nonce,
    PlainText,
    Sha,
    Utc,
    document_bytes,
    first_fault,
    parse_document,
)
from bridge.protocol.sanitize import clean_line, one_line

CANCEL_NAME = "cancel.json"
CANCEL_SIGNATURE_NAME = "cancel.json.sig"
SCHEMA_VERSION = 1
MAX_BYTES = 8 * 1024
MAX_REASON = 500


class CancelRequest(BaseModel):
    """A request to stop one request. Names in it are for people to read; only a signature counts."""

    model_config = STRICT_RECORD

    schema_version: Annotated[int, Field(ge=1, le=1)] = SCHEMA_VERSION
    nonce: Nonce
    request_commit: Sha
    requested_by: Annotated[PlainText, Field(max_length=200, description="display only, never trusted")] = ""
    reason: Annotated[PlainText, Field(max_length=MAX_REASON)] | None = None
    created_at: Utc

    def to_bytes(self) -> bytes:
        """The exact bytes that are committed and signed: UTF-8 JSON, sorted keys, one trailing newline."""
        return document_bytes(self)

    @property
    def sentence(self) -> str:
        """Who cancels and why, as they say, on one line."""
        by = f" by {self.requested_by}" if self.requested_by else ""
        return clean_line(f"cancelled{by}" + (f": {self.reason}" if self.reason else ""), limit=1000)


def new_cancel(
    nonce: str,
    request_commit: str,
    *,
    requested_by: str = "",
    reason: str | None = None,
    now: datetime | None = None,
) -> CancelRequest:
    """A cancel request, its texts brought onto one line without control characters.

    Raises:
        ManifestError: A text is too long, or a name is not one of a request.
    """
    created = (now or datetime.now(UTC)).astimezone(UTC).replace(microsecond=0)
    try:
        return CancelRequest(
            nonce=nonce,
            request_commit=request_commit,
            requested_by=one_line(requested_by)[:200],
            reason=None if reason is None else one_line(reason).strip() or None,
            created_at=created,
        )
    except ValidationError as error:
        raise ManifestError(f"cancel: {first_fault(error, 'the cancel request')}") from None


def parse_cancel(data: bytes) -> CancelRequest:
    """Read a cancel request from the bytes of a commit; a `ManifestError` says what is wrong with them."""
    return parse_document(CancelRequest, data, what=CANCEL_NAME, limit=MAX_BYTES, whole="the cancel request")
