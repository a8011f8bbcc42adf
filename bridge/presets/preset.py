"""Presets: the jobs that a machine may be asked for, one TOML file each.

The file lies on the machine that runs it; a request only names the preset and gives values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from bridge.errors import ParameterError, PresetError
from bridge.presets.argv import Resolver, parse_element
from bridge.presets.values import Parameter, check_value, read_word
from bridge.protocol.manifest import ParamName, ParamValue, PresetName
from bridge.protocol.sanitize import quoted
from bridge.settings import STRICT, parse_toml, read_file

BUNDLED = Path(__file__).parent

_KV = r"^(sliding-bounded|sink-window|affine|rotated|lattice|lattice-packed|restored)(:[a-z0-9:,]+)?$"


class Requires(BaseModel):
    """What a machine must have before the job starts."""

    model_config = STRICT

    metal: bool = False
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    modules: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = ()


class ModelNeed(BaseModel):
    """What one ``${model:NAME}`` of argv means."""

    model_config = STRICT

    mac: Annotated[str, Field(min_length=1, max_length=200, description="what is expected on a real Mac")]
    stand_in: Literal["demo-target", "demo-drafter", "demo-projector", "demo-proposer"] | None = Field(
        default=None,
        description="the shipped model that is used where the machine has none of its own and no Metal",
    )


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Promise:
    """What the report must be and show, whatever values the request gives."""

    kind: Literal["throughput", "recall", "kv", "parity", "quality", "perplexity", "probe"]
    claims: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[a-z]+(_[a-z]+)*$")], ...],
        Field(description="claims that it must make (else CLAIM_MISSING); the gate judges whether they hold"),
    ] = ()
    drafter: Annotated[
        Literal["any", "dflash", "dflash2", "autoregressive", "masked-diffusion", "mtp"] | None,
        Field(description="every arm under test drafts: any network, or that kind (else ENGINE_NEVER_RAN)"),
    ] = None
    baseline: Annotated[
        bool, Field(description="an arm is mlx-lm's plain decoding (else SPEEDUP_BASELINE_LOOP)")
    ] = False
    restoration: Annotated[
        Literal["exact", "learned"] | None,
        Field(description="what restores evicted positions in an arm under test (else RESTORATION_CLAIM)"),
    ] = None
    kv: Annotated[
        tuple[Annotated[str, Field(pattern=_KV)], ...],
        Field(description="KV policies, or kinds of them, that arms under test use (else SILENT_FALLBACK)"),
    ] = ()
    configuration: Annotated[
        Mapping[str, ParamValue],
        Field(description="switches that it must name with these values (else SILENT_FALLBACK)"),
    ] = field(default_factory=dict)
    # Of a parity report (else PARITY_TOLERANCE): type, loosest tolerance, whether it compares hidden states.
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    tolerance: Annotated[float, Field(gt=0)] | None = None
    hidden_states: bool = False


class Preset(BaseModel):
    """One job that a machine may be asked for; a preset file holds one."""

    model_config = STRICT | ConfigDict(title="kakeya-mac preset, version 1")

    name: PresetName
    aliases: tuple[PresetName, ...] = ()
    renamed: dict[ParamName, str] = Field(
        default={},
        description="Parameters of the jobs that the aliases name: what each is called here, or an empty"
        " text where it has no counterpart and is left out.",
    )
    summary: Annotated[str, Field(min_length=1, max_length=120)]
    description: Annotated[str, AfterValidator(str.strip), Field(max_length=4000)] = ""
    argv: tuple[Annotated[str, Field(pattern=r"^[^\x00]+$", max_length=1000)], ...] = Field(
        min_length=1,
        max_length=64,
        description="Each element is a literal, {param}, --flag={param}, {param?--flag} (the flag where"
        " the boolean is true), ${kind}, ${kind:name} or --flag=${kind:name}. Never a shell line.",
    )
    timeout_s: Annotated[int, Field(ge=1, le=86_400)]
    engine: Literal["installed", "workload"] = Field(
        description="installed: code comes from the machine and the workload gives data only."
        " workload: code of the requested commit runs."
    )
    workspace: Literal["none", "paths", "full"] = Field(
        description="How much of the workload commit is laid out for the job: nothing, the repo-path"
        " parameters, or all of it."
    )
    requires: Requires = Requires()
    models: dict[PresetName, ModelNeed] = Field(
        default={},
        description="What each ${model:NAME} of argv means. The runner looks in its policy,"
        " KAKEYA_MODEL_<NAME> and ~/kakeya-models/NAME.",
    )
    network: bool = Field(
        default=False,
        description="the job asks for the machine's network, which it gets only where the policy allows it",
    )
    rejected_exit_code: Annotated[int, Field(ge=1, le=125)] | None = Field(
        default=None, description="exit code by which the job says that the evidence was rejected"
    )
    evidence: Promise | None = None
    params: Annotated[dict[ParamName, Parameter], Field(max_length=64)] = {}

    _digest: str = PrivateAttr(default="")

    @model_validator(mode="after")
    def _is_consistent(self) -> Preset:
        elements = [parse_element(text) for text in self.argv]
        for element in elements:
            declared = self.params.get(element.param or "")
            if element.is_switch and declared is not None and declared.type != "boolean":
                raise ValueError(f"{element.text!r}: a switch is a boolean parameter")
        replayed = {element.name for element in elements if element.kind == "replay"}
        chosen = {name for name, each in self.params.items() if each.format == "model"}
        used = {element.param for element in elements if element.param} | replayed | chosen
        _same("parameter", used, set(self.params))
        _same("model", {each.name for each in elements if each.kind == "model"}, set(self.models))
        if {name for name, each in self.params.items() if each.format == "request"} != replayed:
            raise ValueError("${replay:PARAM} goes with a parameter of the format request")
        for name in chosen:
            if self.params[name].default not in self.models:
                raise ValueError(f"the default of {name}, of the format model, names no model of argv")
        if self.workspace == "none" and any(each.format == "repo-path" for each in self.params.values()):
            raise ValueError("a repo-path parameter needs workspace = paths or full")
        if self.evidence is not None and evidence_name(self) is None:
            raise ValueError("it promises evidence, but its argv has no ${out:NAME}")
        if self.runs_repo_code and self.workspace != "full":
            raise ValueError('engine = "workload" needs workspace = "full"')
        for old, new in self.renamed.items():
            if old in self.params or (new and new not in self.params):
                raise ValueError(f"renamed: {old} = {new!r} must lead from an old name to a parameter")
        return self

    @property
    def digest(self) -> str:
        """The sha256 of the file's bytes, which travels with every result."""
        return self._digest

    @property
    def evidence_kind(self) -> str | None:
        """The kind of the report it promises; None: none."""
        return None if self.evidence is None else self.evidence.kind

    @property
    def runs_repo_code(self) -> bool:
        """Whether code of the requested commit runs. The default policy refuses such presets."""
        return self.engine == "workload"

    @property
    def measures_commit(self) -> bool:
        """Whether anything of the requested commit reaches the job: its code, or data."""
        return self.workspace != "none"

    def params_schema(self) -> dict[str, Any]:
        """JSON Schema of the parameters object."""
        return {
            "type": "object",
            "additionalProperties": False,
            "properties": {name: parameter.keywords() for name, parameter in self.params.items()},
            "required": [name for name, parameter in self.params.items() if parameter.default is None],
        }


def read(path: Path) -> Preset:
    """Read one preset file; a `PresetError` says what is wrong with it."""
    data = read_file(path, PresetError)
    if data is None:
        raise PresetError(f"cannot read the preset {path}: there is no such file")
    preset = parse_toml(Preset, data, where=f"preset {path}", error=PresetError)
    preset._digest = hashlib.sha256(data).hexdigest()
    if path.stem != preset.name:
        raise PresetError(f"preset {path}: the file is named {path.stem!r} but says name = {preset.name!r}")
    return preset


def load_all(extra: Path | None = None) -> dict[str, Preset]:
    """Every preset by its own name, sorted; with the owner's from the folder `extra`."""
    own = [] if extra is None else [read(path) for path in sorted(extra.glob("*.toml"))]
    owner: dict[str, str] = {}
    found = sorted([*_bundled(), *own], key=lambda preset: preset.name)
    for preset in found:
        for name in (preset.name, *preset.aliases):
            if name in owner:
                raise PresetError(f"the presets {owner[name]} and {preset.name} both answer to {name!r}")
            owner[name] = preset.name
    return {preset.name: preset for preset in found}


@cache
def _bundled() -> list[Preset]:
    return [read(path) for path in BUNDLED.glob("*.toml")]


def get(name: str, extra: Path | None = None) -> Preset:
    """The preset of that name or alias, as `find`."""
    return find(name, load_all(extra))


def find(name: str, presets: Mapping[str, Preset]) -> Preset:
    """The preset of that name or alias; the remedy of a `PresetError` names all."""
    names = {alias: preset for preset in presets.values() for alias in (preset.name, *preset.aliases)}
    if name in names:
        return names[name]
    known = f"presets: {', '.join(presets)}; your own: presets/NAME.toml in KAKEYA_CONFIG"
    raise PresetError(f"no preset is named {quoted(name)}", known)


def measures_commit(name: str | None, presets: Mapping[str, Preset]) -> bool | None:
    """Whether results of a preset say anything of the commit; None: it is not among these presets."""
    try:
        return None if name is None else find(name, presets).measures_commit
    except PresetError:
        return None


def validate(preset: Preset, params: Mapping[str, object]) -> dict[str, ParamValue]:
    """The parameters of a request with defaults filled in, in the preset's order."""
    for name in params:
        if name not in preset.params:
            raise _unknown(preset, name)
    values: dict[str, ParamValue] = {}
    for name, parameter in preset.params.items():
        if name in params:
            values[name] = check_value(preset.name, name, parameter, params[name])
        elif parameter.default is not None:
            values[name] = parameter.default
        else:
            raise ParameterError(
                f"preset {preset.name}: the parameter {name} must be given ({parameter.description})",
                f"add: -p {name}=VALUE",
            )
    return values


def parse_cli(preset: Preset, items: Sequence[str], asked: str | None = None) -> dict[str, ParamValue]:
    """Typed values from ``key=value`` words, for `validate`; `asked`: under which name.

    Under an alias the parameters of the job of that name are known; what has no counterpart is left out.
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
            raise _unknown(preset, name)
        if name in values:
            raise ParameterError(f"preset {preset.name}: the parameter {name} is given twice")
        values[name] = read_word(preset.params[name], text)
    return values


def left_out(preset: Preset, items: Sequence[str], asked: str) -> list[str]:
    """Names in ``key=value`` words that `parse_cli` leaves out, because they have no counterpart."""
    names = [item.partition("=")[0] for item in items] if asked in preset.aliases else []
    return [name for name in names if preset.renamed.get(name) == ""]


def argv(preset: Preset, params: Mapping[str, ParamValue], resolver: Resolver) -> list[str]:
    """The argv of a preset with `params` from `validate`; `resolver` gives what ``${kind:name}`` becomes."""
    filled: list[str] = []
    for element in map(parse_element, preset.argv):
        if element.is_switch and element.param:
            filled += [f"--{element.flag}"] if params[element.param] is True else []
        elif element.param:
            value = params[element.param]
            word = str(value).lower() if isinstance(value, bool) else str(value)
            if word.startswith("-") and not element.flag:
                raise ParameterError(f"parameter {element.param}: {word!r} would be read as an option")
            if word or element.flag or preset.params[element.param].format is None:
                filled.append(f"--{element.flag}={word}" if element.flag else word)
        elif element.kind:
            words = resolver(element.kind, element.name)
            filled += [f"--{element.flag}={words[0]}"] if element.flag else words
        else:
            filled.append(element.text)
    return filled


def model_parameter(preset: Preset) -> str | None:
    """The parameter that chooses a model; None: the preset has its own models alone."""
    return next((name for name, each in preset.params.items() if each.format == "model"), None)


def model_names(preset: Preset, params: Mapping[str, object]) -> dict[str, str]:
    """Which of the machine's models each ``${model:NAME}`` is, by that name.

    A chosen model takes the place of the one that the parameter's default names. What goes with that, by a
    name that begins with it (``NAME-dflash``), is replaced by what goes with the chosen one. A value that the
    parameter does not allow changes nothing.
    """
    names = {name: name for name in preset.models}
    if (key := model_parameter(preset)) is not None:
        own, chosen = str(preset.params[key].default), params.get(key)
        if isinstance(chosen, str) and preset.params[key].fault(chosen) is None:
            own_names = [name for name in names if name == own or name.startswith(f"{own}-")]
            names |= {name: chosen + name.removeprefix(own) for name in own_names}
    return names


def model_needs(preset: Preset, params: Mapping[str, object]) -> dict[str, ModelNeed]:
    """What is expected of each model that a request uses, by its own name; a chosen one has no stand-in."""
    return {
        chosen: preset.models[name] if chosen == name else ModelNeed(mac=f"the model {chosen}")
        for name, chosen in model_names(preset, params).items()
    }


def evidence_name(preset: Preset) -> str | None:
    """File name of the report the preset writes into the result folder (``report.json``), if any."""
    elements = map(parse_element, preset.argv)
    return next((f"{element.name}.json" for element in elements if element.kind == "out"), None)


def _same(what: str, used: set[str], declared: set[str]) -> None:
    if used - declared:
        raise ValueError(f"argv names the {what} {min(used - declared)!r}, which is not declared")
    if declared - used:
        raise ValueError(f"the {what} {min(declared - used)!r} is declared but argv never uses it")


def _unknown(preset: Preset, name: str) -> ParameterError:
    message = f"preset {preset.name}: unknown parameter {quoted(name)}"
    if new := preset.renamed.get(name):
        return ParameterError(f"{message}: it is called {new} here", f"write: -p {new}=VALUE")
    return ParameterError(message, f"known parameters: {', '.join(preset.params) or 'none'}")
