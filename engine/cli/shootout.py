"""``kakeya_engine eval kv`` and ``eval quality``: what policies and drafters do to what a model says."""

from pathlib import Path
from typing import Any

import click

from engine.cli.evaluation_options import (
    chat_options,
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


@click.command("kv")
@click.option(
    "--policies",
    metavar="'SPEC SPEC …'",
    help="What --kv takes, several of them [default: every kind, most in several variants, a pair at "
    "equal stored bits].",
)
@click.option("--context", type=int, metavar="N", help="Tokens of a retrieval prompt [default: 440].")
@click.option(
    "--depths", metavar="LIST", help="Shares of the haystack before the needle [default: 0,0.2,0.4,0.6,0.8]."
)
@click.option("--per-depth", type=int, metavar="K", help="Retrieval prompts at each depth [default: 4].")
@seed_option("Of the retrieval prompts")
@click.option(
    "--answer-tokens", type=int, default=16, show_default=True, help="Tokens to generate for one of them."
)
@click.option(
    "--speed-prompts",
    default="code",
    show_default=True,
    help="A set or a FILE.jsonl without needles, for drafts and speed; none to leave it out.",
)
@click.option("--speed-limit", type=int, default=8, show_default=True, help="At most so many of them.")
@click.option(
    "--max-tokens", type=int, default=64, show_default=True, help="Tokens to generate for one of them."
)
@click.option(
    "--claim-parity",
    multiple=True,
    metavar="SPEC",
    help="Claim that this policy recalls what the oracle recalls (several times; with --speed-prompts none).",
)
@click.option(
    "--claim-bytes",
    multiple=True,
    metavar="SPEC=BYTES",
    help="Claim that this policy's caches hold at most so many bytes (several times).",
)
@chat_options
@journal_options
@engine_options
@report_options
def kv(as_json: bool, report_path: Path | None, **values: Any) -> None:
    """Shoot-out of KV policies: stored bits, memory, distortion, recall, acceptance and speed.

    Every policy runs the same prompts in turn. Blocks are of one length (auto: 8), and the shipped target is
    drafted for by the shipped drafter alone, without look-ups.

    \b
    Examples:
      kakeya_engine eval kv --report kv.json
      kakeya_engine eval kv --policies 'affine:4,64 rotated:4,64 lattice-packed:e8,4@all'
      kakeya_engine eval kv --policies restored:learned --speed-prompts none --per-depth 8
      kakeya_engine eval kv --model ~/models/qwen3-4b --drafter ~/models/qwen3-4b-dflash --context 4000
    """  # noqa: D301 - click wants the character itself
    request, chat = take_request(values), take_chat(values)
    haystack, journals = take_haystack(values), take_journals(values, report_path)
    options, policies = take_engine(values), values.pop("policies")
    seed = seed_of(values.pop("seed"), request)

    from engine.device import prepare

    runtime = prepare()
    from engine.cli.progress import shown_progress
    from engine.cli.tables import depth_table, kv_figures, kv_table
    from engine.evaluation.kv import (
        POLICIES,
        KVSwitches,
        measure_kv,
        open_shootout,
        settled,
        with_defaults,
    )
    from engine.evaluation.recall import recall_by_depth

    switches = KVSwitches(
        policies=POLICIES if policies is None else tuple(policies.split()),
        haystack=with_defaults(haystack),
        seed=seed,
        chat=chat,
        **values,
    )
    switches.check()
    options = settled(options)
    with keeping(journals):
        with shown_progress() as progress:
            engine = open_shootout(options)
            report = measure_kv(
                engine, switches, runtime, progress=progress, request=request, journals=journals
            )
        depths = {arm["name"]: recall_by_depth(arm["samples"]) for arm in report.document["arms"]}

        def tables(document: dict[str, Any]) -> None:
            depth_table(depths)
            kv_table(document)

        shown = kv_figures(report.document)
        finish(report, report_path, as_json, tables, journals, policies=shown, recall_by_depth=depths)


@click.command("quality")
@set_options
@click.option(
    "--claim",
    type=click.Choice(["auto", "identity", "match", "none"]),
    default="auto",
    show_default=True,
    help="Identical output but for rounding ties, or a share of equal outputs; auto: identity where --kv is "
    "native.",
)
@click.option("--min-match", type=float, metavar="X", help="With --claim match: the share to claim.")
@chat_options
@journal_options
@engine_options
@report_options
def quality(as_json: bool, report_path: Path | None, **values: Any) -> None:
    """Exact match of our output with plain decoding's, and a look out for runaway repetition.

    \b
    Examples:
      kakeya_engine eval quality --report quality.json
      kakeya_engine eval quality --kv affine:4,64 --claim match --min-match 0.5
      kakeya_engine eval quality --kv sink-window:4,1024 --claim identity
      kakeya_engine eval quality --prompts chat --drafter prompt-lookup --json
    """  # noqa: D301 - click wants the character itself
    request, chat = take_request(values), take_chat(values)
    options, journals = take_engine(values), take_journals(values, report_path)

    from engine.device import prepare

    runtime = prepare()
    from engine.cli.progress import shown_progress
    from engine.cli.tables import quality_table
    from engine.config import open_engine
    from engine.evaluation.prompts import load_prompts
    from engine.evaluation.quality import QualitySwitches, matches_by_set, measure_quality

    switches = QualitySwitches(**values, chat=chat)
    switches.check()
    prompts = load_prompts(switches.prompts, switches.limit, switches.seed)
    with keeping(journals):
        with shown_progress() as progress:
            engine = open_engine(options)
            report = measure_quality(
                engine, prompts, switches, runtime, progress=progress, request=request, journals=journals
            )
        sets = matches_by_set(report.document)

        def table(document: dict[str, Any]) -> None:
            quality_table(document, sets)

        finish(report, report_path, as_json, table, journals, identical_by_set=sets)
