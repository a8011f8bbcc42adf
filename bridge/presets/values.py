"""Parameters of a preset: JSON Schema properties of one scalar each, and the values they allow.

`jsonschema` validates values. Three things are stricter than JSON Schema: 3.0 is no integer, a pattern must
match the whole text, and a repository path can neither leave the workload nor look like an option.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from bridge.errors import ParameterError
from bridge.protocol.manifest import ParamValue
from bridge.protocol.sanitize import clean_line, quoted
from bridge.settings import STRICT

DEFAULT_LENGTH = 1000  # characters of a text without maxLength
_MAX_PATH = 512
# A nonce or a branch, or the beginning of either; never an option.
_HANDLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9/_-]{3,199}")
_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+ -]*")
_WHOLE = re.compile(r"-?[0-9]{1,18}")
# A pattern with these would change its meaning when it is joined to another one.
_NOT_JOINED = re.compile(r"\\[1-9]|\(\?P[=<]|\(\?\(|^\(\?[a-zA-Z]")


def _is_number(value: object) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _require_number(value: object) -> object:
    if not _is_number(value):
        raise ValueError(f"must be a finite number, got {quoted(value)}")
    return value


# As wide as what a registration says of a parameter.
_Bound = Annotated[int | float, BeforeValidator(_require_number), Field(ge=-1e300, le=1e300)]


# What values of a type are called, and how they are recognised.
_TYPES: dict[str, tuple[str, Callable[[object], bool]]] = {
    "string": ("a text", lambda value: isinstance(value, str)),
    "integer": ("a whole number", lambda value: type(value) is int),
    "number": ("a finite number", _is_number),
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
}


class ParameterBounds(BaseModel):
    """The keywords that bound a parameter. A policy may give them again, tighter."""

    model_config = STRICT | ConfigDict(validate_by_name=True, validate_by_alias=True)

    default: ParamValue | None = None
    enum: Annotated[tuple[str | int, ...], Field(min_length=1)] | None = None
    minimum: _Bound | None = None
    maximum: _Bound | None = None
    pattern: str | None = None
    max_length: Annotated[int, Field(ge=1, le=4096)] | None = Field(default=None, alias="maxLength")
    prefix: str | None = Field(
        default=None,
        pattern=r"^([A-Za-z0-9_][A-Za-z0-9._-]*/)+$",
        description="folder of the workload that a repo-path must lie in",
    )
    suffix: str | None = Field(
        default=None, pattern=r"^\.[A-Za-z0-9.]+$", description="what a repo-path must end in"
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"the pattern {quoted(pattern)} is broken: {error}") from None
        return pattern

    def keywords(self) -> dict[str, Any]:
        """What is set, as JSON Schema writes it."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Parameter(ParameterBounds):
    """A JSON Schema property of one scalar. Without a default it must be given."""

    type: Literal["string", "integer", "number", "boolean"]
    description: Annotated[str, Field(min_length=1, max_length=400)]
    format: Literal["repo-path", "request"] | None = Field(
        default=None,
        description="repo-path: a path of the workload; request: a finished request, by its handle",
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> Parameter:
        words, numeric = self.keywords(), self.type in ("integer", "number")
        if numeric and not ("enum" in words or {"minimum", "maximum"} <= words.keys()):
            raise ValueError("a number needs minimum and maximum, or enum")
        if self.type == "string" and not words.keys() & {"enum", "pattern", "format"}:
            raise ValueError("a text needs enum, pattern or format")
        for names, fits in (
            ({"minimum", "maximum"}, numeric),
            ({"pattern", "maxLength", "format"}, self.type == "string"),
            ({"prefix", "suffix"}, self.format == "repo-path"),
        ):
            if not fits and (found := names & words.keys()):
                raise ValueError(f"{min(found)} bounds no {self.format or self.type}")
        if words.get("minimum", -math.inf) > words.get("maximum", math.inf):
            raise ValueError(f"nothing is left between minimum {self.minimum} and maximum {self.maximum}")
        if self.default is not None and (fault := self.fault(self.default)) is not None:
            raise ValueError(f"the default is not allowed: {fault}")
        return self

    def fault(self, value: object) -> str | None:
        """What is wrong with a value; None: it is allowed."""
        if self.format == "repo-path" and value == "" == self.default:
            return None  # the workload itself
        return _fault(self.keywords(), value)

    def narrowed(self, bounds: ParameterBounds) -> Parameter:
        """This parameter within tighter bounds; a `ValueError` where they are wider, or leave nothing."""
        own, new = self.keywords(), bounds.keywords()
        for word, value in new.items():
            if any(self._is_widened_by(word, each) for each in (value if word == "enum" else [value])):
                raise ValueError(f"{word} = {quoted(value)} is wider than the preset's {own.get(word)}")
        if "pattern" in new and self.pattern is not None:
            if _NOT_JOINED.search(new["pattern"]):
                raise ValueError("pattern may name no group and set no flag: it is joined to the preset's")
            new["pattern"] = f"(?=(?:{self.pattern})$)(?:{new['pattern']})"  # both must match
        merged = own | new
        if "enum" in merged:
            rest = {word: bound for word, bound in merged.items() if word != "enum"}
            merged["enum"] = [each for each in merged["enum"] if _fault(rest, each) is None]
        return Parameter.model_validate_json(json.dumps(merged))

    def _is_widened_by(self, word: str, bound: Any) -> bool:
        match word:
            case "enum" | "default":
                return self.fault(bound) is not None
            case "minimum":
                return self.minimum is not None and bound < self.minimum
            case "maximum":
                return self.maximum is not None and bound > self.maximum
            case "maxLength":
                return bool(bound > (self.max_length or DEFAULT_LENGTH))
            case "prefix":
                return not bound.startswith(self.prefix or "")
            case "suffix":
                return not bound.endswith(self.suffix or "")
        return False


def check_value(preset: str, name: str, parameter: Parameter, value: object) -> ParamValue:
    """The value itself; a `ParameterError` where the parameter does not allow it."""
    if (fault := parameter.fault(value)) is not None:
        close = difflib.get_close_matches(str(value)[:100], map(str, parameter.enum or ()), n=1)
        hint = f"did you mean {close[0]}?" if close else None
        raise ParameterError(f"preset {preset}: parameter {name}: {fault}", hint)
    return cast("ParamValue", value)


def read_word(preset: str, name: str, parameter: Parameter, text: str) -> ParamValue:
    """The value of a word that a person typed."""
    value: ParamValue = text
    try:
        if parameter.type == "boolean":
            value = {"true": True, "false": False}[text]
        elif parameter.type != "string" and _WHOLE.fullmatch(text):
            value = int(text)
        elif parameter.type == "number":
            value = float(text)
    except (KeyError, ValueError):
        pass  # the text itself, which is of the wrong type
    return check_value(preset, name, parameter, value)


def _fault(keywords: dict[str, Any], value: object) -> str | None:
    # The type comes first: the other keywords say nothing of a value of another type.
    schema = {"type": keywords["type"], "maxLength": DEFAULT_LENGTH, **keywords}
    error = next(_validator_type()(schema).iter_errors(value), None)
    return None if error is None else clean_line(error.message, limit=300)


@cache
def _validator_type() -> Any:
    from jsonschema import Draft202012Validator, ValidationError, validators

    def keyword(fault: Callable[[Any, Any], str | None]) -> Callable[..., Iterator[ValidationError]]:
        def check(_validator: object, bound: Any, value: Any, _schema: object) -> Iterator[ValidationError]:
            if (said := fault(bound, value)) is not None:
                yield ValidationError(said)

        return check

    checks = {name: keyword(fault) for name, fault in _KEYWORDS.items()}
    return validators.extend(Draft202012Validator, checks)  # type: ignore[no-untyped-call]


def _type_fault(name: str, value: object) -> str | None:
    words, accepts = _TYPES[name]
    return None if accepts(value) else f"must be {words}, got {quoted(value)}"


def _format_fault(name: str, value: str) -> str | None:
    if name == "request":
        is_one = _HANDLE.fullmatch(value) is not None
        return None if is_one else f"{quoted(value)} is not a handle; see: kakeya_mac history"
    if not value or len(value) > _MAX_PATH or value.startswith("/"):
        return f"{quoted(value)} is not a relative path of 1 to {_MAX_PATH} characters"
    for part in value.removesuffix("/").split("/"):
        if part in (".", "..") or not _COMPONENT.fullmatch(part):
            return (
                f"{quoted(value)}: each part must start with a letter, a digit or _ and hold only letters,"
                " digits, spaces and . _ + -"
            )
    return None


def _must(fits: Callable[[Any, Any], object], words: str) -> Callable[[Any, Any], str | None]:
    def fault(bound: Any, value: Any) -> str | None:
        # As in JSON Schema, a keyword of texts says nothing of other values.
        is_allowed = not isinstance(value, str) or fits(bound, value)
        return None if is_allowed else f"{quoted(value)} {words} {bound}"

    return fault


# What is wrong with a value, by the keywords that JSON Schema lacks or is less strict about.
_KEYWORDS: dict[str, Callable[[Any, Any], str | None]] = {
    "type": _type_fault,
    "format": _format_fault,
    "pattern": _must(re.fullmatch, "does not match"),
    "prefix": _must(lambda prefix, value: value.startswith(prefix), "does not lie under"),
    "suffix": _must(lambda suffix, value: value.endswith(suffix), "does not end in"),
}
