"""``kakeya_mac presets``: the allowlist, as a table, one preset in full, or JSON; here or on live runners."""

from __future__ import annotations

import click

from bridge.cli import echo_json, note_untrusted


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
@click.option("--json", "as_json", is_flag=True, help="One JSON line instead of a table.")
def presets(name: str | None, remote: str | None, as_json: bool) -> int:
    """The presets installed here, or one of them with each parameter's type, bounds and default.

    With --remote: what live runners say they offer, and which of them would take it now.
    """
    if remote is not None:
        return _offered(name, remote or None, as_json)
    from bridge import presets as library
    from bridge import settings
    from bridge.render.presets import preset_json, preset_lines
    from bridge.render.terminal import Column, console, plain, table

    own = settings.load().presets
    if name is not None:
        preset = library.get(name, own)
        if as_json:
            echo_json(preset_json(preset))
        else:
            click.echo("\n".join(preset_lines(preset)))
        return 0
    everything = library.load_all(own)
    if as_json:
        echo_json({"presets": [preset_json(preset) for preset in everything.values()]})
        return 0
    out = console()
    shown = table(out.width, preset=Column.SHORT, summary=Column.TEXT)
    for preset in everything.values():
        shown.add_row(*plain(preset.name, preset.summary))
    out.print(shown)
    click.echo("\nParameters of one: kakeya_mac presets NAME")
    return 0


def _offered(name: str | None, remote: str | None, as_json: bool) -> int:
    from datetime import UTC, datetime

    from bridge import presets as library
    from bridge.cli.output import connect
    from bridge.client.runners import read_runners
    from bridge.errors import PresetError
    from bridge.render.presets import offer_json, offer_lines, offers

    config, git, bus = connect(remote)
    live = read_runners(config, git, bus).live(datetime.now(UTC))
    found = offers(live, name)
    if name is not None and not found:
        there = ", ".join(seen.name for seen in live) or "none"
        raise PresetError(
            f"no live runner on {bus.shown} offers a preset named {ascii(name)[:100]}",
            f"live runners: {there}; what they offer: kakeya_mac presets --remote",
        )
    digests = {preset.name: preset.digest for preset in library.load_all(config.presets).values()}
    if as_json:
        documents = [offer_json(offered, digests.get(offered.offer.name)) for offered in found]
        document = {"remote": bus.shown, "runners": [seen.name for seen in live], "presets": documents}
        echo_json(document, untrusted=("runners", "presets"))
        return 0
    if not live:
        click.echo(f"no runner is live on {bus.shown}; who was seen: kakeya_mac runners")
        return 0
    click.echo(f"as published by runners on {bus.shown}; anyone with push rights can write this\n")
    for offered in found:
        for line in offer_lines(offered, digests.get(offered.offer.name), full=name is not None):
            click.echo(line)
    note_untrusted()
    return 0
