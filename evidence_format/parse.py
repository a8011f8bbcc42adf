"""From bytes to a `Report`: strict JSON, then the types.

A report may come from code its requester wrote, so its bytes are hostile: their number, nesting, numbers
and strings are bounded before anything walks them.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NamedTuple, NoReturn, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from evidence_format.model import SCHEMA_ID, Kind, Report
from evidence_format.text import shown

MAX_BYTES = 32 * 1024 * 1024
MAX_DEPTH = 16
MAX_CONTAINERS = 250_000  # objects and arrays in one report
MAX_FIELDS = 256  # of one object; each that is unknown costs the types an error
MAX_ROWS = 8_000  # of all arms
MAX_NUMBER = 1e15  # seconds, bytes, tokens: nothing measured here is larger
MAX_ERRORS = 20
TOO_DEEP = f"the file is nested deeper than {MAX_DEPTH} levels"
# From models and prompts: may hold any character.
MODEL_TEXT = frozenset({"text", "answer_text", "needle", "answer"})


class Fault(NamedTuple):
    """Why bytes are no report: the code of the rule that they break, and where and how."""

    code: str
    message: str


class Unreadable(Exception):
    """The bytes are no record of the schema; `faults` says why."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__(faults[0].message)
        self.faults = faults


def parse(data: bytes) -> Report:
    """The report; Unreadable with SCHEMA, LEGACY_SCHEMA, UNKNOWN_KIND or UNKNOWN_FIELD where it is none."""
    document = load(data)
    if _is_of_the_earlier_system(document):  # its texts need not be plain, so nothing else is checked
        raise _unreadable(
            f"the report was written by the earlier system (kind {shown(document['kind'])}), and has no rows"
            " to recompute its figures from; run the job again, under its old name if you like"
            " (docs/lineage.md)",
            "LEGACY_SCHEMA",
        )
    check_values(document)
    _refuse_other_formats(document)
    try:
        return Report.model_validate_json(data)
    except ValidationError as error:
        raise Unreadable(*faults_of(error)) from None


def is_report(data: bytes) -> bool:
    """Whether a file is meant as a report: of any version of the schema, or of the earlier system."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return b'"kakeya.evidence/' in data  # a broken one
    if not isinstance(document, dict):
        return False
    return str(document.get("schema")).startswith("kakeya.evidence/") or _is_of_the_earlier_system(document)


def _is_of_the_earlier_system(document: dict[str, Any]) -> bool:
    has_more = type(document.get("schema_version")) is int or isinstance(document.get("config"), dict)
    return "schema" not in document and isinstance(document.get("kind"), str) and has_more


def load(data: bytes, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Parse strict JSON: capped, UTF-8, one object, no duplicate keys, finite numbers."""
    if len(data) > limit:
        raise _unreadable(f"the file has {len(data)} bytes, but at most {limit} are read")
    if data.count(b"[") + data.count(b"{") > 8 * MAX_CONTAINERS:  # brackets inside texts count here, too
        raise _unreadable("the file holds too many brackets to be read")
    try:
        text = data.decode("utf-8")
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _unreadable(f"the file is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise _unreadable(TOO_DEEP) from None
    except ValueError as error:
        raise _unreadable(f"the file is not valid JSON ({error})") from None
    if not isinstance(document, dict):
        raise _unreadable(f"the file must be a JSON object, got {type(document).__name__}")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _unreadable(f"the key {shown(twice)} appears twice in one object")
    return keys


def _refuse_constant(name: str) -> NoReturn:
    raise _unreadable(f"{name} is not a number of JSON")


def check_values(document: dict[str, Any], largest: float = MAX_NUMBER) -> None:
    """Bound depth, containers, fields and numbers; refuse strings that do not read as what they say."""
    level: list[dict[str, Any] | list[Any]] = [document]
    count = 0
    for _ in range(MAX_DEPTH):
        inner = []
        count += len(level)
        if count > MAX_CONTAINERS:
            raise _unreadable(f"the file holds more than {MAX_CONTAINERS} objects and arrays")
        for container in level:
            fields = container if isinstance(container, dict) else ()
            if len(fields) > MAX_FIELDS:
                raise _unreadable(f"an object holds more than {MAX_FIELDS} fields")
            for key in fields:
                _check_scalar(key, "a key", largest)
            for key, value in fields.items() if fields else (("an entry", value) for value in container):
                if isinstance(value, dict | list):
                    inner.append(value)
                else:
                    _check_scalar(value, key, largest)
        level = inner
    if level:
        raise _unreadable(TOO_DEEP)


def _check_scalar(value: object, key: str, largest: float) -> None:
    if isinstance(value, str):
        if key in MODEL_TEXT:
            try:
                value.encode()
            except UnicodeEncodeError:
                raise _unreadable(f"{key} holds half of a surrogate pair") from None
        elif not value.isprintable():
            raise _unreadable(
                f"{shown(key)} holds control, bidirectional or unpaired characters: {shown(value)}"
            )
    elif isinstance(value, int | float) and not abs(value) <= largest:
        raise _unreadable(f"the number {shown(value)} is larger than anything measured here")


def _refuse_other_formats(document: dict[str, Any]) -> None:
    stated, kind = document.get("schema"), document.get("kind")
    if stated != SCHEMA_ID:
        what = "names no schema" if stated is None else f"is of the schema {shown(stated)}"
        raise _unreadable(f"the report {what}; this gate reads {SCHEMA_ID!r}", "LEGACY_SCHEMA")
    if kind not in (known := list(get_args(Kind))):
        raise _unreadable(f"kind {shown(kind)} is none of {known}", "UNKNOWN_KIND")
    arms = document.get("arms")
    samples = [arm.get("samples") for arm in arms if isinstance(arm, dict)] if isinstance(arms, list) else []
    rows = sum(len(each) for each in samples if isinstance(each, list))
    if rows > MAX_ROWS:
        raise _unreadable(f"the report holds {rows} rows, but at most {MAX_ROWS} are judged")


def faults_of(error: ValidationError) -> list[Fault]:
    """What the types found, each with its place and value; missing fields once per object."""
    missing: dict[str, list[str]] = {}
    found: list[Fault] = []
    for each in error.errors(include_url=False):
        place, kind = each["loc"], each["type"]
        if kind == "literal_error" and place[-1] == "[key]":
            place, kind = place[:-1], "extra_forbidden"
        if kind == "missing":
            missing.setdefault(_path(place[:-1]), []).append(repr(place[-1]))
        elif kind == "extra_forbidden":
            message = f"{_path(place[:-1])}: unknown field {shown(place[-1])}"
            found.append(Fault("UNKNOWN_FIELD", message))
        else:
            found.append(Fault("SCHEMA", f"{_path(place)}: {_fault(each)}"))
    found += [Fault("SCHEMA", f"{where}: lacks {', '.join(names)}") for where, names in missing.items()]
    return found[:MAX_ERRORS]


# What to say of a fault, from the bounds in its context (ours) and the value (not ours).
_FAULTS = {
    "string_type": "must be of type string, got {got}",
    "int_type": "must be of type integer, got {got}",
    "float_type": "must be of type number, got {got}",
    "bool_type": "must be of type boolean, got {got}",
    "tuple_type": "must be of type array, got {got}",
    "dict_type": "must be of type object, got {got}",
    "model_type": "must be of type object, got {got}",
    "greater_than_equal": "must be at least {ge:g}, got {got}",
    "less_than_equal": "must be at most {le:g}, got {got}",
    "string_pattern_mismatch": "must match {pattern}, got {got}",
    "literal_error": "must be one of {expected}, got {got}",
    "string_too_long": "is longer than {max_length} characters",
    "string_too_short": "is shorter than {min_length} characters",
    "too_long": "has more than {max_length} entries",
    "too_short": "has fewer than {min_length} entries",
}


def _fault(error: ErrorDetails) -> str:
    kind, got = error["type"], shown(error["input"])
    if kind in _FAULTS:
        return _FAULTS[kind].format(got=got, **error.get("ctx", {}))
    return f"impossible value {got}" if kind.startswith("datetime") else f"{error['msg']}, got {got}"


def _path(parts: tuple[int | str, ...]) -> str:
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{shown(part).strip(chr(39))}"
    return text.lstrip(".") or "report"


def _unreadable(message: str, code: str = "SCHEMA") -> Unreadable:
    return Unreadable(Fault(code, message))
