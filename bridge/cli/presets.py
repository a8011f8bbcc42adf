"""``kakeya_mac presets``: the allowlist, as a table, one preset in full, or JSON."""

from __future__ import annotations

import click

from bridge.cli import echo_json


@click.command(
    epilog="""\b
Examples:
  kakeya_mac presets
  kakeya_mac presets throughput
  kakeya_mac presets --json"""
)
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON line instead of a table.")
def presets(name: str | None, as_json: bool) -> int:
    """The presets installed here, or one of them with each parameter's type, bounds and default."""
    from bridge import presets as library
    from bridge.render.presets import bounds, default, model_line, preset_json, template_line

    if name is not None:
        preset = library.get(name)
        if as_json:
            echo_json(preset_json(preset))
            return 0
        click.echo(f"{preset.name}: {preset.summary}")
        if preset.aliases:
            click.echo(f"  also known as  {', '.join(preset.aliases)}")
        if preset.description:
            click.echo("\n" + preset.description + "\n")
        for parameter in preset.params.values():
            click.echo(f"  -p {parameter.name}=<{parameter.type}>  (default {default(parameter)})")
            click.echo(f"      {parameter.description}; allowed: {bounds(parameter)}")
        for need in preset.models:
            click.echo(f"  model {need.name}: {model_line(need)}")
        click.echo(f"\n  runs     {template_line(preset)}")
        evidence = preset.evidence_kind or "none"
        click.echo(f"  timeout  {preset.timeout_s} s; {preset.engine} code; evidence: {evidence}")
        return 0
    everything = library.load_all()
    if as_json:
        echo_json({"presets": [preset_json(preset) for preset in everything.values()]})
        return 0
    width = max(len(preset_name) for preset_name in everything)
    for preset in everything.values():
        click.echo(f"  {preset.name:<{width}}  {preset.summary}")
    click.echo("\nParameters of one: kakeya_mac presets NAME")
    return 0
