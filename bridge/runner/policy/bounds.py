"""Presets as a policy leaves them: bounds of parameters become tighter, never wider.

A policy says tighter bounds with the keywords of a preset file. What would let in a value that the preset
itself refuses is an error at its line, so an owner who raises a preset's bound by mistake learns of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from bridge.errors import ParameterError, PolicyError
from bridge.presets import Parameter, Preset, check_value
from bridge.protocol.manifest import ParamValue
from bridge.runner.policy.lines import Key
from bridge.runner.policy.types import Policy, PresetRule
from bridge.runner.policy.values import Values

_LONGEST = 4096
_LARGEST = 1e300
_FOLDER = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]*/)+")
_ENDING = re.compile(r"\.[A-Za-z0-9.]+")


def narrowed(policy: Policy, presets: Mapping[str, Preset]) -> dict[str, Preset]:
    """The presets of a machine, each within what ``[presets.NAME]`` says of it.

    Raises:
        PolicyError: There is no such preset or parameter, a bound is of the wrong type or wider than the
            preset's, or nothing is left between the bounds.
    """
    values = Values(policy.lines)
    for name in policy.presets:
        if name not in presets:
            own = next((each.name for each in presets.values() if name in each.aliases), None)
            hint = f"write [presets.{own}]" if own else f"presets: {', '.join(presets)}"
            raise values.fault(("presets", name), "is not a preset of this machine", hint)
    return {
        name: _preset(values, ("presets", name), preset, policy.presets[name])
        if name in policy.presets
        else preset
        for name, preset in presets.items()
    }


def _preset(values: Values, key: Key, preset: Preset, rule: PresetRule) -> Preset:
    if rule.timeout_s is not None and rule.timeout_s > preset.timeout_s:
        own = (*key, "timeout_s")
        raise values.fault(own, f"is {rule.timeout_s}, but the preset takes {preset.timeout_s} s at most")
    params = dict(preset.params)
    for name, bounds in rule.params.items():
        own = (*key, "params", name)
        if name not in params:
            raise values.fault(
                own,
                f"is no parameter of {preset.name}",
                f"its parameters: {', '.join(params) or 'none'}",
            )
        params[name] = _Narrowing(values, own, preset.name, params[name]).by(bounds)
    return replace(preset, params=params, timeout_s=rule.timeout_s or preset.timeout_s)


class _Narrowing:
    """One parameter's bounds made tighter."""

    def __init__(self, values: Values, key: Key, preset: str, parameter: Parameter) -> None:
        self._values = values
        self._key = key
        self._preset = preset
        self._own = parameter
        self._new = parameter

    def by(self, bounds: Mapping[str, object]) -> Parameter:
        for word in ("minimum", "maximum"):
            if word in bounds:
                self._bound(word, bounds[word])
        for word, change in (
            ("maxLength", self._length),
            ("pattern", self._pattern),
            ("prefix", self._ending),
            ("suffix", self._ending),
            ("enum", self._enum),
            ("default", self._default),
        ):
            if word in bounds:
                change(word, bounds[word])
        self._settle("default" in bounds)
        return self._new

    def _fault(self, word: str, message: str, remedy: str | None = None) -> PolicyError:
        return self._values.fault((*self._key, word), message, remedy)

    def _only_for(self, word: str, *types: str) -> None:
        if self._own.type not in types:
            raise self._fault(word, f"bounds no {self._own.type}, and {self._own.name} is one")

    def _bound(self, word: str, value: object) -> None:
        self._only_for(word, "integer", "number")
        kinds = (int,) if self._own.type == "integer" else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) or not abs(value) <= _LARGEST:
            raise self._fault(word, f"must be a finite number of the parameter's type, got {value!r}")
        own = self._own.minimum if word == "minimum" else self._own.maximum
        if own is not None and (value < own if word == "minimum" else value > own):
            raise self._fault(word, f"is {value}, which is wider than the preset's {own:g}")
        self._new = (
            replace(self._new, minimum=value) if word == "minimum" else replace(self._new, maximum=value)
        )

    def _length(self, word: str, value: object) -> None:
        self._only_for(word, "string")
        length = self._values.number((*self._key, word), value, "characters", 1, _LONGEST)
        if length > self._own.max_length:
            raise self._fault(word, f"is {length}, which is wider than the preset's {self._own.max_length}")
        self._new = replace(self._new, max_length=length)

    def _pattern(self, word: str, value: object) -> None:
        self._only_for(word, "string")
        pattern = self._values.text((*self._key, word), value, "a regular expression")
        if re.search(r"\\[1-9]|\(\?P[=<]|\(\?\(|^\(\?[a-zA-Z]", pattern):
            raise self._fault(
                word, "may name no groups and set no flags: it is joined to the preset's pattern"
            )
        # Both must match: the preset's own is asked first.
        whole = pattern if self._own.pattern is None else f"(?=(?:{self._own.pattern})$)(?:{pattern})"
        try:
            re.compile(pattern)
            re.compile(whole)
        except (re.error, OverflowError, RecursionError) as error:
            raise self._fault(word, f"is a broken regular expression: {error}") from None
        self._new = replace(self._new, pattern=whole)

    def _ending(self, word: str, value: object) -> None:
        if self._own.format != "repo-path":
            raise self._fault(word, f"bounds a repo-path, and {self._own.name} is none")
        text = self._values.text((*self._key, word), value, "the beginning or the end of a path")
        if word == "prefix":
            if not text.startswith(self._own.prefix) or not _FOLDER.fullmatch(text):
                raise self._fault(
                    word, f"must be a folder under {self._own.prefix or 'the workload'}, got {text!r}"
                )
            self._new = replace(self._new, prefix=text)
        else:
            if not text.endswith(self._own.suffix) or not _ENDING.fullmatch(text):
                raise self._fault(
                    word, f"must be like .json and end in the preset's {self._own.suffix!r}, got {text!r}"
                )
            self._new = replace(self._new, suffix=text)

    def _enum(self, word: str, value: object) -> None:
        if type(value) is not list or not value:
            raise self._fault(word, f"must be a list of values, got {value!r}")
        self._new = replace(self._new, enum=tuple(self._value(word, each) for each in value))

    def _default(self, word: str, value: object) -> None:
        self._new = replace(self._new, default=self._value(word, value))

    def _value(self, word: str, value: object) -> ParamValue:
        """A value that the preset itself takes."""
        try:
            return check_value(self._preset, self._own, value)
        except ParameterError as error:
            raise self._fault(word, f"is wider than the preset: {error.message}") from None

    def _settle(self, given: bool) -> None:
        """Refuse bounds that leave nothing, and a default outside them."""
        new = self._new
        if new.minimum is not None and new.maximum is not None and new.minimum > new.maximum:
            raise self._values.fault(
                self._key, f"leaves nothing between minimum {new.minimum:g} and maximum {new.maximum:g}"
            )
        if new.enum:
            kept = tuple(each for each in new.enum if self._fits(replace(new, enum=()), each))
            if not kept:
                raise self._values.fault(self._key, "leaves none of the values that the preset lists")
            self._new = new = replace(new, enum=kept)
        if new.default is not None and not self._fits(new, new.default):
            if given:
                raise self._fault("default", f"is {new.default!r}, which is outside the bounds given here")
            raise self._values.fault(
                self._key,
                f"leaves the preset's default {new.default!r} outside",
                "give a default, too, which these bounds allow",
            )

    def _fits(self, parameter: Parameter, value: ParamValue) -> bool:
        try:
            check_value(self._preset, parameter, value)
        except ParameterError:
            return False
        return True
