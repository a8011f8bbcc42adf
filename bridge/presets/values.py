"""Parameters of a preset: JSON Schema properties of one scalar each, and the values they allow.

Stricter than JSON Schema: 3.0 is no integer, a pattern must match the whole text, and a repository path can
neither leave the workload nor look like an option.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from bridge.errors import ParameterError
from bridge.protocol.manifest import ParamValue
from bridge.protocol.runner_info import Bound
from bridge.protocol.sanitize import clean_line, quoted
from bridge.settings import STRICT

DEFAULT_LENGTH = 1000  # characters of a text without maxLength
_MAX_PATH = 512
# A nonce or a branch, or the beginning of either; never an option.
_HANDLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9/_-]{3,199}")
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+ -]*(/[A-Za-z0-9_][A-Za-z0-9._+ -]*)*/?")
_PATH_WORDS = (
    f"a relative path of at most {_MAX_PATH} characters, each part beginning with a letter, a digit or _ and"
    " holding only letters, digits, spaces and . _ + -"
)
_MODEL = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")  # a part of a path: never more
_WHOLE = re.compile(r"-?[0-9]{1,18}")
# A pattern with these would change its meaning when it is joined to another one.
_NOT_JOINED = re.compile(r"\\[1-9]|\(\?P[=<]|\(\?\(|^\(\?[a-zA-Z]")


# Whether a policy's bound is wider than the preset's own.
_WIDER: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda own, new: new < own,
    "maximum": lambda own, new: new > own,
    "maxLength": lambda own, new: new > own,
    "prefix": lambda own, new: not new.startswith(own),
    "suffix": lambda own, new: not new.endswith(own),
}


# What values of a type are called, and how they are recognised.
_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "string": ("a text", lambda value: isinstance(value, str)),
    "integer": ("a whole number", lambda value: type(value) is int),
    "number": (
        "a finite number",
        lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max,
    ),
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
}


def _require_number(value: object) -> object:
    if (fault := _fault({"type": "number"}, value)) is not None:
        raise ValueError(fault)
    return value


_Bound = Annotated[Bound, BeforeValidator(_require_number)]


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
    format: Literal["repo-path", "request", "model"] | None = Field(
        default=None,
        description="repo-path: a path of the workload; request: a finished request, by its handle; model:"
        " a model of the machine, in place of the ${model:NAME} that the default names",
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
        compared = {"maxLength": DEFAULT_LENGTH, **own}
        for word, value in new.items():
            if word in ("enum", "default"):
                wider = any(self.fault(each) for each in (value if word == "enum" else [value]))
            else:
                wider = word in _WIDER and word in compared and _WIDER[word](compared[word], value)
            if wider:
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


def check_value(preset: str, name: str, parameter: Parameter, value: object) -> ParamValue:
    """The value itself; a `ParameterError` where the parameter does not allow it."""
    if (fault := parameter.fault(value)) is not None:
        raise ParameterError(
            f"preset {preset}: parameter {name}: {fault}",
            f"see: kakeya_mac presets {preset} (--remote: as runners have it)",
        )
    return cast("ParamValue", value)


def read_word(parameter: Parameter, text: str) -> ParamValue:
    """The value of a word that a person typed; a text where it is none of the parameter's type."""
    try:
        if parameter.type == "boolean":
            return {"true": True, "false": False}[text]
        if parameter.type != "string" and _WHOLE.fullmatch(text):
            return int(text)
        if parameter.type == "number":
            return float(text)
    except (KeyError, ValueError):
        pass
    return text


def _fault(keywords: dict[str, Any], value: Any) -> str | None:
    """What is wrong with a value, by JSON Schema and what is stricter here."""
    from jsonschema import Draft202012Validator

    words, accepts = _TYPES[keywords["type"]]
    if not accepts(value):
        return f"must be {words}, got {quoted(value)}"
    # jsonschema's own type would call 3.0 an integer, and its pattern may match a part.
    schema = {"maxLength": DEFAULT_LENGTH, **keywords, "pattern": ""}
    if (error := next(Draft202012Validator(schema).iter_errors(value), None)) is not None:
        return clean_line(error.message, limit=300)
    if not isinstance(value, str):
        return None
    if (pattern := keywords.get("pattern")) is not None and not re.fullmatch(pattern, value):
        return f"{quoted(value)} does not match {pattern}"
    if not value.startswith(prefix := keywords.get("prefix", "")):
        return f"{quoted(value)} does not lie under {prefix}"
    if not value.endswith(suffix := keywords.get("suffix", "")):
        return f"{quoted(value)} does not end in {suffix}"
    match keywords.get("format"):
        case "request" if not _HANDLE.fullmatch(value):
            return f"{quoted(value)} is not a handle; see: kakeya_mac history"
        case "model" if len(value) > 64 or not _MODEL.fullmatch(value):
            return f"{quoted(value)} is not a model's name: small letters, digits and single -"
        case "repo-path" if len(value) > _MAX_PATH or not _PATH.fullmatch(value):
            return f"{quoted(value)} is not {_PATH_WORDS}"
    return None
