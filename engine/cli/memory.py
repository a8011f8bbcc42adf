"""``kakeya_engine memory``: how much memory a run would take, from a formula or from the caches' own code."""

import json
import re
from pathlib import Path
from time import monotonic
from typing import Any

import click
from click.core import ParameterSource

from engine.errors import ConfigurationError

QUIET_S = 2.0  # seconds until progress is worth a line
USAGE = "give --table article, or --context N (and --model FOLDER); see kakeya_engine memory --help"


@click.command("memory")
@click.option("--table", type=click.Choice(["article"]), help="Print a published table from its formula.")
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Folder of the model, config.json will do [default: shipped].",
)
@click.option(
    "--kv",
    multiple=True,
    metavar="POLICY",
    help="Which keys and values are kept, and how, as for generate; several times, or 'all' "
    "[default: native].",
)
@click.option("--batch", type=int, default=1, show_default=True, help="Sequences decoded together.")
@click.option("--context", metavar="N[,N]", help="Tokens of each prompt; one round follows them.")
@click.option(
    "--block",
    default="auto",
    show_default=True,
    help="Tokens a verify forward; auto: as the drafter was made for, 1 without one.",
)
@click.option("--prefill-chunk", type=int, default=2048, show_default=True, help="Prompt tokens a forward.")
@click.option("--dtype", help="float32, float16 or bfloat16 [default: float32 on CPU, as stored on Metal].")
@click.option("--quantize", metavar="BITS[,GROUP]", help="Count the target's weights as packed on loading.")
@click.option(
    "--drafter", metavar="SPEC", help="Add the weights and the state of a drafter, as for generate."
)
@click.option("--json", "as_json", is_flag=True, help="Print nothing but one JSON line.")
def command(table: str | None, model: Path | None, as_json: bool, **values: Any) -> None:
    """Say how much memory keys and values would take. Nothing is loaded, computed or measured.

    With --table article: the table of the original article, from its formula. With --context: the caches' own
    code is run on shapes, in the order a run would; the weights stand beside them. What a run has really held
    is in its report, as resident bytes.

    \b
    Examples:
      kakeya_engine memory --table article
      kakeya_engine memory --context 512 --kv all
      kakeya_engine memory --model ~/models/qwen3-8b --context 8192,32768
      kakeya_engine memory --model ~/models/qwen3-8b --context 32768 --kv native --kv affine:4,64 --batch 8
      kakeya_engine memory --model ~/models/gemma-4 --context 100000 --kv all --dtype bfloat16 --json
    """  # noqa: D301 - click wants the character itself
    if table is not None and (others := _others()):
        raise click.UsageError(f"--table {table} takes no switch but --json; leave out {', '.join(others)}")
    if table is not None:
        from engine.memory.article import table_document

        document = table_document()
    else:
        document = _predicted(model, values)
    if not as_json:
        from engine.cli.memory_tables import article_table, prediction_table

        (article_table if table is not None else prediction_table)(document)
    click.echo(json.dumps(document, ensure_ascii=False))


def _others() -> list[str]:
    """The switches on the command line besides --table and --json."""
    context = click.get_current_context()
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in {"table", "as_json"}
        and context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
    ]


def _predicted(model: Path | None, values: dict[str, Any]) -> dict[str, Any]:
    """The prediction the switches ask for, as its JSON line."""
    if values["context"] is None:
        raise click.UsageError(USAGE)
    contexts = _contexts(values["context"])

    from engine.memory.document import prediction_document
    from engine.memory.model import open_unloaded
    from engine.memory.predict import Asked, predict
    from engine.target.loading import SHIPPED_TARGET

    asked = Asked(
        policies=values["kv"] or ("native",),
        contexts=contexts,
        batch=values["batch"],
        block=values["block"],
        prefill_chunk=values["prefill_chunk"],
        drafter=values["drafter"] if values["drafter"] != "none" else None,
        dtype=values["dtype"],
    )
    unloaded = open_unloaded(model or SHIPPED_TARGET, values["dtype"], values["quantize"])
    return prediction_document(unloaded, asked, predict(unloaded, asked, _Patience()))


def _contexts(text: str) -> tuple[int, ...]:
    """Lengths of a list such as 8192,32768, each once.

    Raises:
        ConfigurationError: it is no such list.
    """
    if not re.fullmatch(r"[0-9]{1,12}(,[0-9]{1,12})*", text):
        raise ConfigurationError(f"--context {text!r} is not a number, or a list such as 8192,32768")
    return tuple(dict.fromkeys(int(number) for number in text.split(",")))


class _Patience:
    """Shows progress as a runner can follow it, once a prediction takes long."""

    def __init__(self) -> None:
        self._since = monotonic()
        self._shown = False

    def __call__(self, done: int, total: int, phase: str, detail: str) -> None:
        if self._shown or monotonic() - self._since > QUIET_S:
            self._shown = True
            click.echo(f"progress {done}/{total} {phase} {detail}", err=True)
