"""What a client asks for: the manifest; and how every document of the bus is read and written.

Their bytes come from anyone with push rights. Reading caps their size first, refuses duplicate keys,
non-finite numbers, control and bidirectional characters, and every unknown key. Nothing of theirs reaches a
message unquoted. Whether the named preset exists and the machine allows it is decided elsewhere.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from bridge.errors import BridgeError, ManifestError
from bridge.protocol.sanitize import quoted, unsafe_character
from bridge.protocol.target import MAX_LENGTH, parse_target

REQUEST_PATH = ".mac-bridge/request.json"
SIGNATURE_PATH = ".mac-bridge/request.json.sig"
SCHEMA_VERSION = 1
MAX_BYTES = 64 * 1024
MAX_DEPTH = 8
MAX_LIFETIME = timedelta(days=30)
# A nonce sorts by its time, so it must tell the truth: the queue is served in that order.
MAX_NONCE_SKEW = timedelta(days=1)

NONCE_PATTERN = r"^[0-9]{8}t[0-9]{6}z[0-9a-f]{12}$"
PRESET_PATTERN = r"^[a-z0-9]+(-[a-z0-9]+)*$"
SHA_PATTERN = r"^[0-9a-f]{40}([0-9a-f]{24})?$"
PARAM_PATTERN = r"^[a-z][a-z0-9_]{0,63}$"
TIME_PATTERN = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$"


def parse_time(text: str) -> datetime:
    """The moment that `format_time` wrote.

    Raises:
        ValueError: It is not written like that, or there is no such moment.
    """
    if re.fullmatch(TIME_PATTERN, text) is None:
        raise ValueError("a time is written like 2026-03-01T12:00:00Z")
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


def _read_time(value: object) -> datetime:
    if isinstance(value, datetime):
        if value.utcoffset() != timedelta(0):
            raise ValueError("a time must be in UTC and end in Z")
        return value
    if not isinstance(value, str):
        raise ValueError("a time is a text like 2026-03-01T12:00:00Z")  # noqa: TRY004 - pydantic's protocol
    return parse_time(value)


def _real_time(text: str) -> str:
    parse_time(text)
    return text


def require_plain(value: str) -> str:
    """The text itself; a ValueError where it is not one plain line."""
    character = unsafe_character(value)
    if character is not None:
        raise ValueError(f"the character U+{ord(character):04X} is not allowed in a text")
    return value


def _require_target(value: str) -> str:
    parse_target(value)
    return value


# How models of documents, and of their parts, are set up.
RECORD = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
STRICT_RECORD = RECORD | ConfigDict(strict=True)

AnyRecord = TypeVar("AnyRecord", bound=BaseModel)
PlainText = Annotated[str, AfterValidator(require_plain)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Moment = Annotated[str, Field(pattern=TIME_PATTERN), AfterValidator(_real_time)]
Nonce = Annotated[str, Field(pattern=NONCE_PATTERN)]
Sha = Annotated[str, Field(pattern=SHA_PATTERN)]
ParamName = Annotated[str, Field(pattern=PARAM_PATTERN)]
ParamValue = bool | int | float | Annotated[str, Field(max_length=4096)]
PresetName = Annotated[str, Field(pattern=PRESET_PATTERN, max_length=64)]
Utc = Annotated[
    datetime,
    BeforeValidator(_read_time),
    Field(
        description="UTC, RFC 3339, second precision, ending in Z",
        json_schema_extra={"pattern": TIME_PATTERN},
    ),
]

_ON = "which machines may run it: conditions such as chip=M4*,memory>=64,label=lab"
_PLAIN_PART = re.compile(r"[A-Za-z0-9_\[\]]{1,64}")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


class Manifest(BaseModel):
    """One request. Trust is never a field of it: it names a preset and typed values, nothing that runs."""

    model_config = STRICT_RECORD

    # A Literal would take true for 1.
    schema_version: Annotated[int, Field(ge=1, le=1)] = SCHEMA_VERSION
    nonce: Nonce
    preset: PresetName
    params: Annotated[dict[ParamName, ParamValue], Field(max_length=64)] = {}
    workload_sha: Sha
    result_ref: Annotated[str, Field(pattern=r"^refs/heads/[A-Za-z0-9][A-Za-z0-9._/-]{0,240}$")]
    transport: Literal["embedded", "actions"] = "embedded"
    requested_by: Annotated[PlainText, Field(max_length=200, description="display only, never trusted")] = ""
    created_at: Utc
    expires_at: Utc
    audience: Annotated[
        PlainText, Field(min_length=1, max_length=1000, description="the remote this is meant for")
    ]
    timeout_s: Annotated[int, Field(ge=1, le=86_400)] | None = None
    on: (
        Annotated[
            PlainText,
            AfterValidator(_require_target),
            Field(min_length=1, max_length=MAX_LENGTH, description=_ON),
        ]
        | None
    ) = None

    @field_validator("params")
    @classmethod
    def _plain_params(cls, value: dict[str, ParamValue]) -> dict[str, ParamValue]:
        for item in value.values():
            if isinstance(item, str):
                require_plain(item)
        return value

    @model_validator(mode="after")
    def _times_fit(self) -> Manifest:
        if self.expires_at <= self.created_at:
            raise ValueError("expires_at must be later than created_at")
        if self.expires_at - self.created_at > MAX_LIFETIME:
            raise ValueError(f"expires_at must be at most {MAX_LIFETIME.days} days after created_at")
        if abs(_nonce_time(self.nonce) - self.created_at) > MAX_NONCE_SKEW:
            raise ValueError("the time in the nonce must be within a day of created_at")
        return self

    def to_bytes(self) -> bytes:
        """The exact bytes that are committed and signed: UTF-8 JSON, sorted keys, one trailing newline."""
        return document_bytes(self)


def format_time(moment: datetime) -> str:
    """A UTC moment as the bus writes it, e.g. ``2026-03-01T12:00:00Z``."""
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


def parse(data: bytes) -> Manifest:
    """Read a manifest from the bytes of a commit.

    Raises:
        ManifestError: They are too many, not strict JSON, or break a rule of the schema; it names the first
            offending field and its value.
    """
    return parse_document(Manifest, data, what="manifest", limit=MAX_BYTES, whole="the manifest")


def parse_document(kind: type[AnyRecord], data: bytes, *, what: str, limit: int, whole: str) -> AnyRecord:
    """Read a document that a client wrote; a `ManifestError` quotes the offending value."""
    document = load_strict(data, what=what, limit=limit)
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        value = quoted(error.errors()[0]["input"])
        raise ManifestError(f"{what}: {first_fault(error, whole)} (got {value})") from None


def document_bytes(document: BaseModel) -> bytes:
    """The bytes of a document that a client writes: UTF-8 JSON, sorted keys, one trailing newline."""
    texts = document.model_dump(mode="json", exclude_none=True)
    times = {name: format_time(value) for name, value in document if isinstance(value, datetime)}
    return (json.dumps({**texts, **times}, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def parse_record(
    kind: type[AnyRecord],
    data: bytes,
    *,
    what: str,
    limit: int,
    error: type[BridgeError],
    plain: Callable[[Any, Callable[[str], str]], object] | None = None,
) -> AnyRecord:
    """Read a document that a runner wrote.

    Args:
        kind: Its type.
        data: Its bytes.
        what: Begins every message.
        limit: Most bytes that are read.
        error: The class to raise.
        plain: Applies a function to the texts that must be one plain line (`with_texts`); None: none must.
    """
    try:
        document = load_strict(data, what=what, limit=limit)
        if plain is not None:
            plain(document, require_plain)
        # Read again as JSON, where a list may become a tuple and nothing else is converted.
        return kind.model_validate_json(json.dumps(document), strict=True)
    except ManifestError as fault:
        raise error(fault.message) from None
    except ValidationError as fault:
        raise error(f"{what}: {first_fault(fault, what)}") from None
    except ValueError as fault:
        raise error(f"{what}: {fault}") from None


def with_texts(
    value: Any, change: Callable[[str], str], keep: tuple[str, ...] = (), path: tuple[str, ...] = ()
) -> Any:
    """A JSON value with every key and text changed, but for what is at the path `keep`."""
    if keep and path == keep:
        return value
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [with_texts(item, change, keep, path) for item in value]
    if isinstance(value, dict):
        return {change(key): with_texts(item, change, keep, (*path, key)) for key, item in value.items()}
    return value


def first_fault(error: ValidationError, whole: str) -> str:
    """Where the first fault of a document lies (`whole`: in itself) and what; unknown keys are quoted."""
    first = error.errors()[0]
    parts = [str(part) for part in first["loc"]]
    where = ".".join(part if _PLAIN_PART.fullmatch(part) else quoted(part, 80) for part in parts[:8])
    return f"{where or whole}: {first['msg']}"


def load_strict(data: bytes, *, what: str, limit: int) -> dict[str, Any]:
    """Parse hostile JSON: capped, UTF-8, one object, no duplicate keys, finite numbers, no deep nesting.

    Raises:
        ManifestError: It breaks one of these rules; the message begins with `what`.
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
        document = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
        )
    except ManifestError as error:
        raise ManifestError(f"{what}: {error.message}") from None
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{what}: not valid JSON ({error})") from None
    if not isinstance(document, dict):
        raise ManifestError(f"{what}: must be a JSON object, got {type(document).__name__}")
    return document


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a manifest, exported to ``docs/schema/manifest.json``."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Manifest.model_json_schema()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for key, value in pairs:
        if key in keys:
            raise ManifestError(f"the key {quoted(key, 80)} appears twice")
        keys[key] = value
    return keys


def _refuse_constant(name: str) -> NoReturn:
    raise ManifestError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # 1e999 is JSON, and more than a float holds
        raise ManifestError(f"the number {text if len(text) <= 40 else text[:37] + '...'} is too large")
    return value


def _nonce_time(nonce: str) -> datetime:
    try:
        return datetime.strptime(nonce[:16], "%Y%m%dt%H%M%Sz").replace(tzinfo=UTC)
    except ValueError:
        raise ValueError("the nonce does not begin with a time") from None


def _depth(text: str) -> int:
    """Deepest nesting of brackets outside strings, before the parser recurses into them."""
    deepest = level = 0
    for bracket in re.findall(r"[\[\]{}]", _STRING.sub("", text)):
        level += 1 if bracket in "[{" else -1
        deepest = max(deepest, level)
    return deepest
