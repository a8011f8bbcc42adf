"""The preset type, and how a preset file becomes one.

A preset says which argv runs, with which typed parameters, for how long, on what kind of machine, and which
evidence must come out. Its file lies on the machine that runs it. Checking values is in `parameters`,
filling the argv template in `template`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from bridge import toml
from bridge.errors import ParameterError, PresetError
from bridge.protocol.manifest import ParamValue

SCHEMA_FILE = Path(__file__).with_name("schema.json")
MAX_BYTES = 64 * 1024
DEFAULT_LENGTH = 1000  # most characters of a text parameter that says nothing of it

EngineSource = Literal["installed", "workload"]
WorkspaceKind = Literal["none", "paths", "full"]


@dataclass(frozen=True)
class Parameter:
    """One typed value a request may give; `default` None means it must be given."""

    name: str
    type: Literal["string", "integer", "number", "boolean"]
    description: str
    default: ParamValue | None = None
    enum: tuple[ParamValue, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    pattern: str | None = None
    max_length: int = DEFAULT_LENGTH
    format: Literal["repo-path", "request"] | None = None
    prefix: str = ""
    suffix: str = ""

    def schema(self) -> dict[str, Any]:
        """This parameter as a JSON Schema property (for catalogues and tool descriptions)."""
        document: dict[str, Any] = {"type": self.type, "description": self.description}
        optional = {
            "default": self.default,
            "enum": list(self.enum) or None,
            "minimum": self.minimum,
            "maximum": self.maximum,
            "pattern": self.pattern,
            "maxLength": self.max_length if self.max_length != DEFAULT_LENGTH else None,
            "format": self.format,
            "prefix": self.prefix or None,
            "suffix": self.suffix or None,
        }
        return document | {key: value for key, value in optional.items() if value is not None}


@dataclass(frozen=True)
class Requires:
    """What a machine must have before the job starts."""

    metal: bool = False
    memory_gb: float | None = None
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelNeed:
    """A model the argv names.

    Attributes:
        name: As in the argv, and of its folder on the machine.
        mac: What a real Mac holds under that name, in words.
        stand_in: Name of the shipped model that is used instead where there is no Metal; None: nothing is.
    """

    name: str
    mac: str
    stand_in: str | None = None


@dataclass(frozen=True)
class Promise:
    """What the report of a preset must be and show, whatever values the request gives.

    Attributes:
        kind: Its kind.
        claims: Names of claims that it must make; the gate judges whether they hold.
        drafter: Every arm under test drafts: ``any`` network, or of that kind (``masked-diffusion``).
        baseline: An arm is mlx-lm's plain decoding.
        restoration: What an arm under test restores evicted positions from (``learned``).
        kv: KV policies, or kinds of them (``sliding-bounded``), each of which an arm under test must use.
        configuration: Switches that the report must name with these values.
        dtype: In which a parity report compared.
        tolerance: The loosest that a parity report may have compared with.
        hidden_states: A parity report compares hidden states, not logits alone.
    """

    kind: str
    claims: tuple[str, ...] = ()
    drafter: str | None = None
    baseline: bool = False
    restoration: str | None = None
    kv: tuple[str, ...] = ()
    configuration: Mapping[str, ParamValue] = field(default_factory=dict)
    dtype: str | None = None
    tolerance: float | None = None
    hidden_states: bool = False


@dataclass(frozen=True)
class Preset:
    """One job of the allowlist. `digest` is the sha256 of the file's bytes and travels with every result.

    With `network` it asks for the machine's network, which it gets only where the policy says so, too.
    `renamed` says what parameters of the jobs that `aliases` name are called here, "" where there is none.
    """

    name: str
    summary: str
    argv: tuple[str, ...]
    timeout_s: int
    engine: EngineSource
    workspace: WorkspaceKind
    digest: str
    aliases: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    description: str = ""
    params: Mapping[str, Parameter] = field(default_factory=dict)
    requires: Requires = field(default_factory=Requires)
    models: tuple[ModelNeed, ...] = ()
    evidence: Promise | None = None
    rejected_exit_code: int | None = None
    network: bool = False

    @property
    def evidence_kind(self) -> str | None:
        """The kind of the report it promises; None: none."""
        return None if self.evidence is None else self.evidence.kind

    @property
    def replays(self) -> bool:
        """Whether it replays the report of another request."""
        return any(parameter.format == "request" for parameter in self.params.values())

    @property
    def runs_repo_code(self) -> bool:
        """Whether code of the requested commit runs. The default policy refuses such presets."""
        return self.engine == "workload"

    def params_schema(self) -> dict[str, Any]:
        """JSON Schema of the parameters object."""
        return {
            "type": "object",
            "additionalProperties": False,
            "properties": {name: parameter.schema() for name, parameter in self.params.items()},
            "required": [name for name, parameter in self.params.items() if parameter.default is None],
        }


def read(path: Path) -> Preset:
    """Read one preset file.

    Raises:
        PresetError: The file is too big, not TOML, breaks the preset schema, or contradicts itself.
    """
    try:
        data = toml.read(path, MAX_BYTES)
        document = toml.parse(data, MAX_BYTES)
    except OSError as error:
        raise PresetError(f"cannot read preset {path}: {error.strerror or error}") from None
    except toml.TomlError as error:
        raise PresetError(f"preset {path}: {error}") from None
    _check_schema(document, path)
    return _build(document, hashlib.sha256(data).hexdigest(), path)


def _build(document: dict[str, Any], digest: str, path: Path) -> Preset:
    from bridge.presets import parameters, template

    params = {name: _parameter(name, entry) for name, entry in document.get("params", {}).items()}
    requires = document.get("requires", {})
    preset = Preset(
        name=document["name"],
        aliases=tuple(document.get("aliases", ())),
        renamed=MappingProxyType(document.get("renamed", {})),
        summary=document["summary"],
        description=document.get("description", "").strip(),
        argv=tuple(document["argv"]),
        timeout_s=document["timeout_s"],
        engine=document["engine"],
        workspace=document["workspace"],
        digest=digest,
        params=MappingProxyType(params),
        requires=Requires(
            metal=requires.get("metal", False),
            memory_gb=requires.get("memory_gb"),
            modules=tuple(requires.get("modules", ())),
        ),
        models=tuple(ModelNeed(name, **entry) for name, entry in document.get("models", {}).items()),
        evidence=_promise(document["evidence"]) if "evidence" in document else None,
        rejected_exit_code=document.get("rejected_exit_code"),
        network=document.get("network", False),
    )
    if path.stem != preset.name:
        raise PresetError(f"preset {path}: the file is named {path.stem!r} but says name = {preset.name!r}")
    for old, new in preset.renamed.items():
        if old in params or (new and new not in params):
            raise PresetError(
                f"preset {path}: renamed: {old} = {new!r} must lead from an old name to a parameter"
            )
    template.check(preset)
    for parameter in params.values():
        if parameter.default is not None:
            try:
                parameters.check_value(preset.name, parameter, parameter.default)
            except ParameterError as error:
                raise PresetError(f"{error.message} (the default in {path})") from None
    return preset


def _parameter(name: str, entry: dict[str, Any]) -> Parameter:
    known = dict(entry)
    enum = tuple(known.pop("enum", ()))
    max_length = known.pop("maxLength", DEFAULT_LENGTH)
    return Parameter(name=name, enum=enum, max_length=max_length, **known)


def _promise(entry: dict[str, Any]) -> Promise:
    lists = {name: tuple(entry.get(name, ())) for name in ("claims", "kv")}
    return Promise(**{**entry, **lists})


def _check_schema(document: dict[str, Any], path: Path) -> None:
    errors = sorted(_validator().iter_errors(document), key=lambda error: len(error.absolute_path))
    if errors:
        where = ".".join(str(part) for part in errors[0].absolute_path) or "the file"
        raise PresetError(f"preset {path}: {where}: {_shorten(errors[0].message)}")
    for entry in document.get("params", {}).values():
        try:
            re.compile(entry.get("pattern", ""))
        except (re.error, OverflowError, RecursionError) as error:
            shown = _shorten(repr(entry["pattern"]))
            raise PresetError(f"preset {path}: the pattern {shown} is broken: {error}") from None


@cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator, validators

    # To JSON Schema 10.0 is a whole number. To whoever counts with it, it is none.
    whole = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    strict = validators.extend(Draft202012Validator, type_checker=whole)  # type: ignore[no-untyped-call]
    return strict(json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))


def _shorten(text: str) -> str:
    return text if len(text) <= 300 else text[:297] + "..."
