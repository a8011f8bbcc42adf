"""What a client asks for: the manifest, parsed once at the border into a frozen value.

The bytes of a manifest come from anyone with push rights. `parse` caps their size before reading them,
refuses duplicate keys, non-finite numbers, control and bidirectional characters, and every key it does not
know. Whether the named preset exists and the machine allows it is decided elsewhere.
"""

from __future__ import annotations

import json
import unicodedata
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from bridge.errors import ManifestError

REQUEST_PATH = ".mac-bridge/request.json"
SIGNATURE_PATH = ".mac-bridge/request.json.sig"
SCHEMA_VERSION: Literal[1] = 1
MAX_BYTES = 64 * 1024
MAX_DEPTH = 8

NONCE_PATTERN = r"^\d{8}t\d{6}z[0-9a-f]{12}$"
PRESET_PATTERN = r"^[a-z0-9]+(-[a-z0-9]+)*$"
SHA_PATTERN = r"^[0-9a-f]{40}([0-9a-f]{24})?$"
PARAM_PATTERN = r"^[a-z][a-z0-9_]{0,63}$"

Nonce = Annotated[str, Field(pattern=NONCE_PATTERN)]
Sha = Annotated[str, Field(pattern=SHA_PATTERN)]
ParamName = Annotated[str, Field(pattern=PARAM_PATTERN)]
ParamValue = bool | int | float | Annotated[str, Field(max_length=4096)]
Utc = Annotated[datetime, Field(description="UTC, ISO 8601, second precision, ending in Z")]

# Bidirectional controls make a text read differently from what it says.
_BIDIRECTIONAL = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class Manifest(BaseModel):
    """One request. Trust is never a field of it: it names a preset and typed values, nothing that runs."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_version: Literal[1] = SCHEMA_VERSION
    nonce: Nonce
    preset: Annotated[str, Field(pattern=PRESET_PATTERN, max_length=64)]
    params: Annotated[dict[ParamName, ParamValue], Field(max_length=64)] = {}
    workload_sha: Sha
    result_ref: Annotated[str, Field(pattern=r"^refs/heads/[A-Za-z0-9][A-Za-z0-9._/-]{0,240}$")]
    transport: Literal["embedded", "actions"] = "embedded"
    requested_by: Annotated[str, Field(max_length=200, description="display only, never trusted")] = ""
    created_at: Annotated[Utc, Field(strict=False)]
    expires_at: Annotated[Utc, Field(strict=False)]
    audience: Annotated[str, Field(min_length=1, max_length=1000, description="the remote this is meant for")]
    timeout_s: Annotated[int, Field(ge=1, le=86_400)] | None = None
    against_sha: Sha | None = None

    @field_validator("preset", "requested_by", "audience", "result_ref")
    @classmethod
    def _plain_text(cls, value: str) -> str:
        return _require_plain(value)

    @field_validator("params")
    @classmethod
    def _plain_params(cls, value: dict[str, ParamValue]) -> dict[str, ParamValue]:
        for item in value.values():
            if isinstance(item, str):
                _require_plain(item)
        return value

    @field_validator("created_at", "expires_at")
    @classmethod
    def _utc(cls, value: datetime) -> datetime:
        if value.tzinfo is None or value.utcoffset() != UTC.utcoffset(None):
            raise ValueError("a time must be in UTC and end in Z")
        return value

    @model_validator(mode="after")
    def _order(self) -> Manifest:
        if self.expires_at <= self.created_at:
            raise ValueError("expires_at must be later than created_at")
        return self

    def to_bytes(self) -> bytes:
        """The exact bytes that are committed and signed: UTF-8 JSON, sorted keys, one trailing newline."""
        document = self.model_dump(mode="json", exclude_none=True)
        for key in ("created_at", "expires_at"):
            document[key] = format_time(getattr(self, key))
        return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def format_time(moment: datetime) -> str:
    """A UTC moment as the bus writes it, e.g. ``2026-03-01T12:00:00Z``."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse(data: bytes) -> Manifest:
    """Read a manifest from the bytes of a commit.

    Raises:
        ManifestError: The bytes are too many, not strict JSON, or break a rule of the schema. The message
            names the first offending field and its value.
    """
    document = load_strict(data, what="manifest", limit=MAX_BYTES)
    try:
        return Manifest.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the manifest"
        value = repr(first["input"])
        shown = value if len(value) <= 120 else value[:117] + "..."
        raise ManifestError(f"manifest: {where}: {first['msg']} (got {shown})") from None


def load_strict(data: bytes, *, what: str, limit: int) -> dict[str, Any]:
    """Parse hostile JSON: capped, UTF-8, one object, no duplicate keys, no NaN, no deep nesting.

    Raises:
        ManifestError: The bytes break one of these rules; the message starts with `what`.
    """
    if len(data) > limit:
        raise ManifestError(f"{what}: {len(data)} bytes, but at most {limit} are read")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ManifestError(f"{what}: not UTF-8 (byte {error.start})") from None
    if _depth(text) > MAX_DEPTH:
        raise ManifestError(f"{what}: nested deeper than {MAX_DEPTH} levels")
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except ManifestError as error:
        raise ManifestError(f"{what}: {error.message}") from None
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{what}: not valid JSON ({error})") from None
    if not isinstance(document, dict):
        raise ManifestError(f"{what}: must be a JSON object, got {type(document).__name__}")
    return document


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a manifest, exported to ``docs/schema/manifest.json``."""
    schema = Manifest.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for key, value in pairs:
        if key in keys:
            raise ManifestError(f"the key {key!r} appears twice")
        keys[key] = value
    return keys


def _refuse_constant(name: str) -> NoReturn:
    raise ManifestError(f"{name} is not a number of JSON")


def _depth(text: str) -> int:
    """Deepest nesting of brackets outside strings, in one pass, before the parser recurses into them."""
    deepest = level = 0
    in_string = escaped = False
    for character in text:
        if in_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "[{":
            level += 1
            deepest = max(deepest, level)
        elif character in "]}":
            level -= 1
    return deepest


def _require_plain(value: str) -> str:
    for character in value:
        if character in _BIDIRECTIONAL or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
            raise ValueError(f"the character U+{ord(character):04X} is not allowed in a text")
    return value
