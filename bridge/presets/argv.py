"""The argv template of a preset, and the argv that it becomes.

An element is a literal, a placeholder, or ``--flag=`` and a placeholder; a placeholder is never inside
other text, so no value can break out of its element. ``{name}`` is a parameter, and no element where that is
an empty repo-path; ``{name?--flag}`` is that flag where the boolean parameter is true, and no element where
it is false. ``${kind}`` and ``${kind:name}`` are resolved on the machine that runs:

    ${engine}        the installed engine: interpreter, -I, -m, engine      (several elements)
    ${bridge}        the installed bridge, likewise                         (several elements)
    ${python}        the interpreter
    ${request}       the flags that bind a report to this request           (several elements)
    ${replay:PARAM}  the report of the request that a parameter names, where its models may lie, who made it
                     and who verifies it                                    (several elements)
    ${model:NAME}    folder of a model                      ${env:NAME}  a variable of the runner
    ${out:NAME}      a file in the job's result folder
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bridge.errors import ParameterError
from bridge.presets.values import Parameter
from bridge.protocol.manifest import ParamValue

Resolver = Callable[[str, str], list[str]]

_SEVERAL = frozenset({"engine", "bridge", "request", "replay"})
_NAMELESS = frozenset({"engine", "bridge", "request", "python"})
_NAMED = frozenset({"model", "env", "out", "replay"})
_ELEMENT = re.compile(
    r"\{(?P<switch>[a-z][a-z0-9_]*)\?(?P<literal>--[a-z][a-z0-9-]*)\}"
    r"|(?P<flag>--[a-z][a-z0-9-]*=)?"
    r"(?:\{(?P<param>[a-z][a-z0-9_]*)\}|\$\{(?P<kind>[a-z]+)(?::(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*))?\})"
)
_SECRET = re.compile(r"TOKEN|SECRET|KEY|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


@dataclass(frozen=True)
class Element:
    """One element of a template."""

    text: str
    flag: str | None = None  # --flag, in front of a value or of a switch
    param: str | None = None  # gives the value, or sets the switch
    is_switch: bool = False
    kind: str | None = None  # what the machine puts in, such as "model"
    name: str = ""  # of that, such as "gemma"


@dataclass(frozen=True)
class Switch:
    """One switch of a template."""

    flag: str  # without the dashes
    param: str | None = None  # gives its value, or sets it
    literal: str | bool | None = None  # what the template gives it; True: no value
    model: str | None = None  # the model whose folder it is given


def parse_element(text: str) -> Element:
    """One element of a template; a ValueError where a placeholder is unknown or misplaced."""
    match = _ELEMENT.fullmatch(text)
    if match is None:
        if "{" in text or "}" in text:
            raise ValueError(f"{text!r}: a placeholder is a whole element or a flag's value")
        return Element(text)
    if match["switch"]:
        return Element(text, match["literal"], match["switch"], is_switch=True)
    flag = match["flag"].removesuffix("=") if match["flag"] else None
    if match["param"]:
        return Element(text, flag, match["param"])
    kind, name = match["kind"], match["name"]
    if kind not in _NAMELESS | _NAMED or (name is None) != (kind in _NAMELESS):
        raise ValueError(f"{text!r} is not a placeholder this version knows")
    if flag and kind in _SEVERAL:
        raise ValueError(f"{text!r}: ${{{kind}}} is several words, not one value")
    if kind == "env" and _SECRET.search(name):
        raise ValueError(f"{text!r}: an argv is published, so no secret belongs in it")
    return Element(text, flag, kind=kind, name=name or "")


def switches(template: Sequence[str]) -> Iterator[Switch]:
    """The switches of a template, in order."""
    for element in map(parse_element, template):
        if element.is_switch and element.flag:
            yield Switch(element.flag[2:], param=element.param)
        elif element.flag:
            model = element.name if element.kind == "model" else None
            yield Switch(element.flag[2:], param=element.param, model=model)
        elif element.text.startswith("--") and element.text != "--":
            flag, equals, value = element.text[2:].partition("=")
            yield Switch(flag, literal=value if equals else True)


def fill(
    template: Sequence[str],
    parameters: Mapping[str, Parameter],
    values: Mapping[str, ParamValue],
    resolver: Resolver,
) -> list[str]:
    """The argv of a template.

    Args:
        template: Elements that `parse_element` knows.
        parameters: Of the preset, by name.
        values: Checked and complete.
        resolver: Gives the elements for ``${kind:name}``; its errors pass through.
    """
    filled: list[str] = []
    for element in map(parse_element, template):
        if element.is_switch and element.flag and element.param:
            filled += [element.flag] if values[element.param] is True else []
            continue
        if element.param:
            words = [_word(element, values[element.param])]
            if words == [""] and not element.flag and parameters[element.param].format is not None:
                words = []
        elif element.kind:
            words = resolver(element.kind, element.name)
        else:
            words = [element.text]
        filled += [f"{element.flag}={words[0]}"] if element.flag else words
    return filled


def show(kind: str, name: str) -> list[str]:
    """A resolver for people: leaves every placeholder as it is written (used by a dry run)."""
    return [f"${{{kind}:{name}}}" if name else f"${{{kind}}}"]


def _word(element: Element, value: ParamValue) -> str:
    word = str(value).lower() if isinstance(value, bool) else str(value)
    if element.flag is None and word.startswith("-"):
        raise ParameterError(f"parameter {element.param}: {word!r} would be read as an option")
    return word
