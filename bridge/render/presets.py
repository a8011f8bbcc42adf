"""Presets as a Markdown page and as plain lines; the same facts a JSON answer carries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bridge.presets import ModelNeed, Parameter, Preset


def bounds(parameter: Parameter) -> str:
    """What a value may be, in words: the enum, the range, the allowed folder."""
    if parameter.enum:
        return " | ".join(str(value) for value in parameter.enum)
    if parameter.type == "boolean":
        return "true | false"
    if parameter.minimum is not None or parameter.maximum is not None:
        return f"{_number(parameter.minimum)} to {_number(parameter.maximum)}"
    if parameter.format == "repo-path":
        return f"path under {parameter.prefix or 'the workload'}" + (
            f", ending in {parameter.suffix}" if parameter.suffix else ""
        )
    if parameter.pattern:
        return f"matches {parameter.pattern}"
    return "any"


def default(parameter: Parameter) -> str:
    """The default as one would type it; a parameter without one is required."""
    if parameter.default is None:
        return "required"
    return str(parameter.default).lower() if isinstance(parameter.default, bool) else str(parameter.default)


def preset_json(preset: Preset) -> dict[str, Any]:
    """A preset as the JSON of `kakeya_mac presets --json`."""
    return {
        "name": preset.name,
        "aliases": list(preset.aliases),
        "summary": preset.summary,
        "description": preset.description,
        "engine": preset.engine,
        "runs_repo_code": preset.runs_repo_code,
        "timeout_s": preset.timeout_s,
        "evidence": preset.evidence_kind,
        "params": preset.params_schema(),
        "models": {need.name: {"mac": need.mac, "stand_in": need.stand_in} for need in preset.models},
        "argv": list(preset.argv),
        "digest": preset.digest,
    }


def model_line(need: ModelNeed) -> str:
    """What a model is, where its folder is looked for, and what stands in for it."""
    variable = "KAKEYA_MODEL_" + need.name.upper().replace("-", "_")
    place = f"in ~/kakeya-models/{need.name}, or where the policy or {variable} says"
    instead = f"; without Metal the shipped {need.stand_in} stands in" if need.stand_in else ""
    return f"{need.mac}; {place}{instead}"


def template_line(preset: Preset) -> str:
    """The argv template on one line; placeholders as they are written."""
    return " ".join(preset.argv)


def presets_markdown(presets: Iterable[Preset]) -> str:
    """The page of all presets with their parameters."""
    parts = [
        "# Presets\n\nWhat a runner may be asked for. The files are in `bridge/presets/`, the format in "
        "[preset.json](../schema/preset.json); a Mac's owner may add a folder of their own.\n"
    ]
    for preset in presets:
        parts.append(f"\n## `{preset.name}`\n\n{preset.summary}\n\n{preset.description}\n\n")
        if preset.aliases:
            parts.append(f"Also known as {', '.join(f'`{name}`' for name in preset.aliases)}. ")
        source = "code of the requested commit" if preset.runs_repo_code else "code installed on the runner"
        evidence = f"; evidence: `{preset.evidence_kind}`" if preset.evidence_kind else ""
        parts.append(f"Runs {source}; at most {preset.timeout_s} s{evidence}.\n\n")
        parts.append(f"```text\n{template_line(preset)}\n```\n")
        if preset.params:
            parts.append("\n| parameter | type | allowed | default | |\n| --- | --- | --- | --- | --- |\n")
            for parameter in preset.params.values():
                allowed = bounds(parameter).replace("|", "\\|")
                parts.append(
                    f"| `{parameter.name}` | {parameter.type} | {allowed} | {default(parameter)} "
                    f"| {parameter.description} |\n"
                )
        for need in preset.models:
            parts.append(f"\nModel `{need.name}`: {model_line(need)}.\n")
    return "".join(parts)


def _number(value: float | None) -> str:
    return "…" if value is None else f"{value:g}"
