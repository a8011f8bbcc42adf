"""``kakeya_engine eval``: measurements that end in an evidence report and one JSON line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from engine.cli.evaluate_server import server
from engine.cli.evaluation_options import (
    chat_options,
    haystack_options,
    journal_options,
    keeping,
    seed_of,
    seed_option,
    set_options,
    take_chat,
    take_haystack,
    take_journals,
)
from engine.cli.finish import finish
from engine.cli.options import engine_options, report_options, take_engine, take_request
from engine.cli.shootout import kv, quality


@click.group("eval", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Measure the engine; each command writes one evidence report and ends with one JSON line."""


@command.command("throughput")
@set_options
@click.option(
    "--claim",
    type=click.Choice(["auto", "speedup", "no-slowdown", "identity", "none"]),
    default="auto",
    show_default=True,
    help="What to claim beside identical output; auto: a speed-up where blocks are cheap.",
)
@click.option("--min-speedup", type=float, default=1.0, show_default=True, help="Speed-up to claim.")
@click.option(
    "--min-stops",
    type=float,
    metavar="SHARE",
    help="Also claim that this share of the texts, 0.5 to 1, ends at a stop token.",
)
@click.option(
    "--ignore-stops",
    is_flag=True,
    help="Add an arm that decodes past stop tokens up to --max-tokens (forced over-generation), to compare.",
)
@chat_options
@journal_options
@engine_options
@report_options
def throughput(as_json: bool, report_path: Path | None, **values: Any) -> None:
    """Speculative against plain decoding of the same prompts, interleaved.

    \b
    Examples:
      kakeya_engine eval throughput --report throughput.json
      kakeya_engine eval throughput --prompts code --limit 4 --block 8
      kakeya_engine eval throughput --prompts chat --max-tokens 384 --min-stops 0.9 --ignore-stops
      kakeya_engine eval throughput --model ~/models/qwen3-4b --drafter ~/models/qwen3-4b-dflash
    """  # noqa: D301 - click wants the character itself
    request, options, chat = take_request(values), take_engine(values), take_chat(values)
    journals = take_journals(values, report_path)

    from engine.device import prepare

    runtime = prepare()
    from engine.cli.progress import shown_progress
    from engine.cli.tables import throughput_table
    from engine.config import open_engine
    from engine.evaluation.prompts import load_prompts
    from engine.evaluation.throughput import Switches, measure_throughput

    switches = Switches(**values, chat=chat)
    switches.check()
    prompts = load_prompts(switches.prompts, switches.limit, switches.seed)
    with keeping(journals):
        with shown_progress() as progress:
            engine = open_engine(options)
            report = measure_throughput(
                engine, prompts, switches, runtime, progress=progress, request=request, journals=journals
            )
        finish(report, report_path, as_json, throughput_table, journals)


@command.command("recall")
@click.option(
    "--prompts",
    default="retrieval",
    show_default=True,
    help="The shipped set, a FILE.jsonl with needles, or generated, which takes the shipped set's place "
    "with --chat and --kv restored.",
)
@click.option("--limit", type=int, default=None, help="At most so many prompts [default: all].")
@click.option("--max-tokens", type=int, default=16, show_default=True, help="Tokens to generate a prompt.")
@seed_option("Of generated prompts; of others their order, 0 as in the file")
@click.option(
    "--claim",
    type=click.Choice(["auto", "parity", "none"]),
    default="auto",
    show_default=True,
    help="Claim that nothing is lost beside the oracle; auto: where --kv is native or sliding-bounded.",
)
@click.option("--min-recall", type=float, default=None, help="Also claim this recall.")
@click.option(
    "--batch",
    type=int,
    default=1,
    show_default=True,
    help="Decode so many prompts together (not the oracle's).",
)
@haystack_options
@chat_options
@journal_options
@engine_options
@report_options
def recall(as_json: bool, report_path: Path | None, **values: Any) -> None:
    """Needle in a haystack, with the plain model as oracle and prompts without the needle as control.

    \b
    Examples:
      kakeya_engine eval recall --report recall.json
      kakeya_engine eval recall --limit 10 --min-recall 0.9 --json
      kakeya_engine eval recall --batch 8
      kakeya_engine eval recall --context 480 --depths 0,0.5,1 --per-depth 10 --seed 3
      kakeya_engine eval recall --chat --thinking off --model ~/models/qwen3-4b
      kakeya_engine eval recall --kv sink-window:4,64 --context 480
    """  # noqa: D301 - click wants the character itself
    request, options = take_request(values), take_engine(values)
    chat, haystack, seed = take_chat(values), take_haystack(values), values.pop("seed")
    journals = take_journals(values, report_path)

    from engine.device import prepare

    runtime = prepare()
    from engine.cli.progress import shown_progress
    from engine.cli.tables import depth_table, recall_table
    from engine.config import open_engine
    from engine.evaluation.haystack import GENERATED, retrieval_prompts
    from engine.evaluation.recall import RecallSwitches, measure_recall, reach, recall_by_depth

    switches = RecallSwitches(**values, chat=chat, haystack=haystack)
    switches.check()
    with keeping(journals):
        with shown_progress() as progress:
            engine = open_engine(options)
            beyond = reach(engine.policy)
            haystack = haystack.filled(switches.prompts, unfit=chat.chat or beyond > 0)
            seed = seed_of(seed, request if haystack.wanted else None)
            switches = replace(switches, haystack=haystack, seed=seed)
            prompts = retrieval_prompts(
                switches.prompts,
                haystack,
                engine.target.tokenizer,
                limit=switches.limit,
                seed=switches.seed,
                switches=chat,
                beyond=beyond,
            )
            if haystack.wanted:  # the shipped set may have been asked for where it does not do
                switches = replace(switches, prompts=GENERATED)
            report = measure_recall(
                engine, prompts, switches, runtime, progress=progress, request=request, journals=journals
            )
        depths = {arm["name"]: recall_by_depth(arm["samples"]) for arm in report.document["arms"]}

        def tables(document: dict[str, Any]) -> None:
            recall_table(document)
            depth_table(depths)

        finish(report, report_path, as_json, tables, journals, recall_by_depth=depths)


command.add_command(kv)
command.add_command(quality)
command.add_command(server)
