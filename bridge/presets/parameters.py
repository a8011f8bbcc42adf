"""Parameter values: strictly typed, bounded, and safe to stand in an argv.

`validate` judges what a request carries, `parse_cli` what a person typed. Whether a repo-path exists in the
workload commit is for the runner to see; here it is only made sure that it cannot point anywhere else.
"""

from __future__ import annotations

import difflib
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence

from bridge.errors import ParameterError
from bridge.presets.preset import Parameter, Preset
from bridge.protocol.manifest import ParamValue

MAX_PATH = 512
# A nonce or a branch, or the beginning of either; never an option.
_HANDLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9/_-]{3,199}")
_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+ -]*")
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_BOOLEANS = {"true": True, "false": False}
_KINDS = {
    "string": "a text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
}


def validate(preset: Preset, params: Mapping[str, object]) -> dict[str, ParamValue]:
    """The parameters of a request with defaults filled in, in the preset's order.

    Raises:
        ParameterError: One is unknown, missing, of the wrong type, out of its bounds or unsafe. The message
            names parameter, value and bound.
    """
    for name in params:
        if name not in preset.params:
            raise ParameterError(*_unknown(preset, name))
    values: dict[str, ParamValue] = {}
    for name, parameter in preset.params.items():
        if name in params:
            values[name] = check_value(preset.name, parameter, params[name])
        elif parameter.default is not None:
            values[name] = parameter.default
        else:
            raise ParameterError(
                f"preset {preset.name}: the parameter {name} must be given ({parameter.description})",
                f"add: -p {name}=VALUE",
            )
    return values


def parse_cli(preset: Preset, items: Sequence[str], asked: str | None = None) -> dict[str, ParamValue]:
    """Typed values from ``key=value`` words, by the preset's types; no defaults are filled in.

    Args:
        preset: The preset.
        items: The words.
        asked: The name under which the preset was asked for. Under an alias the parameters of the job of that
            name are known, too: values have the new names, and what has no counterpart is left out.

    Raises:
        ParameterError: A word is not ``key=value``, a key is unknown or given twice, or a value is not of
            its type or out of bounds.
    """
    values: dict[str, ParamValue] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals:
            raise ParameterError(f"a parameter is written key=value, got {item!r}")
        if asked in preset.aliases:
            name = preset.renamed.get(name, name)
            if not name:
                continue
        if name not in preset.params:
            raise ParameterError(*_unknown(preset, name))
        if name in values:
            raise ParameterError(f"preset {preset.name}: the parameter {name} is given twice")
        parameter = preset.params[name]
        values[name] = check_value(preset.name, parameter, _typed(preset.name, parameter, text))
    return values


def check_value(preset: str, parameter: Parameter, value: object) -> ParamValue:
    """The value itself, once it is known to be of the parameter's type and within its bounds.

    Raises:
        ParameterError: It is not.
    """
    where = f"preset {preset}: parameter {parameter.name}"
    typed = _require_type(where, parameter, value)
    if parameter.enum and typed not in parameter.enum:
        allowed = ", ".join(str(choice) for choice in parameter.enum)
        raise ParameterError(f"{where}: {_shown(value)} is not one of {allowed}", _close(value, parameter))
    if isinstance(typed, str):
        _check_text(where, parameter, typed)
    elif not isinstance(typed, bool):
        _check_bounds(where, parameter, typed)
    return typed


def _require_type(where: str, parameter: Parameter, value: object) -> ParamValue:
    # bool is a subclass of int in Python, not in a manifest: types are compared, not instances.
    accepted = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}
    if type(value) not in accepted[parameter.type]:
        raise ParameterError(f"{where}: must be {_KINDS[parameter.type]}, got {_shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ParameterError(f"{where}: must be a finite number, got {value!r}")
    assert isinstance(value, (str, int, float))  # noqa: S101 - narrowed by the table above
    return value


def _check_bounds(where: str, parameter: Parameter, value: float) -> None:
    if parameter.minimum is not None and value < parameter.minimum:
        raise ParameterError(f"{where}: {_shown(value)} is below the minimum {parameter.minimum:g}")
    if parameter.maximum is not None and value > parameter.maximum:
        raise ParameterError(f"{where}: {_shown(value)} is above the maximum {parameter.maximum:g}")


def _check_text(where: str, parameter: Parameter, value: str) -> None:
    if len(value) > parameter.max_length:
        raise ParameterError(f"{where}: {len(value)} characters, but at most {parameter.max_length}")
    if any(unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") for character in value):
        raise ParameterError(f"{where}: {_shown(value)} holds a control character")
    if parameter.pattern is not None and not re.fullmatch(parameter.pattern, value):
        raise ParameterError(f"{where}: {_shown(value)} does not match {parameter.pattern}")
    if parameter.format == "repo-path":
        _check_path(where, parameter, value)
    elif parameter.format == "request" and not _HANDLE.fullmatch(value):
        raise ParameterError(
            f"{where}: {_shown(value)} is not a handle: a finished request's nonce, the beginning of one,"
            " or its branch",
            "see: kakeya_mac history",
        )


def _check_path(where: str, parameter: Parameter, value: str) -> None:
    """A path that stays inside the workload whatever file system reads it, and is never an option.

    The empty one, where it is the default, is the workload itself.
    """
    if value == "" == parameter.default:
        return
    if not value or len(value) > MAX_PATH or value.startswith("/"):
        raise ParameterError(f"{where}: {_shown(value)} is not a relative path of 1 to {MAX_PATH} characters")
    for component in value.removesuffix("/").split("/"):
        if component in ("", ".", ".."):
            raise ParameterError(f"{where}: {_shown(value)} leaves its folder or has an empty part")
        if not _COMPONENT.fullmatch(component):
            raise ParameterError(
                f"{where}: {_shown(value)}: the part {component!r} must start with a letter, a digit or _ and"
                " hold only letters, digits, spaces and . _ + -"
            )
    if not value.startswith(parameter.prefix):
        raise ParameterError(f"{where}: {_shown(value)} does not lie under {parameter.prefix}")
    if not value.endswith(parameter.suffix):
        raise ParameterError(f"{where}: {_shown(value)} does not end in {parameter.suffix}")


def _typed(preset: str, parameter: Parameter, text: str) -> ParamValue:
    where = f"preset {preset}: parameter {parameter.name}"
    wrong = ParameterError(f"{where}: must be {_KINDS[parameter.type]}, got {_shown(text)}")
    if parameter.type == "string":
        return text
    if parameter.type == "boolean":
        if text not in _BOOLEANS:
            raise wrong
        return _BOOLEANS[text]
    if _WHOLE.fullmatch(text):
        return int(text)
    if parameter.type == "integer":
        raise wrong
    try:
        return float(text)
    except ValueError:
        raise wrong from None


def left_out(preset: Preset, items: Sequence[str], asked: str) -> list[str]:
    """Names in ``key=value`` words that `parse_cli` leaves out, because they have no counterpart."""
    names = [item.partition("=")[0] for item in items] if asked in preset.aliases else []
    return [name for name in names if preset.renamed.get(name) == ""]


def _unknown(preset: Preset, name: str) -> tuple[str, str]:
    if new := preset.renamed.get(name):
        message = f"preset {preset.name}: unknown parameter {_shown(name)}: it is called {new} here"
        return message, f"write: -p {new}=VALUE"
    close = difflib.get_close_matches(name, preset.params, n=1, cutoff=0.5)
    known = ", ".join(preset.params) or "none"
    hint = f"did you mean {close[0]}? " if close else ""
    return f"preset {preset.name}: unknown parameter {_shown(name)}", f"{hint}known parameters: {known}"


def _close(value: object, parameter: Parameter) -> str | None:
    close = difflib.get_close_matches(str(value)[:100], [str(choice) for choice in parameter.enum], n=1)
    return f"did you mean {close[0]}?" if close else None


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 120 else text[:117] + "..."
