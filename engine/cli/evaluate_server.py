"""``kakeya_engine eval server``: the server's answers over HTTP against plain decoding."""

import json
import logging
from pathlib import Path
from typing import Any

import click

from engine.cli.evaluation_options import set_options
from engine.cli.options import PATH, option, report_options, take_request
from engine.cli.reports import store


@click.command("server")
@set_options
@option("--clients", "Clients that ask at once.", 4)
@option("--registry", "Serve these models [default: the shipped file].", type=PATH)
@click.option("--id", "model_id", metavar="NAME[@CHANNEL]", help="… and ask this one [default: its default].")
@option("--model", "Serve this folder instead of a registry.", type=PATH)
@option("--drafter", "With --model: what drafts, as generate takes it.")
@click.option("--kv", "channel", metavar="CHANNEL", help="The KV channel, as serve takes it.")
@option("--quantize", "With --model: pack the weights on loading.", metavar="BITS[,GROUP]")
@option("--dtype", "With --model: float32, float16 or bfloat16.")
@option("--block", "Tokens a verify forward, or auto.", "auto")
@option("--prefill-chunk", "Prompt tokens a forward.", 512)
@click.option("--chat", is_flag=True, help="Send texts as a user's turn of a conversation.")
@option(
    "--thinking",
    "Tell the chat template whether to reason; refused where it has no such switch.",
    "default",
    type=click.Choice(["default", "on", "off"]),
)
@option(
    "--transport",
    "A port of 127.0.0.1, or a Unix socket [default: the first that may be used here].",
    type=click.Choice(["tcp", "unix"]),
)
@report_options
def server(as_json: bool, report_path: Path | None, **values: Any) -> None:
    """The server's answers over HTTP against plain decoding, and what else clients rely on.

    Starts the real server in this process, for itself alone, with a key of its own. Every check has to pass;
    of a server that fails one there is no report.

    \b
    Exit codes: 0 all checks pass and a report is written, 1 a check failed, 2 bad input.

    \b
    Examples:
      kakeya_engine eval server --report server.json
      kakeya_engine eval server --prompts code --limit 2 --clients 8 --json
      kakeya_engine eval server --id demo@affine8
      kakeya_engine eval server --model ~/models/qwen3-4b --drafter ~/models/qwen3-4b-dflash
    """  # noqa: D301 - click wants the character itself
    request = take_request(values)

    from engine.device import prepare

    runtime = prepare()
    from engine.cli.progress import shown_progress
    from engine.cli.tables import checks_table, figures, quality_table
    from engine.evaluation.prompts import load_prompts
    from engine.evaluation.quality import matches_by_set
    from engine.evaluation.server import ChecksFailed, ServerSwitches, measure_server
    from engine.generate import ChatSwitches
    from engine.registry import Places
    from engine.server.serve import model_finder

    offer = _offer(values)
    chat = ChatSwitches(chat=values.pop("chat"), thinking=values.pop("thinking"))
    switches = ServerSwitches(**values, chat=chat)
    switches.check()
    prompts = load_prompts(switches.prompts, switches.limit, switches.seed)
    find = model_finder(Places.of_machine(), download=False)
    logging.getLogger("kakeya.requests").setLevel(logging.WARNING)
    try:
        with shown_progress() as progress:
            report = measure_server(
                offer, find, prompts, switches, runtime, progress=progress, request=request
            )
    except ChecksFailed as failure:
        if not as_json:
            checks_table(failure.checks)
        click.echo(json.dumps({"kind": "server", "checks": failure.checks, "report": None}))
        raise
    stored, sets = store(report, report_path), matches_by_set(report.document)
    checks: dict[str, str | None] = dict.fromkeys(report.document["configuration"]["checks"].split())
    if not as_json:
        checks_table(checks)
        quality_table(report.document)
    more = {"checks": checks, "identical_by_set": sets, "report": str(stored)}
    click.echo(json.dumps(figures(report.document) | more))


def _offer(values: dict[str, Any]) -> Any:
    """Take the switches that name a model out of ``values``; what they offer."""
    from engine.evaluation.server import Offer
    from engine.registry import Registry

    registry, model_id, channel, model = (
        values.pop(name) for name in ("registry", "model_id", "channel", "model")
    )
    of_folder = {name: values.pop(name) for name in ("drafter", "quantize", "dtype")}
    if model is not None:
        if registry is not None or model_id is not None:
            raise click.UsageError("--model serves a folder; leave out --registry and --id")
        return Offer.of(Registry.single(model, channel=channel, **of_folder))
    if given := [name for name, value in of_folder.items() if value is not None]:
        raise click.UsageError(f"--{given[0]} goes with --model; a registry says it for each of its models")
    return Offer.of(Registry.load(registry), model_id, channel)
