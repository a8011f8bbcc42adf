"""Presets as lines and as JSON: those installed here, and those that runners offer.

What runners say is text from the bus, so every line of it is cleaned here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.bus.registry import Registration
from bridge.presets import ModelNeed, Parameter, Preset
from bridge.protocol.runner_info import Offer
from bridge.protocol.sanitize import clean_line


@dataclass(frozen=True)
class OfferedPreset:
    """One version of a preset, and the live runners that offer it, trusted ones first."""

    offer: Offer
    runners: list[tuple[Registration, Offer]]


def preset_lines(preset: Preset) -> Iterator[str]:
    """A preset in full, for people."""
    yield f"{preset.name}: {preset.summary}"
    if preset.aliases:
        renamed = f" ({renamed_line(preset)})" if preset.renamed else ""
        yield f"  also known as  {', '.join(preset.aliases)}{renamed}"
    if preset.description:
        yield f"\n{preset.description}\n"
    yield from _param_lines(preset.params)
    for need in preset.models:
        yield f"  model {need.name}: {model_line(need)}"
    yield f"\n  runs     {' '.join(preset.argv)}"
    evidence = preset.evidence_kind or "none"
    yield f"  timeout  {preset.timeout_s} s; {preset.engine} code; evidence: {evidence}"


def preset_json(preset: Preset) -> dict[str, Any]:
    """A preset as the JSON of `kakeya_mac presets --json`."""
    return {
        "name": preset.name,
        "aliases": list(preset.aliases),
        "renamed": dict(preset.renamed),
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


def offers(live: Sequence[Registration], name: str | None = None) -> list[OfferedPreset]:
    """What live runners offer, one entry a version of a preset (by its digest).

    Args:
        live: Runners that are there.
        name: Only the preset of that name or alias.
    """
    found: dict[tuple[str, str], list[tuple[Registration, Offer]]] = {}
    for seen in live:
        for offer in seen.card.presets:
            if name is None or name in (offer.name, *offer.aliases):
                found.setdefault((offer.name, offer.digest), []).append((seen, offer))
    ranked = [sorted(found[key], key=lambda pair: not pair[0].trusted) for key in sorted(found)]
    return [OfferedPreset(pairs[0][1], pairs) for pairs in ranked]


def offer_json(offered: OfferedPreset, installed: str | None) -> dict[str, Any]:
    """An entry of `offers` as the JSON of `kakeya_mac presets --remote --json`.

    Args:
        offered: The entry.
        installed: Digest of the preset of that name on this machine; None: it has none.
    """
    offer = offered.offer
    properties = {
        name: known.model_dump(mode="json", exclude_none=True) for name, known in offer.parameters.items()
    }
    return {
        "name": offer.name,
        "aliases": list(offer.aliases),
        "summary": offer.summary,
        "engine": offer.engine,
        "runs_repo_code": offer.engine == "workload",
        "timeout_s": offer.timeout_s,
        "evidence": offer.evidence,
        "params": {
            "type": "object",
            "additionalProperties": False,
            "properties": properties,
            "required": [name for name, known in offer.parameters.items() if known.default is None],
        },
        "digest": offer.digest,
        "installed_here": None if installed is None else installed == offer.digest,
        "published_by": "runners",
        "runners": [
            {"name": seen.name, "trusted": seen.trusted}
            | {"available": own.available, "why": own.why, "typical_s": own.typical_s}
            for seen, own in offered.runners
        ],
    }


def offer_lines(offered: OfferedPreset, installed: str | None, *, full: bool) -> Iterator[str]:
    """An entry of `offers` for people; `full`: with every parameter."""
    offer = offered.offer
    yield f"{offer.name}: {_line(offer.summary)}"
    if full:
        published = {
            name: Parameter.model_construct(**{**known.model_dump(), "max_length": known.maxLength})
            for name, known in offer.parameters.items()
        }
        for line in _param_lines(published):
            indent = " " * (len(line) - len(line.lstrip(" ")))
            yield indent + _line(line.lstrip(" "))
    for seen, own in offered.runners:
        typical = "" if own.typical_s is None else f", typically {own.typical_s:g} s"
        known_key = "trusted key" if seen.trusted else "key not trusted here"
        said = f"available{typical}" if own.available else f"not now: {_line(own.why or 'no reason given')}"
        yield f"  {seen.name} ({known_key}): {said}"
        if own.available and own.why:
            yield f"      {_line(own.why)}"
    if installed is None:
        yield "  not installed here: to ask for it, put its file in presets/ of the configuration folder"
    elif installed != offer.digest:
        yield "  another version than the one installed here"


def _param_lines(params: Mapping[str, Parameter]) -> Iterator[str]:
    for name, parameter in params.items():
        yield f"  -p {name}=<{parameter.type}>  (default {default(parameter)})"
        yield f"      {parameter.description}; allowed: {bounds(parameter)}"


def bounds(parameter: Parameter) -> str:
    """What a value may be, in words: the enum, the range, the allowed folder."""
    if parameter.enum:
        return " | ".join(str(value) for value in parameter.enum)
    if parameter.type == "boolean":
        return "true | false"
    if parameter.minimum is not None or parameter.maximum is not None:
        least, most = (
            "…" if bound is None else f"{bound:g}" for bound in (parameter.minimum, parameter.maximum)
        )
        return f"{least} to {most}"
    if parameter.format == "repo-path":
        ending = f", ending in {parameter.suffix}" if parameter.suffix else ""
        return f"path under {parameter.prefix or 'the workload'}{ending}"
    if parameter.format == "request":
        return "handle of a finished request"
    pattern = f"matches {parameter.pattern}" if parameter.pattern else ""
    length = f"at most {parameter.max_length} characters" if parameter.max_length else ""
    return ", ".join(filter(None, (pattern, length))) or "any"


def default(parameter: Parameter) -> str:
    """The default as one would type it; a parameter without one is required."""
    if parameter.default is None:
        return "required"
    return str(parameter.default).lower() if isinstance(parameter.default, bool) else str(parameter.default)


def renamed_line(preset: Preset) -> str:
    """What parameters of the jobs that the aliases name are called, on one line."""
    return ", ".join(
        f"{old} is {new}" if new else f"{old} is left out" for old, new in preset.renamed.items()
    )


def model_line(need: ModelNeed) -> str:
    """What a model is, where its folder is looked for, and what stands in for it."""
    variable = "KAKEYA_MODEL_" + need.name.upper().replace("-", "_")
    place = f"in ~/kakeya-models/{need.name}, or where the policy or {variable} says"
    instead = f"; without Metal the shipped {need.stand_in} stands in" if need.stand_in else ""
    return f"{need.mac}; {place}{instead}"


def _line(text: str) -> str:
    return clean_line(text, limit=300)
