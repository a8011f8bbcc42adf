"""``kakeya_engine verify``: an evidence report replayed with the models it names."""

import json
from pathlib import Path
from typing import Any

import click

from engine.cli.options import (
    FILE,
    MODEL,
    PATH,
    binding_options,
    flag,
    option,
    prepare,
    several,
    take_request,
)
from engine.errors import EngineError


@click.command("verify")
@click.argument("report", type=PATH)
@option("--sample", "Rows to draw.", 6, type=click.IntRange(1))
@option("--seed", "Repeat a draw [default: a random one].", type=click.IntRange(0, 2**63 - 1))
@option("--model", "Name or folder of the target [default: found by the report's digest].", type=MODEL)
@option("--drafter", "… of the drafter.", type=MODEL)
@option("--projector", "… of the projector.", type=PATH)
@several("--among", "Look here, too, for a model of any role.", type=PATH)
@option("--prompts", "The file of prompts that the report was made with, if not a shipped set.", type=PATH)
@option("--record", "Write the record here.", type=FILE)
@flag("--json", "Print nothing but the record, as one JSON line.", dest="as_json")
@binding_options
def command(report: Path, as_json: bool, record: Path | None, **values: Any) -> None:
    """Replay REPORT: draw rows, run the models over them, and compare.

    Of every row the prompt, the texts, the recall hits and the end are made again. Of the rows drawn, and of
    others for a few seconds more, the target has to give each token, but for rounding ties, and the drafter
    has to have as many drafts confirmed. The models' weights must have the report's digests. Times are not
    verified. That the report is consistent is for `kakeya_mac gate`.

    \b
    Exit codes: 0 confirmed, 1 something differs (the rows are named), 2 the report cannot be replayed.

    \b
    Examples:
      kakeya_engine verify report.json
      kakeya_engine verify report.json --sample 12 --record verification.json
      kakeya_engine verify report.json --model qwen3-4b --drafter qwen3-4b-dflash
    """  # noqa: D301 - click wants the character itself
    request, runtime = take_request(values), prepare()
    from engine.cli.progress import shown_progress
    from engine.cli.tables import SHOWN, verification_table
    from engine.evaluation.report import write_document
    from engine.registry import Places
    from engine.verification.verify import VerifyOptions, verify

    folders = {"target": values.pop("model"), **{role: values.pop(role) for role in ("drafter", "projector")}}
    options = VerifyOptions(**values, folders=folders, request=request)
    with shown_progress() as progress:
        found = verify(report, options, runtime, Places.of_machine(), progress=progress)
    document = found.model_dump(mode="json", by_alias=True)
    if record is not None:
        write_document(record, document)
    if as_json:
        click.echo(json.dumps(document, allow_nan=False))
    else:
        verification_table(document)
    if places := found.refuted_rows:
        more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
        raise EngineError(f"{report} is refuted: {', '.join(places[:SHOWN])}{more}")
