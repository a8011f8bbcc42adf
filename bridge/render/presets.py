"""Presets as a Markdown page and as plain lines; the same facts a JSON answer carries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bridge.presets import Parameter, Preset, show
from bridge.presets import argv as fill


def bounds(parameter: Parameter) -> str:
    """What a value may be, in words: the enum, the range, the allowed folder."""
    if parameter.enum:
        return " | ".join(str(value) for value in parameter.enum)
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
        "models": {need.name: {"here": need.here, "mac": need.mac} for need in preset.models},
        "argv": list(preset.argv),
        "digest": preset.digest,
    }


def template_line(preset: Preset) -> str:
    """The argv template on one line; placeholders as they are written."""
    values = {name: f"{{{name}}}" for name in preset.params}
    return " ".join(fill(preset, values, show))


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
            parts.append(f"\nModel `{need.name}`: here {need.here}; on a Mac {need.mac}.\n")
    return "".join(parts)


def _number(value: float | None) -> str:
    return "…" if value is None else f"{value:g}"
