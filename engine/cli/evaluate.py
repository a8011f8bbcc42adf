"""``kakeya_engine eval``: measurements that end in an evidence report and one JSON line."""

import json
from pathlib import Path
from typing import Any

import click

from engine.cli.options import engine_options, report_options, take_engine, take_request
from engine.cli.reports import store


@click.group("eval", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Measure the engine; each command writes one evidence report and ends with one JSON line."""


@command.command("throughput")
@click.option(
    "--prompts",
    default="all",
    show_default=True,
    help="code, chat, retrieval (or several, comma-separated), all, or a file of prompts.",
)
@click.option("--limit", type=int, default=8, show_default=True, help="At most so many prompts of each kind.")
@click.option("--max-tokens", type=int, default=96, show_default=True, help="Tokens to generate a prompt.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Order of the prompts; 0 as in the file."
)
@click.option(
    "--claim",
    type=click.Choice(["auto", "speedup", "no-slowdown", "none"]),
    default="auto",
    show_default=True,
    help="What to claim beside identical output; auto: a speed-up where blocks are cheap.",
)
@click.option("--min-speedup", type=float, default=1.0, show_default=True, help="Speed-up to claim.")
@engine_options
@report_options
def throughput(as_json: bool, report_path: Path | None, **values: Any) -> None:
    """Speculative against plain decoding of the same prompts, interleaved.

    \b
    Examples:
      kakeya_engine eval throughput --report throughput.json
      kakeya_engine eval throughput --prompts code --limit 4 --block 8
      kakeya_engine eval throughput --model ~/models/qwen3-4b --drafter ~/models/qwen3-4b-dflash
    """  # noqa: D301 - click wants the character itself
    request, options = take_request(values), take_engine(values)

    from engine.runtime import prepare

    runtime = prepare()
    from engine.cli.progress import shown_progress
    from engine.cli.tables import throughput_table
    from engine.config import open_engine
    from engine.evaluation.prompts import load_prompts
    from engine.evaluation.throughput import Switches, measure_throughput

    switches = Switches(**values)
    switches.check()
    prompts = load_prompts(switches.prompts, switches.limit, switches.seed)
    with shown_progress() as progress:
        engine = open_engine(options)
        report = measure_throughput(engine, prompts, switches, runtime, progress=progress, request=request)
    _finish(report, report_path, as_json, throughput_table)


@command.command("recall")
@click.option("--prompts", default="retrieval", show_default=True, help="A set or a file with needles.")
@click.option("--limit", type=int, default=None, help="At most so many prompts [default: all].")
@click.option("--max-tokens", type=int, default=16, show_default=True, help="Tokens to generate a prompt.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Order of the prompts; 0 as in the file."
)
@click.option("--min-recall", type=float, default=None, help="Also claim this recall.")
@click.option(
    "--batch",
    type=int,
    default=1,
    show_default=True,
    help="Decode so many prompts together (not the oracle's).",
)
@engine_options
@report_options
def recall(as_json: bool, report_path: Path | None, **values: Any) -> None:
    """Needle in a haystack, with the plain model as oracle and prompts without the needle as control.

    \b
    Examples:
      kakeya_engine eval recall --report recall.json
      kakeya_engine eval recall --limit 10 --min-recall 0.9 --json
      kakeya_engine eval recall --batch 8
    """  # noqa: D301 - click wants the character itself
    request, options = take_request(values), take_engine(values)

    from engine.runtime import prepare

    runtime = prepare()
    from engine.cli.progress import shown_progress
    from engine.cli.tables import recall_table
    from engine.config import open_engine
    from engine.evaluation.prompts import load_prompts
    from engine.evaluation.recall import RecallSwitches, measure_recall

    switches = RecallSwitches(**values)
    switches.check()
    prompts = load_prompts(switches.prompts, switches.limit, switches.seed)
    with shown_progress() as progress:
        engine = open_engine(options)
        report = measure_recall(engine, prompts, switches, runtime, progress=progress, request=request)
    _finish(report, report_path, as_json, recall_table)


def _finish(report: Any, path: Path | None, as_json: bool, table: Any) -> None:
    """Write the report, show the table, end with the JSON line."""
    from engine.cli.tables import figures

    stored = store(report, path)
    if not as_json:
        table(report.document)
    click.echo(json.dumps(figures(report.document) | {"report": str(stored)}))
