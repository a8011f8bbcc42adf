"""Presets as a Markdown page and as plain lines; the same facts a JSON answer carries.

Also what runners say they offer: that is text from the bus, so every line of it is cleaned here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bridge.bus.catalogue import Seen
from bridge.presets import ModelNeed, Parameter, Preset
from bridge.presets.preset import DEFAULT_LENGTH
from bridge.protocol.runner_info import Offer, Property
from bridge.protocol.sanitize import clean_line


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
    if parameter.format == "request":
        return "handle of a finished request"
    length = f"at most {parameter.max_length} characters" if parameter.max_length != DEFAULT_LENGTH else ""
    if parameter.pattern:
        return f"matches {parameter.pattern}" + (f", {length}" if length else "")
    return length or "any"


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


def template_line(preset: Preset) -> str:
    """The argv template on one line; placeholders as they are written."""
    return " ".join(preset.argv)


def offers(live: Sequence[Seen], name: str | None = None) -> list[tuple[Offer, list[tuple[Seen, Offer]]]]:
    """What live runners offer, one entry a version of a preset (by its digest), with who offers it.

    Args:
        live: Runners that are there.
        name: Only the preset of that name or alias.
    """
    found: dict[tuple[str, str], list[tuple[Seen, Offer]]] = {}
    for seen in live:
        for offer in seen.card.presets:
            if name is None or name in (offer.name, *offer.aliases):
                found.setdefault((offer.name, offer.digest), []).append((seen, offer))
    # A trusted runner's words before those of anybody else.
    ranked = [sorted(found[key], key=lambda pair: not pair[0].trusted) for key in sorted(found)]
    return [(pairs[0][1], pairs) for pairs in ranked]


def offer_json(offer: Offer, pairs: Sequence[tuple[Seen, Offer]], installed: str | None) -> dict[str, Any]:
    """An entry of `offers` as the JSON of `kakeya_mac presets --remote --json`.

    Args:
        offer: The entry's preset.
        pairs: Who offers it.
        installed: Digest of the preset of that name on this machine; None: it has none.
    """
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
            "properties": {
                name: known.model_dump(mode="json", exclude_none=True)
                for name, known in offer.parameters.items()
            },
            "required": [name for name, known in offer.parameters.items() if known.default is None],
        },
        "digest": offer.digest,
        "installed_here": None if installed is None else installed == offer.digest,
        "published_by": "runners",
        "runners": [
            {
                "name": seen.name,
                "trusted": seen.trusted,
                "available": own.available,
                "why": own.why,
                "typical_s": own.typical_s,
            }
            for seen, own in pairs
        ],
    }


def offer_lines(
    offer: Offer, pairs: Sequence[tuple[Seen, Offer]], installed: str | None, *, full: bool
) -> Iterator[str]:
    """An entry of `offers` for people; `full`: with every parameter."""
    yield f"{offer.name}: {_line(offer.summary)}"
    if full:
        for name, known in offer.parameters.items():
            yield f"  -p {name}=<{known.type}>  (default {_default(known)})"
            yield f"      {_line(known.description)}; allowed: {_bounds(known)}"
    for seen, own in pairs:
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


def presets_markdown(presets: Iterable[Preset]) -> str:
    """The page of all presets with their parameters."""
    parts = [
        "# Presets\n\nWhat a runner may be asked for. The files are in `bridge/presets/`, the format in "
        "[preset.json](../schema/preset.json); a Mac's owner may add a folder of their own.\n"
    ]
    for preset in presets:
        parts.append(f"\n## `{preset.name}`\n\n{preset.summary}\n\n{preset.description}\n\n")
        if preset.aliases:
            parts.append(f"Also known as {', '.join(f'`{name}`' for name in preset.aliases)}")
            parts.append(f" ({renamed_line(preset)}). " if preset.renamed else ". ")
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


def _default(known: Property) -> str:
    if known.default is None:
        return "required"
    text = str(known.default)
    return _line(text.lower() if isinstance(known.default, bool) else text)


def _bounds(known: Property) -> str:
    """`bounds` of a parameter as a runner published it."""
    published = Parameter(
        name="",
        type=known.type,
        description="",
        enum=known.enum or (),
        minimum=known.minimum,
        maximum=known.maximum,
        pattern=known.pattern,
        max_length=known.maxLength or DEFAULT_LENGTH,
        format=known.format,
        prefix=known.prefix or "",
        suffix=known.suffix or "",
    )
    return _line(bounds(published))


def _line(text: str) -> str:
    return clean_line(text, limit=300)
