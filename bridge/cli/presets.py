"""``kakeya_mac presets``: the allowlist, as a table, one preset in full, or JSON; here or on live runners."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click

from bridge import presets as library
from bridge import settings
from bridge.bus.registry import Registration
from bridge.cli import show
from bridge.cli.options import json_option
from bridge.cli.output import connect
from bridge.client.runners import read_runners
from bridge.errors import PresetError
from bridge.presets import ModelNeed, Parameter, Preset
from bridge.protocol.runner_info import Offer
from bridge.protocol.sanitize import clean_line
from bridge.render.terminal import bare_table, plain

# One version of a preset: the live runners that offer it, trusted ones first, and their offers.
Offered = list[tuple[Registration, Offer]]
_SHARED_FIELDS = {"name", "aliases", "summary", "engine", "timeout_s"}


@click.command(
    epilog="""\b
Examples:
  kakeya_mac presets
  kakeya_mac presets throughput
  kakeya_mac presets --json
  kakeya_mac presets throughput --remote"""
)
@click.argument("name", required=False)
@click.option(
    "--remote",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[URL]",
    help="What live runners offer on this remote (without URL: the checkout's own).",
)
@json_option
def presets(name: str | None, remote: str | None, as_json: bool) -> int:
    """The presets installed here, or one of them with each parameter's type, bounds and default.

    With --remote: what live runners say they offer, and which of them would take it now.
    """
    if remote is not None:
        return _show_offered(name, remote or None, as_json)
    own = settings.load().presets
    if name is not None:
        preset = library.get(name, own)
        return show(as_json, _preset_json(preset), _preset_lines(preset))
    everything = library.load_all(own).values()
    table = bare_table()
    table.add_column("preset", no_wrap=True)
    table.add_column("summary", overflow="fold")
    for preset in everything:
        table.add_row(*plain(preset.name, preset.summary))
    document = {"presets": [_preset_json(preset) for preset in everything]}
    return show(as_json, document, [table, "\nParameters of one: kakeya_mac presets NAME"])


def _show_offered(name: str | None, remote: str | None, as_json: bool) -> int:
    link = connect(remote)
    live = read_runners(link.config, link.git, link.bus).live(datetime.now(UTC))
    found = _offers(live, name)
    if name is not None and not found:
        there = ", ".join(seen.name for seen in live) or "none"
        raise PresetError(
            f"no live runner on {link.bus.shown} offers a preset named {ascii(name)[:100]}",
            f"live runners: {there}; what they offer: kakeya_mac presets --remote",
        )
    here = {preset.name: preset.digest for preset in library.load_all(link.config.presets).values()}
    rows = [_offer_json(offered, here) for offered in found]
    document = {"remote": link.bus.shown, "runners": [seen.name for seen in live], "presets": rows}
    lines = [f"no runner is live on {link.bus.shown}; who was seen: kakeya_mac runners"]
    if live:
        lines = [f"as published by runners on {link.bus.shown}; anyone with push rights can write this\n"]
        lines += [line for each in found for line in _offer_lines(each, here, full=name is not None)]
    return show(as_json, document, lines, untrusted=("runners", "presets"), note=bool(live))


def _offers(live: Sequence[Registration], name: str | None) -> list[Offered]:
    """What live runners offer, or only the preset of a name or alias, one entry a version of a preset."""
    found: dict[tuple[str, str], Offered] = {}
    for seen in live:
        for offer in seen.info.presets:
            if name is None or name in (offer.name, *offer.aliases):
                found.setdefault((offer.name, offer.digest), []).append((seen, offer))
    return [sorted(found[key], key=lambda pair: not pair[0].trusted) for key in sorted(found)]


def _preset_json(preset: Preset) -> dict[str, Any]:
    return preset.model_dump(mode="json", include={*_SHARED_FIELDS, "renamed", "description", "argv"}) | {
        "runs_repo_code": preset.runs_repo_code,
        "evidence": preset.evidence_kind,
        "params": preset.params_schema(),
        "models": {need.name: {"mac": need.mac, "stand_in": need.stand_in} for need in preset.models},
        "digest": preset.digest,
    }


def _offer_json(offered: Offered, here: Mapping[str, str]) -> dict[str, Any]:
    offer, installed = offered[0][1], here.get(offered[0][1].name)
    parameters = offer.parameters.items()
    return offer.model_dump(mode="json", include={*_SHARED_FIELDS, "evidence", "digest"}) | {
        "runs_repo_code": offer.engine == "workload",
        "params": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                key: known.model_dump(mode="json", exclude_none=True) for key, known in parameters
            },
            "required": [key for key, known in parameters if known.default is None],
        },
        "installed_here": None if installed is None else installed == offer.digest,
        "published_by": "runners",
        "runners": [
            {"name": seen.name, "trusted": seen.trusted}
            | {"available": own.available, "why": own.why, "typical_s": own.typical_s}
            for seen, own in offered
        ],
    }


def _preset_lines(preset: Preset) -> Iterator[str]:
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


def _offer_lines(offered: Offered, here: Mapping[str, str], *, full: bool) -> Iterator[str]:
    offer, installed = offered[0][1], here.get(offered[0][1].name)
    yield f"{offer.name}: {_line(offer.summary)}"
    if full:
        yield from _param_lines(
            {
                name: Parameter.model_construct(**{**known.model_dump(), "max_length": known.maxLength})
                for name, known in offer.parameters.items()
            }
        )
    for seen, own in offered:
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
        yield f"  -p {_line(f'{name}=<{parameter.type}>')}  (default {_line(default(parameter))})"
        yield f"      {_line(parameter.description)}; allowed: {_line(bounds(parameter))}"


def bounds(parameter: Parameter) -> str:
    """What a value may be, in words: the enum, the range, the allowed folder."""
    if parameter.enum:
        return " | ".join(str(value) for value in parameter.enum)
    if parameter.type == "boolean":
        return "true | false"
    if parameter.minimum is not None or parameter.maximum is not None:
        ends = (parameter.minimum, parameter.maximum)
        return " to ".join("…" if bound is None else f"{bound:g}" for bound in ends)
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
    """What a model is, where its folder is looked for, and what replaces it where it is missing."""
    variable = "KAKEYA_MODEL_" + need.name.upper().replace("-", "_")
    place = f"in ~/kakeya-models/{need.name}, or where the policy or {variable} says"
    instead = f"; without Metal the shipped {need.stand_in} replaces it" if need.stand_in else ""
    return f"{need.mac}; {place}{instead}"


def _line(text: str) -> str:
    return clean_line(text, limit=300)
