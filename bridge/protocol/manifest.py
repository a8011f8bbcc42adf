"""What a client asks for (manifest, target, cancel request), and how every document of the bus is read.

Their bytes come from anyone with push rights: nothing of theirs reaches a message unquoted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from bridge.errors import BridgeError, ManifestError
from bridge.protocol.refs import nonce_moment
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


def format_time(moment: datetime) -> str:
    """A UTC moment as the bus writes it, e.g. ``2026-03-01T12:00:00Z``."""
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


def parse_time(text: str) -> datetime:
    """The moment that `format_time` wrote; a ValueError where there is none, or it is written otherwise."""
    if re.fullmatch(TIME_PATTERN, text) is None:
        raise ValueError("a time is written like 2026-03-01T12:00:00Z")
    return datetime.fromisoformat(text)


# How models of documents, and of their parts, are set up.
RECORD = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
STRICT_RECORD = RECORD | ConfigDict(strict=True)

AnyRecord = TypeVar("AnyRecord", bound=BaseModel)
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Moment = Annotated[
    str, Field(pattern=TIME_PATTERN), AfterValidator(lambda text: format_time(parse_time(text)))
]
Nonce = Annotated[str, Field(pattern=r"^[0-9]{8}t[0-9]{6}z[0-9a-f]{12}$")]
Sha = Annotated[str, Field(pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?$")]
ParamName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
ParamValue = bool | int | float | Annotated[str, Field(max_length=4096)]
PresetName = Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=64)]
# A Literal would take true for 1.
SchemaVersion = Annotated[int, Field(ge=1, le=1)]
Utc = Annotated[
    datetime,
    pydantic.BeforeValidator(lambda value: parse_time(value) if isinstance(value, str) else value),
    pydantic.PlainSerializer(format_time, when_used="json"),
    Field(
        description="UTC, RFC 3339, second precision, ending in Z",
        json_schema_extra={"pattern": TIME_PATTERN},
    ),
]
_Requester = Annotated[str, Field(max_length=200, description="display only, never trusted")]


# What a condition may name, and the fact of the machine where that is named otherwise.
_NUMBERS = ("cores", "memory")
_TEXTS = ("chip", "label", "machine", "metal", "os", "runner", "system")
_PROPERTIES = sorted(_NUMBERS + _TEXTS)
_FACTS = {"cores": "cpu_count", "label": "labels", "memory": "memory_bytes", "os": "os_release"}
_MAX_MEMORY = 10**18  # anyone may have written the registration
_CONDITION = re.compile(
    rf"\s*(?:({'|'.join(_NUMBERS)})\s*(>=|<=|!=|=)\s*([0-9]{{1,18}}(?:\.[0-9]{{1,18}})?)"
    rf"|({'|'.join(_TEXTS)})\s*(!=|=)\s*([^,<>=!]{{1,100}}?))\s*"
)
Fact = str | int | float | bool | None


class Condition(NamedTuple):
    """A property, ``=``, ``!=``, ``>=`` or ``<=``, and a value."""

    name: str
    operator: str
    value: str

    def __str__(self) -> str:
        return "".join(self)

    def is_met(self, values: Iterable[Fact]) -> bool:
        """Whether a machine with these values of the property meets it.

        A text is compared as a pattern, where ``*`` is any text and case does not count; a chip matches with
        or without "Apple" before it.
        """
        if self.name not in _NUMBERS:
            texts = {str(value).lower() for value in values}
            texts |= {text.removeprefix("apple ") for text in texts if self.name == "chip"}
            return any(fnmatchcase(text, self.value.lower()) for text in texts) == (self.operator == "=")
        wanted = float(self.value)
        compare: dict[str, Callable[[float], bool]] = {
            "=": lambda found: round(found) == round(wanted),
            "!=": lambda found: round(found) != round(wanted),
            ">=": wanted.__le__,
            "<=": wanted.__ge__,
        }
        return any(compare[self.operator](value) for value in values if isinstance(value, int | float))


def parse_target(text: str) -> tuple[Condition, ...]:
    """The conditions of a target such as ``chip=M4*,memory>=64,label=lab``; a runner must meet all of them.

    ``memory`` is in GB as Apple counts them (2**30 bytes). A ValueError says which condition is none.
    """
    conditions = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part)
        if match is None:
            raise ValueError(
                f"{quoted(part)} is no condition; write NAME=VALUE with NAME one of {', '.join(_PROPERTIES)};"
                " cores and memory take numbers, also with >= and <="
            )
        conditions.append(Condition(*filter(None, match.groups())))
    return tuple(conditions)


def properties(facts: Mapping[str, Fact], runner: str) -> dict[str, tuple[Fact, ...]]:
    """Every property's values, none where they are not known; the fact ``labels`` is a text with commas."""
    known = {name: facts.get(_FACTS.get(name, name)) for name in _PROPERTIES} | {"runner": runner}
    found: dict[str, tuple[Fact, ...]]
    found = {name: () if value is None else (value,) for name, value in known.items()}
    found["label"] = tuple(label for label in str(known["label"] or "").split(",") if label)
    memory = known["memory"]
    if isinstance(memory, int | float):
        found["memory"] = (round(memory / 2**30, 1),) if 0 < memory < _MAX_MEMORY else ()
    return found


def unmet(text: str, facts: Mapping[str, Fact], runner: str) -> list[Condition]:
    """The conditions of a target that a machine does not meet."""
    found = properties(facts, runner)
    return [condition for condition in parse_target(text) if not condition.is_met(found[condition.name])]


def _require_target(value: str) -> str:
    parse_target(value)
    return value


_Target = Annotated[
    str,
    AfterValidator(_require_target),
    Field(
        min_length=1,
        max_length=500,
        description="which machines may run it: conditions such as chip=M4*,memory>=64,label=lab",
    ),
]


class _ClientRecord(BaseModel):
    model_config = STRICT_RECORD

    def to_bytes(self) -> bytes:
        """The exact bytes that are committed and signed: UTF-8 JSON, sorted keys, one trailing newline."""
        document = self.model_dump(mode="json", exclude_none=True)
        return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


class Against(BaseModel):
    """The other side of a paired run: a commit and parameters that take turns with the request's own."""

    model_config = STRICT_RECORD

    workload_sha: Sha
    params: Annotated[dict[ParamName, ParamValue], Field(max_length=64)] = {}


class Manifest(_ClientRecord):
    """One request. Trust is never a field of it: it names a preset and typed values, nothing that runs."""

    schema_version: SchemaVersion = SCHEMA_VERSION
    nonce: Nonce
    preset: PresetName
    params: Annotated[dict[ParamName, ParamValue], Field(max_length=64)] = {}
    workload_sha: Sha
    result_ref: Annotated[str, Field(pattern=r"^refs/heads/[A-Za-z0-9][A-Za-z0-9._/-]{0,240}$")]
    transport: Literal["embedded", "actions"] = "embedded"
    requested_by: _Requester = ""
    created_at: Utc
    expires_at: Utc
    audience: Annotated[str, Field(min_length=1, max_length=1000, description="the remote this is meant for")]
    timeout_s: Annotated[int, Field(ge=1, le=86_400)] | None = None
    on: _Target | None = None
    against: Against | None = None

    @model_validator(mode="after")
    def _times_fit(self) -> Manifest:
        if self.expires_at <= self.created_at:
            raise ValueError("expires_at must be later than created_at")
        if self.expires_at - self.created_at > MAX_LIFETIME:
            raise ValueError(f"expires_at must be at most {MAX_LIFETIME.days} days after created_at")
        named = nonce_moment(self.nonce)
        if abs(named - self.created_at) > MAX_NONCE_SKEW:
            raise ValueError("the time in the nonce must be within a day of created_at")
        return self

    @property
    def commits(self) -> tuple[str, ...]:
        """The parents of its commit: the workload, and another that it is compared with."""
        other = None if self.against is None else self.against.workload_sha
        return (self.workload_sha,) if other in (None, self.workload_sha) else (self.workload_sha, str(other))


class CancelRequest(_ClientRecord):
    """A request to stop one request. Names in it are for people to read; only a signature counts."""

    schema_version: SchemaVersion = SCHEMA_VERSION
    nonce: Nonce
    request_commit: Sha
    requested_by: _Requester = ""
    reason: Annotated[str, Field(max_length=500)] | None = None
    created_at: Utc

    @property
    def sentence(self) -> str:
        """Who cancels and why, as they say, on one line."""
        return self._said("cancelled")

    @property
    def withdrawal(self) -> str:
        """The same of a request that no runner had."""
        return self._said("withdrawn")

    def _said(self, what: str) -> str:
        by = f" by {self.requested_by}" if self.requested_by else ""
        return clean_line(f"{what}{by}" + (f": {self.reason}" if self.reason else ""), limit=1000)


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
    draft = CancelRequest.model_construct(
        nonce=nonce,
        request_commit=request_commit,
        requested_by=one_line(requested_by)[:200],
        reason=None if reason is None else one_line(reason).strip() or None,
        created_at=(now or datetime.now(UTC)).replace(microsecond=0),
    )
    return parse_cancel(draft.to_bytes())


def parse_cancel(data: bytes) -> CancelRequest:
    """Read a cancel request from the bytes of a commit; a `ManifestError` says what is wrong with them."""
    return parse_document(CancelRequest, data, what=CANCEL_NAME, limit=MAX_CANCEL_BYTES)


def parse_document(
    kind: type[AnyRecord],
    data: bytes,
    *,
    what: str,
    limit: int,
    error: type[BridgeError] = ManifestError,
    plain: bool = True,
) -> AnyRecord:
    """Read a document that came over the bus; `error` says what is wrong, beginning with `what`.

    With `plain` each of its texts must be one line without control, bidirectional and invisible characters.
    """
    try:
        document = load_strict(data, limit)
        if plain:
            with_texts(document, _require_plain)
        # Read again as JSON, where a list may become a tuple and nothing else is converted.
        return kind.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as fault:
        first = fault.errors()[0]
        parts = [str(part) for part in first["loc"]][:8]
        where = ".".join(part if _PLAIN_PART.fullmatch(part) else quoted(part, 80) for part in parts) or what
        # Our own checks name the value themselves.
        value = "" if first["type"] == "value_error" else f" (got {quoted(first['input'])})"
        raise error(f"{what}: {where}: {first['msg'].removeprefix('Value error, ')}{value}") from None
    except ValueError as fault:
        raise error(f"{what}: {fault}") from None


def with_texts(value: Any, change: Callable[[str], str], path: tuple[str, ...] = ()) -> Any:
    """A JSON value with every key and text changed, but for the argv of a result's commands."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list) and path != ("commands", "argv"):
        return [with_texts(item, change, path) for item in value]
    if isinstance(value, dict):
        return {change(key): with_texts(item, change, (*path, key)) for key, item in value.items()}
    return value


def _require_plain(text: str) -> str:
    if (character := unsafe_character(text)) is not None:
        raise ValueError(
            f"the character U+{ord(character):04X} is not allowed in a text (got {quoted(text)})"
        )
    return text
