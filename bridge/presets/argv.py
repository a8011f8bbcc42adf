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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Resolver = Callable[[str, str], list[str]]

_SEVERAL = frozenset({"engine", "bridge", "request", "replay"})
_NAMELESS = frozenset({"engine", "bridge", "request", "python"})
_NAMED = frozenset({"model", "env", "out", "replay"})
_ELEMENT = re.compile(
    r"\{(?P<switch>[a-z][a-z0-9_]*)\?--(?P<literal>[a-z][a-z0-9-]*)\}"
    r"|(?:--(?P<flag>[a-z][a-z0-9-]*)=)?"
    r"(?:\{(?P<param>[a-z][a-z0-9_]*)\}|\$\{(?P<kind>[a-z]+)(?::(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*))?\})"
)
_SECRET = re.compile(r"TOKEN|SECRET|KEY|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


@dataclass(frozen=True)
class Element:
    """One element of a template."""

    text: str
    flag: str = ""  # without the dashes
    literal: str | bool | None = None  # what the template itself gives the flag; True: no value
    param: str | None = None  # gives the value, or sets the switch
    is_switch: bool = False  # the flag alone, where the parameter is true
    kind: str = ""  # what the machine puts in, such as "model"
    name: str = ""  # of that, such as "gemma"

    @property
    def model(self) -> str | None:
        """The model whose folder the flag is given."""
        return self.name if self.kind == "model" else None


def parse_element(text: str) -> Element:
    """One element of a template; a ValueError where a placeholder is unknown or misplaced."""
    match = _ELEMENT.fullmatch(text)
    if match is None:
        if "{" in text or "}" in text:
            raise ValueError(f"{text!r}: a placeholder is a whole element or a flag's value")
        flag, equals, value = text.removeprefix("--").partition("=")
        return Element(text, flag, value if equals else True) if text.startswith("--") else Element(text)
    flag = match["flag"] or ""
    if match["switch"]:
        return Element(text, match["literal"], param=match["switch"], is_switch=True)
    if match["param"]:
        return Element(text, flag, param=match["param"])
    kind, name = match["kind"], match["name"]
    if kind not in _NAMELESS | _NAMED or (name is None) != (kind in _NAMELESS):
        raise ValueError(f"{text!r} is not a placeholder this version knows")
    if flag and kind in _SEVERAL:
        raise ValueError(f"{text!r}: ${{{kind}}} is several words, not one value")
    if (kind, name) == ("out", "result"):
        raise ValueError(f"{text!r}: result.json is the result itself")
    if kind == "env" and _SECRET.search(name):
        raise ValueError(f"{text!r}: an argv is published, so no secret belongs in it")
    return Element(text, flag, kind=kind, name=name or "")


def switches(template: Sequence[str]) -> list[Element]:
    """The elements of a template that begin with a flag, in order."""
    return [element for element in map(parse_element, template) if element.flag]


def show(kind: str, name: str) -> list[str]:
    """A resolver for people: leaves every placeholder as it is written (used by a dry run)."""
    return [f"${{{kind}:{name}}}" if name else f"${{{kind}}}"]
