"""From bytes to a `Report`: strict JSON, then the schema, then types. The first stage of the gate.

A report may come from code its requester wrote, so its bytes are hostile: their number, nesting, numbers
and strings are bounded before anything walks them, and what is found wrong is returned as violations, never
raised. What the values *mean* is for the rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from importlib.resources import files
from typing import Any, NoReturn

from pydantic import ValidationError

from bridge.evidence.report import Report
from bridge.evidence.shown import shown
from bridge.protocol.result import Violation

SCHEMA_ID = "kakeya.evidence/1"
MAX_BYTES = 32 * 1024 * 1024
MAX_DEPTH = 16
MAX_CONTAINERS = 250_000  # objects and arrays in one report
MAX_ROWS = 8_000  # of all arms
MAX_NUMBER = 1e15  # seconds, bytes, tokens: nothing measured here is larger
MAX_ERRORS = 20
MODEL_TEXT = frozenset(
    {"text", "answer_text", "needle", "answer"}
)  # from models and prompts: may hold any character


class _NotStrict(Exception):
    """The bytes are not the JSON we read; the message says where, the code which rule that breaks."""

    def __init__(self, message: str, code: str = "SCHEMA") -> None:
        super().__init__(message)
        self.code = code


def parse(data: bytes) -> tuple[Report | None, tuple[Violation, ...]]:
    """Read a report.

    Args:
        data: The bytes of a report file.

    Returns:
        The report and no violations, or None and at least one of SCHEMA, LEGACY_SCHEMA, UNKNOWN_KIND and
        UNKNOWN_FIELD.
    """
    try:
        document = load(data)
    except _NotStrict as error:
        return None, (_violation(error.code, str(error)),)
    violations = _schema_violations(document)
    if violations:
        return None, violations
    try:
        return Report.model_validate(document), ()
    except ValidationError as error:  # a date such as the 31st of February passes the schema's pattern
        first = error.errors()[0]
        where = _path(first["loc"])
        return None, (_violation("SCHEMA", f"{where}: impossible value {shown(first['input'])}"),)


def is_report(data: bytes) -> bool:
    """Whether a file is meant as a report: of any version of the schema, or of the earlier system."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return b'"kakeya.evidence/' in data  # a broken one
    if not isinstance(document, dict):
        return False
    return str(document.get("schema")).startswith("kakeya.evidence/") or is_of_the_earlier_system(document)


def is_of_the_earlier_system(document: dict[str, Any]) -> bool:
    """Whether a document has the form of the earlier system's reports: no schema, but a kind and more."""
    if "schema" in document or not isinstance(document.get("kind"), str):
        return False
    return type(document.get("schema_version")) is int or isinstance(document.get("config"), dict)


def load(data: bytes) -> dict[str, Any]:
    """Parse strict JSON: capped, UTF-8, one object, no duplicate keys, finite numbers, shallow.

    Raises:
        _NotStrict: A rule is broken, or it is a report of the earlier system.
    """
    if len(data) > MAX_BYTES:
        raise _NotStrict(f"the report has {len(data)} bytes, but at most {MAX_BYTES} are read")
    if data.count(b"[") + data.count(b"{") > 8 * MAX_CONTAINERS:  # brackets inside texts count here, too
        raise _NotStrict("the report holds too many brackets to be read")
    try:
        text = data.decode("utf-8")
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _NotStrict(f"the report is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise _NotStrict(f"the report is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise _NotStrict(f"the report is not valid JSON ({error})") from None
    if not isinstance(document, dict):
        raise _NotStrict(f"the report must be a JSON object, got {type(document).__name__}")
    if is_of_the_earlier_system(document):
        kind = shown(document["kind"])
        raise _NotStrict(  # its texts need not be plain, so nothing else is checked
            f"the report was written by the earlier system (kind {kind}), and has no rows to recompute its"
            " figures from; run the job again, under its old name if you like (docs/lineage.md)",
            "LEGACY_SCHEMA",
        )
    _check_values(document)
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _NotStrict(f"the key {shown(key)} appears twice in one object")
            seen.add(key)
    return keys


def _refuse_constant(name: str) -> NoReturn:
    raise _NotStrict(f"{name} is not a number of JSON")


def _check_values(document: dict[str, Any]) -> None:
    """Bound depth, containers and numbers, and refuse strings that read differently from what they say."""
    containers = 0
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for container in level:
            containers += 1
            if isinstance(container, dict):
                items: Iterable[tuple[str, Any]] = container.items()
                for key in container:
                    _check_scalar(key, "a key")
            else:
                items = (("an entry", value) for value in container)
            for key, value in items:
                if isinstance(value, dict | list):
                    below.append(value)
                else:
                    _check_scalar(value, key)
        if containers > MAX_CONTAINERS:
            raise _NotStrict(f"the report holds more than {MAX_CONTAINERS} objects and arrays")
        if not below:
            return
        level = below
    raise _NotStrict(f"the report is nested deeper than {MAX_DEPTH} levels")


def _check_scalar(value: object, key: str) -> None:
    if isinstance(value, str):
        if key in MODEL_TEXT:
            try:
                value.encode()
            except UnicodeEncodeError:
                raise _NotStrict(f"{key} holds half of a surrogate pair") from None
        elif not value.isprintable():
            raise _NotStrict(
                f"{shown(key)} holds control, bidirectional or unpaired characters: {shown(value)}"
            )
    elif isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
        raise _NotStrict(f"the number {shown(value)} is larger than anything measured here")


def _schema_violations(document: dict[str, Any]) -> tuple[Violation, ...]:
    stated = document.get("schema")
    if stated != SCHEMA_ID:
        known = f"this gate reads {SCHEMA_ID!r}"
        if stated is None:
            return (_violation("LEGACY_SCHEMA", f"the report names no schema; {known}"),)
        return (_violation("LEGACY_SCHEMA", f"the report's schema is {shown(stated)}; {known}"),)
    kinds = schema()["properties"]["kind"]["enum"]
    if document.get("kind") not in kinds:
        return (_violation("UNKNOWN_KIND", f"kind {shown(document.get('kind'))} is none of {kinds}"),)
    rows = sum(len(samples) for samples in _samples(document))
    if rows > MAX_ROWS:
        return (_violation("SCHEMA", f"the report holds {rows} rows, but at most {MAX_ROWS} are judged"),)
    trimmed, violations = _check_long_lists(document)
    for error in _validator().iter_errors(trimmed):
        violations.extend(_describe(error))
        if len(violations) >= MAX_ERRORS:
            break
    return tuple(violations[:MAX_ERRORS])


def _samples(document: dict[str, Any]) -> Iterator[list[Any]]:
    """The lists of rows of a document whose form was not checked yet."""
    arms = document.get("arms")
    for arm in arms if isinstance(arms, list) else ():
        samples = arm.get("samples") if isinstance(arm, dict) else None
        if isinstance(samples, list):
            yield samples


def _check_long_lists(document: dict[str, Any]) -> tuple[dict[str, Any], list[Violation]]:
    """Check tokens, rounds and order here and hand the rest on: the generic validator takes 20 us an item.

    A list of rounds that breaks anything stays, so that the validator says what; so does the order.
    """
    violations: list[Violation] = []
    if _is_order(document.get("order")):
        document = document | {"order": []}
    arms = document.get("arms")
    if not isinstance(arms, list):
        return document, violations
    lighter_arms: list[Any] = []
    for a, arm in enumerate(arms):
        samples = arm.get("samples") if isinstance(arm, dict) else None
        if not isinstance(samples, list):
            lighter_arms.append(arm)
            continue
        lighter_samples: list[Any] = []
        for s, sample in enumerate(samples):
            tokens = sample.get("tokens") if isinstance(sample, dict) else None
            if not isinstance(tokens, list):
                lighter_samples.append(sample)
                continue
            if not all(type(token) is int and token >= 0 for token in tokens):
                where = f"arms[{a}].samples[{s}].tokens"
                violations.append(_violation("SCHEMA", f"{where}: a token must be an integer of 0 or more"))
            # The length stays visible to `maxItems` without walking legitimate arrays.
            limit = schema()["$defs"]["sample"]["properties"]["tokens"]["maxItems"]
            lighter = sample | {"tokens": [0] * len(tokens) if len(tokens) > limit else []}
            if _are_rounds(sample.get("rounds")):
                lighter["rounds"] = []
            lighter_samples.append(lighter)
        lighter_arms.append(arm | {"samples": lighter_samples})
    return document | {"arms": lighter_arms}, violations


def _are_rounds(value: object) -> bool:
    """Whether a value is a list of rounds as the schema has them."""
    definition = schema()["$defs"]["round"]["properties"]
    most_block, most_accepted = definition["block"]["maximum"], definition["accepted"]["maximum"]
    most = schema()["$defs"]["sample"]["properties"]["rounds"]["maxItems"]
    return (
        isinstance(value, list)
        and len(value) <= most
        and all(
            isinstance(turn, dict)
            and turn.keys() == definition.keys()
            and type(turn["block"]) is int
            and 1 <= turn["block"] <= most_block
            and type(turn["accepted"]) is int
            and 0 <= turn["accepted"] <= most_accepted
            and type(turn["draft_s"]) in (int, float)
            and turn["draft_s"] >= 0
            and type(turn["verify_s"]) in (int, float)
            and turn["verify_s"] >= 0
            for turn in value
        )
    )


def _is_order(value: object) -> bool:
    """Whether a value is an order as the schema has it."""
    definition = schema()["properties"]["order"]
    longest = definition["items"]["items"]["maxLength"]
    return (
        isinstance(value, list)
        and len(value) <= definition["maxItems"]
        and all(
            isinstance(run, list)
            and len(run) == 2
            and all(isinstance(name, str) and 1 <= len(name) <= longest for name in run)
            for run in value
        )
    )


def _describe(error: Any) -> list[Violation]:
    """One schema error as violations with a path and the value."""
    where = _path(error.absolute_path)
    keyword, rule = error.validator, error.validator_value
    if keyword == "additionalProperties" and rule is False:
        known = error.schema.get("properties", {})
        unknown = [name for name in error.instance if name not in known]
        return [_violation("UNKNOWN_FIELD", f"{where}: unknown field {shown(name)}") for name in unknown[:5]]
    if "propertyNames" in list(error.absolute_schema_path)[-2:-1]:
        return [_violation("UNKNOWN_FIELD", f"{where}: unknown field {shown(error.instance)}")]
    describe = _KEYWORDS.get(keyword)
    text = f"breaks {keyword} {shown(rule)}" if describe is None else describe(rule, error.instance)
    return [_violation("SCHEMA", f"{where}: {text}")]


# What to say of a schema keyword, from its value in the schema (ours) and the report's value (not ours).
_KEYWORDS: dict[str, Callable[[Any, Any], str]] = {
    "required": lambda names, got: f"lacks {', '.join(repr(name) for name in names if name not in got)}",
    "type": lambda kinds, got: f"must be of type {_types(kinds)}, got {shown(got)}",
    "enum": lambda values, got: f"must be one of {values}, got {shown(got)}",
    "const": lambda value, got: f"must be {value!r}, got {shown(got)}",
    "minimum": lambda bound, got: f"must be at least {bound}, got {shown(got)}",
    "maximum": lambda bound, got: f"must be at most {bound}, got {shown(got)}",
    "pattern": lambda pattern, got: f"must match {pattern}, got {shown(got)}",
    "oneOf": lambda _, got: f"fits none of the allowed forms, got {shown(got)}",
    "maxItems": lambda bound, _: f"has more than {bound} entries",
    "minItems": lambda bound, _: f"has fewer than {bound} entries",
    "maxLength": lambda bound, _: f"is longer than {bound} characters",
    "minLength": lambda bound, _: f"is shorter than {bound} characters",
}


def _types(kinds: object) -> str:
    return " or ".join(kinds) if isinstance(kinds, list) else str(kinds)


def _path(parts: Any) -> str:
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{shown(part).strip(chr(39))}"
    return text.lstrip(".") or "report"


def _violation(code: str, message: str) -> Violation:
    return Violation(code=code, message=message[:2000])


@lru_cache(maxsize=1)
def schema() -> dict[str, Any]:
    """The JSON Schema of a report, from the file beside this module."""
    text = files("bridge.evidence").joinpath("schema.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


@lru_cache(maxsize=1)
def _validator() -> Any:
    """A validator to which 1.0 is no integer, and a pattern means ASCII digits and the text's very end."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError as SchemaError
    from jsonschema.validators import extend

    def pattern(_validator: object, expression: str, instance: object, _schema: object) -> Any:
        anchored = expression[:-1] + r"\Z" if expression.endswith("$") else expression
        if isinstance(instance, str) and not re.search(anchored, instance, re.ASCII):
            yield SchemaError("does not match")

    def is_integer(_checker: object, instance: object) -> bool:
        return type(instance) is int

    checker = Draft202012Validator.TYPE_CHECKER.redefine("integer", is_integer)
    kind: Any = extend(Draft202012Validator, {"pattern": pattern}, type_checker=checker)  # type: ignore[no-untyped-call]
    return kind(schema())
