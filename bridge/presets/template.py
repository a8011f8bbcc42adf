"""From a preset and checked values to the argv of a child process.

An element is a literal, a placeholder, or ``--flag=`` and a placeholder; a placeholder never stands inside
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from bridge.errors import ParameterError, PresetError
from bridge.presets.preset import Preset
from bridge.protocol.manifest import ParamValue

Resolver = Callable[[str, str], list[str]]

SEVERAL = frozenset({"engine", "bridge", "request", "replay"})
NAMELESS = frozenset({"engine", "bridge", "request", "python"})
NAMED = frozenset({"model", "env", "out", "replay"})
_ELEMENT = re.compile(
    r"\{(?P<switch>[a-z][a-z0-9_]*)\?(?P<literal>--[a-z][a-z0-9-]*)\}"
    r"|(?P<flag>--[a-z][a-z0-9-]*=)?"
    r"(?:\{(?P<param>[a-z][a-z0-9_]*)\}|\$\{(?P<kind>[a-z]+)(?::(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*))?\})"
)
_SECRET = re.compile(r"TOKEN|SECRET|KEY|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


@dataclass(frozen=True)
class Switch:
    """One switch of a template.

    Attributes:
        flag: Its name without the dashes.
        param: The parameter that gives its value, or sets it; None: none does.
        literal: What the template gives it: a text, or True for a switch without a value.
        model: The model whose folder it is given; None: none.
    """

    flag: str
    param: str | None = None
    literal: str | bool | None = None
    model: str | None = None


def switches(preset: Preset) -> Iterator[Switch]:
    """The switches of a preset's argv, in order."""
    for element in preset.argv:
        match = _ELEMENT.fullmatch(element)
        if match is None:
            if element.startswith("--") and element != "--":
                flag, equals, value = element[2:].partition("=")
                yield Switch(flag, literal=value if equals else True)
        elif match["switch"]:
            yield Switch(match["literal"][2:], param=match["switch"])
        elif match["flag"]:
            model = match["name"] if match["kind"] == "model" else None
            yield Switch(match["flag"][2:-1], param=match["param"], model=model)


def argv(preset: Preset, params: Mapping[str, ParamValue], resolver: Resolver) -> list[str]:
    """The argv of `preset` with `params` (checked and complete) and the machine's own values.

    Args:
        preset: The preset.
        params: What `validate` returned.
        resolver: Gives the elements for ``${kind:name}``; its errors pass through.

    Raises:
        ParameterError: A value would be read as an option where a plain argument is expected.
    """
    filled: list[str] = []
    for element in preset.argv:
        match = _ELEMENT.fullmatch(element)
        if match is None:
            filled.append(element)
            continue
        flag = match["flag"] or ""
        if match["switch"]:
            filled.extend([match["literal"]] if params[match["switch"]] is True else [])
        elif match["param"]:
            word = _word(preset, match["param"], params[match["param"]], bare=not flag)
            filled += [flag + word] if flag or word or not preset.params[match["param"]].format else []
        else:
            words = resolver(match["kind"], match["name"] or "")
            filled.extend(words if not flag else [flag + words[0]])
    return filled


def show(kind: str, name: str) -> list[str]:
    """A resolver for people: leaves every placeholder as it is written (used by a dry run)."""
    return [f"${{{kind}:{name}}}" if name else f"${{{kind}}}"]


def check(preset: Preset) -> None:
    """Refuse a template with placeholders that are unknown, misplaced or undeclared.

    Raises:
        PresetError: Naming the element.
    """
    used: set[str] = set()
    models: set[str] = set()
    for element in preset.argv:
        match = _ELEMENT.fullmatch(element)
        if match is None:
            if "{" in element or "}" in element:
                raise PresetError(
                    f"preset {preset.name}: {element!r}: a placeholder is a whole element or a flag's value"
                )
        elif match["switch"]:
            used.add(match["switch"])
            declared = preset.params.get(match["switch"])
            if declared is not None and declared.type != "boolean":
                raise PresetError(f"preset {preset.name}: {element!r}: a switch is a boolean parameter")
        elif match["param"]:
            used.add(match["param"])
        else:
            _check_machine_value(preset, element, match)
            used |= {match["name"]} if match["kind"] == "replay" else set()
            models |= {match["name"]} if match["kind"] == "model" else set()
    _check_declared(preset, "parameter", used, set(preset.params))
    _check_declared(preset, "model", models, {model.name for model in preset.models})
    replayed = {match["name"] for match in _matches(preset) if match["kind"] == "replay"}
    if {name for name, item in preset.params.items() if item.format == "request"} != replayed:
        raise PresetError(
            f"preset {preset.name}: ${{replay:PARAM}} goes with a parameter of the format request"
        )
    if preset.workspace == "none" and any(item.format == "repo-path" for item in preset.params.values()):
        raise PresetError(f"preset {preset.name}: a repo-path parameter needs workspace = paths or full")
    if preset.evidence_kind is not None and "out" not in _kinds(preset):
        raise PresetError(f"preset {preset.name}: it promises evidence, but its argv has no ${{out:NAME}}")
    if preset.runs_repo_code and preset.workspace != "full":
        raise PresetError(f'preset {preset.name}: engine = "workload" needs workspace = "full"')


def evidence_name(preset: Preset) -> str | None:
    """File name of the report the preset writes into the result folder (``report.json``), if any."""
    for element in preset.argv:
        match = _ELEMENT.fullmatch(element)
        if match and match["kind"] == "out":
            return f"{match['name']}.json"
    return None


def _check_machine_value(preset: Preset, element: str, match: re.Match[str]) -> None:
    kind, name, flag = match["kind"], match["name"], match["flag"]
    if kind not in NAMELESS | NAMED or (name is None) != (kind in NAMELESS):
        raise PresetError(f"preset {preset.name}: {element!r} is not a placeholder this version knows")
    if flag and kind in SEVERAL:
        raise PresetError(f"preset {preset.name}: {element!r}: ${{{kind}}} is several words, not one value")
    if kind == "env" and _SECRET.search(name):
        raise PresetError(
            f"preset {preset.name}: {element!r}: an argv is published, so no secret belongs in it"
        )


def _check_declared(preset: Preset, what: str, used: set[str], declared: set[str]) -> None:
    for name in sorted(used - declared):
        raise PresetError(f"preset {preset.name}: argv names the {what} {name!r}, which is not declared")
    for name in sorted(declared - used):
        raise PresetError(f"preset {preset.name}: the {what} {name!r} is declared but argv never uses it")


def _kinds(preset: Preset) -> set[str]:
    return {match["kind"] for match in _matches(preset) if match["kind"]}


def _matches(preset: Preset) -> list[re.Match[str]]:
    return [match for element in preset.argv if (match := _ELEMENT.fullmatch(element))]


def _word(preset: Preset, name: str, value: ParamValue, *, bare: bool) -> str:
    word = {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
    if bare and word.startswith("-"):
        raise ParameterError(f"preset {preset.name}: parameter {name}: {word!r} would be read as an option")
    return word
