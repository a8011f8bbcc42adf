"""``kakeya_engine memory``: how much memory a run would take, from a formula or from the caches' own code."""

import json
import re
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from engine.cli.options import MODEL, dtype_option, json_option, option, several
from engine.errors import ConfigurationError

USAGE = "give --table article, or --context N (and --model FOLDER); see kakeya_engine memory --help"


@click.command("memory")
@option("--table", "Print a published table from its formula.", type=click.Choice(["article"]))
@option("--model", "Name or folder, config.json will do [default: shipped].", type=MODEL)
@several("--kv", "As for generate, or 'all' [default: native].", metavar="POLICY")
@option("--batch", "Sequences decoded together.", 1)
@option("--context", "Tokens of each prompt; one round follows them.", metavar="N[,N]")
@option("--block", "Tokens a verify forward; auto: as the drafter was made for, 1 without one.", "auto")
@option("--prefill-chunk", "Prompt tokens a forward.", 2048)
@dtype_option
@option("--quantize", "Count the target's weights as packed on loading.", metavar="BITS[,GROUP]")
@option(
    "--drafter",
    "Add the weights and the state of a drafter, as for generate; SPEC?quantize=4: packed.",
    metavar="SPEC",
)
@json_option
def command(table: str | None, model: Path | None, as_json: bool, **values: Any) -> None:
    """Say how much memory keys and values would take. Nothing is loaded, computed or measured.

    With --table article: the table of the original article, from its formula. With --context: the caches' own
    code is run on shapes, in the order a run would; weights come on top. What a run has really held is in its
    report, as resident bytes.

    \b
    Examples:
      kakeya_engine memory --table article
      kakeya_engine memory --context 512 --kv all
      kakeya_engine memory --model ~/models/qwen3-8b --context 32768 --kv native --kv affine:4,64 --batch 8
      kakeya_engine memory --model ~/models/gemma-4 --context 100000 --kv all --dtype bfloat16 --json
    """  # noqa: D301 - click wants the character itself
    if table is not None:
        context = click.get_current_context()
        given = [
            each.opts[0]
            for each in context.command.params
            if context.get_parameter_source(str(each.name)) is ParameterSource.COMMANDLINE
        ]
        if others := ", ".join(flag for flag in given if flag not in ("--table", "--json")):
            raise click.UsageError(f"--table {table} takes no switch but --json; leave out {others}")
        from engine.article import article_document

        document, show = article_document(), article_table
    else:
        document, show = _predicted(model, **values), prediction_table
    if not as_json:
        show(document)
    click.echo(json.dumps(document, ensure_ascii=False))


def _predicted(
    model: Path | None, context: str | None, quantize: str | None, **values: Any
) -> dict[str, Any]:
    if context is None:
        raise click.UsageError(USAGE)
    if not re.fullmatch(r"[0-9]{1,12}(,[0-9]{1,12})*", context):
        raise ConfigurationError(f"--context {context!r} is not a number, or a list such as 8192,32768")
    contexts = tuple(dict.fromkeys(int(number) for number in context.split(",")))

    from engine.cli.progress import QUIET_S, shown_progress
    from engine.memory import open_unloaded, predict
    from engine.target.loading import SHIPPED_TARGET

    unloaded = open_unloaded(model or SHIPPED_TARGET, values["dtype"], quantize)
    policies = values.pop("kv") or ("native",)
    if values["drafter"] == "none":
        values["drafter"] = None
    with shown_progress(QUIET_S) as progress:
        return predict(unloaded, policies, contexts, progress, **values)


def article_table(document: dict[str, Any]) -> None:
    from engine.cli.tables import print_line, print_table

    rows = (
        (str(row["batch"]), f"{row['context']:,}", row["net_bytes_per_token_text"], row["ratio_text"])
        for row in document["rows"]
    )
    columns = ("batch", "context", "net bytes a token", "ratio")
    print_table("memory, the original article: ANALYTIC, not measured", columns, rows)
    print_line(document["formula"])
    print_line(f"left out: {'; '.join(document['left_out'])}")


def prediction_table(document: dict[str, Any]) -> None:
    from engine.cli.tables import print_line, print_table

    rows, batch = document["rows"], document["batch"]
    each = ("a sequence",) if batch > 1 else ()
    columns = ("|policy", "context", "caches", *each, "bytes a token", "against native")
    shown = [
        (
            *(row["kv"], f"{row['context']:,}", size(row["cache_bytes"])),
            *(size(row["bytes_per_sequence"]) for _ in each),
            *(f"{row['bytes_per_token']:,.1f}", f"{row['ratio_to_native']:.2f}×"),
        )
        for row in rows
    ]
    print_table("memory of caches: ANALYTIC, predicted from shapes, not measured", columns, shown)
    for kind in rows[0]["layers"] if len(rows) == 1 else ():
        print_line(f"{kind['layers']:3d} × {kind['holds']} ({kind['cache']}): {size(kind['bytes'])}")
    print_line(
        f"{batch} {'sequence' if batch == 1 else 'sequences'}, rounds of {document['block']}, "
        f"prompts in chunks of {document['prefill_chunk']}"
    )
    shorter = {row["context"]: row["block"] for row in rows if row["block"] < document["block"]}
    for context, block in shorter.items():
        print_line(f"a prompt of {context:,} leaves {f'a round of {block}' if block else 'no round'}")
    print_line(
        f"weights: {size(document['weights_bytes'])} in {document['dtype']} "
        f"({document['dtype_from']}), from {document['weights_from']}"
    )
    if document["drafter"] is not None:
        states = " / ".join(dict.fromkeys(size(row["drafter_state_bytes"]) for row in rows))
        print_line(f"drafter: weights {size(document['drafter']['weights_bytes'])}, state {states}")
    for policy, reason in document["refused"].items():
        print_line(f"not for this model: {policy} ({reason})")
    print_line(f"left out: {'; '.join(document['left_out'])}")


def size(count: int) -> str:
    """Write bytes in the largest unit that leaves a whole number before the point."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.2f} {unit}"
    return f"{count} B"
