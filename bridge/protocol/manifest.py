"""What a client asks for (manifest, target, cancel request), and how every document of the bus is read.

Their bytes come from anyone with push rights. Reading refuses all but strict JSON, control and bidirectional
characters, and every unknown key. Nothing of theirs reaches a message unquoted. Whether the named preset
exists and the machine allows it is decided elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from bridge.errors import BridgeError, ManifestError
from bridge.protocol.sanitize import clean_line, load_strict, one_line, quoted, unsafe_character

REQUEST_PATH = ".mac-bridge/request.json"
SIGNATURE_PATH = ".mac-bridge/request.json.sig"
CANCEL_NAME = "cancel.json"
CANCEL_SIGNATURE_NAME = "cancel.json.sig"
SCHEMA_VERSION = 1
MAX_BYTES = 64 * 1024
MAX_CANCEL_BYTES = 8 * 1024
MAX_LIFETIME = timedelta(days=30)
# A nonce sorts by its time, so it must tell the truth: the queue is served in that order.
MAX_NONCE_SKEW = timedelta(days=1)

TIME_PATTERN = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$"

_PLAIN_PART = re.compile(r"[A-Za-z0-9_\[\]]{1,64}")


# Types of fields -----------------------------------------------------------------------------------------


def format_time(moment: datetime) -> str:
    """A UTC moment as the bus writes it, e.g. ``2026-03-01T12:00:00Z``."""
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


def parse_time(text: str) -> datetime:
    """The moment that `format_time` wrote; a ValueError where there is none, or it is written otherwise."""
    if re.fullmatch(TIME_PATTERN, text) is None:
        raise ValueError("a time is written like 2026-03-01T12:00:00Z")
    return datetime.fromisoformat(text)


def require_plain(value: str) -> str:
    """The text itself; a ValueError where it is not one plain line."""
    character = unsafe_character(value)
    if character is not None:
        raise ValueError(f"the character U+{ord(character):04X} is not allowed in a text")
    return value


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


# How models of documents, and of their parts, are set up.
RECORD = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
STRICT_RECORD = RECORD | ConfigDict(strict=True)

AnyRecord = TypeVar("AnyRecord", bound=BaseModel)
PlainText = Annotated[str, AfterValidator(require_plain)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Moment = Annotated[str, Field(pattern=TIME_PATTERN), AfterValidator(_real_time)]
Nonce = Annotated[str, Field(pattern=r"^[0-9]{8}t[0-9]{6}z[0-9a-f]{12}$")]
Sha = Annotated[str, Field(pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?$")]
ParamName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
ParamValue = bool | int | float | Annotated[str, Field(max_length=4096)]
PresetName = Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=64)]
# A Literal would take true for 1.
SchemaVersion = Annotated[int, Field(ge=1, le=1)]
Utc = Annotated[
    datetime,
    BeforeValidator(_read_time),
    Field(
        description="UTC, RFC 3339, second precision, ending in Z",
        json_schema_extra={"pattern": TIME_PATTERN},
    ),
]
_Requester = Annotated[PlainText, Field(max_length=200, description="display only, never trusted")]


# Targets -------------------------------------------------------------------------------------------------

MAX_TARGET = 500
# What a condition may name, and the fact of the machine that it is compared with.
PROPERTIES = {
    "chip": "chip",
    "cores": "cpu_count",
    "label": "labels",
    "machine": "machine",
    "memory": "memory_bytes",
    "metal": "metal",
    "os": "os_release",
    "runner": "runner",
    "system": "system",
}
Fact = str | int | float | bool | None

_NUMBERS = ("cores", "memory")
_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")
_MAX_MEMORY = 10**18  # anyone may have written the registration
_CONDITION = re.compile(r"\s*(?P<name>[a-z]+)\s*(?P<operator>>=|<=|!=|=)\s*(?P<value>[^,<>=!]{1,100}?)\s*")


@dataclass(frozen=True)
class Condition:
    """One condition: a property, ``=``, ``!=``, ``>=`` or ``<=``, and a value."""

    name: str
    operator: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}{self.operator}{self.value}"

    def is_met(self, values: Iterable[Fact]) -> bool:
        """Whether a machine with these values of the property meets it.

        A text is compared as a pattern, where ``*`` is any text and case does not count; a chip matches with
        or without "Apple" before it.
        """
        if self.name in _NUMBERS:
            return any(self._compares(value) for value in values if isinstance(value, int | float))
        texts = {str(value).lower() for value in values}
        if self.name == "chip":
            texts |= {text.removeprefix("apple ") for text in texts}
        matched = any(fnmatchcase(text, self.value.lower()) for text in texts)
        return matched == (self.operator == "=")

    def _compares(self, found: float) -> bool:
        wanted = float(self.value)
        if self.operator in (">=", "<="):
            return found >= wanted if self.operator == ">=" else found <= wanted
        return (round(found) == round(wanted)) == (self.operator == "=")


def parse_target(text: str) -> tuple[Condition, ...]:
    """The conditions of a target such as ``chip=M4*,memory>=64,label=lab``; a runner must meet all of them.

    ``memory`` is in GB as Apple counts them (2**30 bytes). A ValueError says which condition is none, and
    why.
    """
    if len(text) > MAX_TARGET:
        raise ValueError(f"a target has at most {MAX_TARGET} characters, got {len(text)}")
    conditions = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part)
        if match is None or match["name"] not in PROPERTIES:
            known = ", ".join(sorted(PROPERTIES))
            raise ValueError(f"{quoted(part)} is no condition; write NAME=VALUE with NAME one of {known}")
        condition = Condition(match["name"], match["operator"], match["value"])
        if condition.name in _NUMBERS and _NUMBER.fullmatch(condition.value) is None:
            raise ValueError(f"{condition} needs a number, got {quoted(condition.value)}")
        if condition.name not in _NUMBERS and condition.operator in (">=", "<="):
            raise ValueError(f"{condition} compares a text; write {condition.name}={condition.value}")
        conditions.append(condition)
    return tuple(conditions)


def properties(facts: Mapping[str, Fact], runner: str) -> dict[str, tuple[Fact, ...]]:
    """What conditions are compared with: every property's values, none where they are not known.

    ``labels`` of the machine's facts are a text with commas.
    """
    known = {name: facts.get(fact) for name, fact in PROPERTIES.items()} | {"runner": runner}
    found: dict[str, tuple[Fact, ...]] = {
        name: () if value is None else (value,) for name, value in known.items()
    }
    found["label"] = tuple(label for label in str(known["label"] or "").split(",") if label)
    memory = known["memory"]
    if isinstance(memory, int | float):
        found["memory"] = (round(memory / 2**30, 1),) if 0 < memory < _MAX_MEMORY else ()
    return found


def unmet(text: str, facts: Mapping[str, Fact], runner: str) -> list[Condition]:
    """The conditions of a target that a machine does not meet; see `parse_target` and `properties`."""
    found = properties(facts, runner)
    return [condition for condition in parse_target(text) if not condition.is_met(found[condition.name])]


def _require_target(value: str) -> str:
    parse_target(value)
    return value


# Documents of a client -----------------------------------------------------------------------------------

_ON = "which machines may run it: conditions such as chip=M4*,memory>=64,label=lab"


class _ClientRecord(BaseModel):
    model_config = STRICT_RECORD

    def to_bytes(self) -> bytes:
        """The exact bytes that are committed and signed: UTF-8 JSON, sorted keys, one trailing newline."""
        texts = self.model_dump(mode="json", exclude_none=True)
        times = {name: format_time(value) for name, value in self if isinstance(value, datetime)}
        return (json.dumps({**texts, **times}, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


class Manifest(_ClientRecord):
    """One request. Trust is never a field of it: it names a preset and typed values, nothing that runs."""

    schema_version: SchemaVersion = SCHEMA_VERSION
    nonce: Nonce
    preset: PresetName
    params: Annotated[
        dict[ParamName, bool | int | float | Annotated[PlainText, Field(max_length=4096)]],
        Field(max_length=64),
    ] = {}
    workload_sha: Sha
    result_ref: Annotated[str, Field(pattern=r"^refs/heads/[A-Za-z0-9][A-Za-z0-9._/-]{0,240}$")]
    transport: Literal["embedded", "actions"] = "embedded"
    requested_by: _Requester = ""
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
            Field(min_length=1, max_length=MAX_TARGET, description=_ON),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _times_fit(self) -> Manifest:
        if self.expires_at <= self.created_at:
            raise ValueError("expires_at must be later than created_at")
        if self.expires_at - self.created_at > MAX_LIFETIME:
            raise ValueError(f"expires_at must be at most {MAX_LIFETIME.days} days after created_at")
        try:
            named = datetime.strptime(self.nonce[:16], "%Y%m%dt%H%M%Sz").replace(tzinfo=UTC)
        except ValueError:
            raise ValueError("the nonce does not begin with a time") from None
        if abs(named - self.created_at) > MAX_NONCE_SKEW:
            raise ValueError("the time in the nonce must be within a day of created_at")
        return self


class CancelRequest(_ClientRecord):
    """A request to stop one request. Names in it are for people to read; only a signature counts."""

    schema_version: SchemaVersion = SCHEMA_VERSION
    nonce: Nonce
    request_commit: Sha
    requested_by: _Requester = ""
    reason: Annotated[PlainText, Field(max_length=500)] | None = None
    created_at: Utc

    @property
    def sentence(self) -> str:
        """Who cancels and why, as they say, on one line."""
        by = f" by {self.requested_by}" if self.requested_by else ""
        return clean_line(f"cancelled{by}" + (f": {self.reason}" if self.reason else ""), limit=1000)


def parse(data: bytes) -> Manifest:
    """Read a manifest from the bytes of a commit; a `ManifestError` says what is wrong with them."""
    return parse_document(Manifest, data, what="manifest", limit=MAX_BYTES)


def new_cancel(
    nonce: str,
    request_commit: str,
    *,
    requested_by: str = "",
    reason: str | None = None,
    now: datetime | None = None,
) -> CancelRequest:
    """A cancel request, its texts brought onto one line; a `ManifestError`: one of them is too long."""
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
    return parse_document(CancelRequest, data, what=CANCEL_NAME, limit=MAX_CANCEL_BYTES)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a manifest, exported to ``docs/schema/manifest.json``."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Manifest.model_json_schema()}


# Reading -------------------------------------------------------------------------------------------------


def parse_document(
    kind: type[AnyRecord],
    data: bytes,
    *,
    what: str,
    limit: int,
    error: type[BridgeError] = ManifestError,
    plain: Callable[[Any, Callable[[str], str]], object] | None = None,
) -> AnyRecord:
    """Read a document that came over the bus; `error` says what is wrong, beginning with `what`.

    `plain` applies a function to the texts that must be one plain line (`with_texts`); None: none must.
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
        value = quoted(fault.errors()[0]["input"])
        raise error(f"{what}: {first_fault(fault, what)} (got {value})") from None
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
