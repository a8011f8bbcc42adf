"""``kakeya_mac presets``: the allowlist, one preset in full, or JSON; here or on live runners."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import click

from bridge import presets as library
from bridge import settings
from bridge.bus.registry import Registration
from bridge.cli import show
from bridge.cli.completion import complete_preset
from bridge.cli.options import json_option
from bridge.cli.output import connect
from bridge.client.runners import read_runners
from bridge.errors import PresetError
from bridge.presets import ModelNeed, Preset
from bridge.protocol.runner_info import Offer
from bridge.protocol.sanitize import clean_line

# One version of a preset: the live runners that offer it, trusted ones first, and their offers.
Offered = list[tuple[Registration, Offer]]
_line = functools.partial(clean_line, limit=300)
_SHARED_FIELDS = {"name", "aliases", "summary", "engine", "timeout_s"}


@click.command(
    epilog="""\b
Examples:
  kakeya_mac presets
  kakeya_mac presets throughput
  kakeya_mac presets --json
  kakeya_mac presets throughput --remote"""
)
@click.argument("name", required=False, shell_complete=complete_preset)
@click.option(
    "--remote", is_flag=False, flag_value="", metavar="[URL]", help="What live runners offer on this remote."
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
        try:
            preset = library.get(name, own)
        except PresetError as error:
            error.message += " here"
            error.remedy = f"{error.remedy}; what live runners offer: kakeya_mac presets {name} --remote"
            raise
        return show(as_json, _preset_json(preset), _preset_lines(preset))
    everything = library.load_all(own).values()
    lines = [f"{preset.name:<20} {preset.summary}" for preset in everything]
    document = {"presets": [_preset_json(preset) for preset in everything]}
    return show(as_json, document, [*lines, "\nParameters of one: kakeya_mac presets NAME"])


def _show_offered(name: str | None, remote: str | None, as_json: bool) -> int:
    link = connect(settings.load(remote=remote))
    live = read_runners(link.config, link.git, link.bus).live(datetime.now(UTC))
    names = [seen.name for seen in live]
    found: dict[tuple[str, str], Offered] = {}
    for seen in sorted(live, key=lambda seen: not seen.trusted):
        for offer in seen.info.presets:
            if name is None or name in (offer.name, *offer.aliases):
                found.setdefault((offer.name, offer.digest), []).append((seen, offer))
    if name is not None and not found:
        raise PresetError(
            f"no live runner on {link.bus.shown} offers a preset named {ascii(name)[:100]}",
            f"live runners: {', '.join(names) or 'none'}; what they offer: kakeya_mac presets --remote",
        )
    here = {preset.name: preset.digest for preset in library.load_all(link.config.presets).values()}
    offers = [found[key] for key in sorted(found)]
    rows = [_offer_json(offered, here) for offered in offers]
    document = {"remote": link.bus.shown, "runners": names, "presets": rows}
    full = name is not None
    lines = [line for pair in zip(offers, rows, strict=True) for line in _offer_lines(*pair, full=full)]
    lines = lines or [f"no runner is live on {link.bus.shown}; who was seen: kakeya_mac runners"]
    return show(as_json, document, lines, untrusted=("runners", "presets"), note=bool(live))


def _preset_json(preset: Preset) -> dict[str, Any]:
    return preset.model_dump(mode="json", include={*_SHARED_FIELDS, "renamed", "description", "argv"}) | {
        "runs_repo_code": preset.runs_repo_code,
        "evidence": preset.evidence_kind,
        "params": preset.params_schema(),
        "models": {name: need.model_dump() for name, need in preset.models.items()},
        "digest": preset.digest,
    }


def _offer_json(offered: Offered, here: Mapping[str, str]) -> dict[str, Any]:
    offer, installed = offered[0][1], here.get(offered[0][1].name)
    parameters = offer.model_dump(mode="json", exclude_none=True)["parameters"]
    return offer.model_dump(mode="json", include={*_SHARED_FIELDS, "evidence", "digest"}) | {
        "runs_repo_code": offer.engine == "workload",
        "params": {
            "type": "object",
            "additionalProperties": False,
            "properties": parameters,
            "required": [key for key, known in parameters.items() if "default" not in known],
        },
        "installed_here": None if installed is None else installed == offer.digest,
        "published_by": "runners",
        "runners": [
            {"name": seen.name, "trusted": seen.trusted}
            | own.model_dump(include={"available", "why", "typical_s"})
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
    yield from _param_lines(preset.params_schema())
    for name, need in preset.models.items():
        yield f"  model {name}: {model_line(name, need)}"
    yield f"\n  runs     {' '.join(preset.argv)}"
    evidence = preset.evidence_kind or "none"
    yield f"  timeout  {preset.timeout_s} s; {preset.engine} code; evidence: {evidence}"


def _offer_lines(offered: Offered, shown: Mapping[str, Any], *, full: bool) -> Iterator[str]:
    yield f"{shown['name']}: {_line(shown['summary'])}"
    if full:
        yield from _param_lines(shown["params"])
    for seen, own in offered:
        key = "trusted key" if seen.trusted else "key not trusted here"
        said = "available" if own.available else "not now"
        typical = "" if own.typical_s is None else f", typically {own.typical_s:g} s"
        yield f"  {seen.name} ({key}): {said}{typical}{f': {_line(own.why)}' if own.why else ''}"
    if not shown["installed_here"]:
        yield f"  {'not' if shown['installed_here'] is None else 'another version is'} installed here"


def _param_lines(schema: Mapping[str, Any]) -> Iterator[str]:
    for name, known in schema["properties"].items():
        yield f"  -p {name}=<{known['type']}>  (default {_line(default(known))})"
        yield f"      {_line(known.get('description', ''))}; allowed: {_line(bounds(known))}"


def bounds(known: Mapping[str, Any]) -> str:
    """What the value of a parameter, a JSON Schema property, may be."""
    words = known.keys() - {"type", "description", "default"}
    return ", ".join(f"{word} {json.dumps(known[word])}" for word in known if word in words) or "any"


def default(known: Mapping[str, Any]) -> str:
    """The default as JSON; a parameter without one is required."""
    return json.dumps(known["default"]) if "default" in known else "required"


def renamed_line(preset: Preset) -> str:
    """What parameters of the jobs that the aliases name are called, on one line."""
    return ", ".join(
        f"{old} is {new}" if new else f"{old} is left out" for old, new in preset.renamed.items()
    )


def model_line(name: str, need: ModelNeed) -> str:
    """What a model is, where its folder is looked for, and what replaces it where it is missing."""
    variable = "KAKEYA_MODEL_" + name.upper().replace("-", "_")
    place = f"in ~/kakeya-models/{name}, or where the policy or {variable} says"
    instead = f"; without Metal the shipped {need.stand_in} replaces it" if need.stand_in else ""
    return f"{need.mac}; {place}{instead}"
