"""``kakeya_engine parity`` and ``kv codec``: our outputs against stored ones of others, or plain decoding."""

import json
from pathlib import Path
from typing import Any

import click

from engine.cli.options import MODEL, PATH, flag, option, prepare, report_options, take_request
from engine.cli.reports import store
from engine.errors import EngineError


@click.command("parity")
@option("--golden", "A case: a drafter, or target and drafter, with golden.npz; or cases.", type=PATH)
@flag("--target", "Compare verify forwards of the target with single-token forwards.")
@option("--model", "Name or folder of the target [default: shipped].", type=MODEL)
@option("--prompts", "With --target: a set, or a file.", "all")
@option("--limit", "… at most so many of each kind.", 2)
@option("--max-tokens", "… tokens of each text.", 48)
@option("--prefill-chunk", "… prompt tokens a forward.", 2048)
@option("--dtype", "float32, float16 or bfloat16 [default: float32; a target on Metal: as stored].")
@option("--tolerance", "Largest gap [default: 1e-4, target 1e-3; float16 0.25, bfloat16 1].", type=float)
@option("--reference", "Name of the implementation behind --golden, for the report [default: as it says].")
@report_options
def command(as_json: bool, report_path: Path | None, **values: Any) -> None:
    """Compare a drafter with its published implementation, or our loop with plain decoding.

    A case of a drafter (config.json, model.safetensors, golden.npz) passes when no hidden state or logit
    differs by more than the tolerance, every likeliest token is the same (in half precision nine of ten, as
    near ties turn there), and, for DFlash 2, the greedy path through the candidates is too.

    A case of a pair (target, drafter, golden.npz) passes when in every round with a full block of our loop
    drafts, logits and tokens are those of the reference; in half precision a near tie may end that.

    With --target: what plain decoding makes of prompts is run again in blocks, partly rolled back, and the
    logits are compared with those of one token at a time on mlx-lm's own caches.

    An evidence report is written with --report, and wherever it is bound to a request.

    \b
    Exit codes: 0 all pass, 1 something differs, 2 a case cannot be used.

    \b
    Examples:
      kakeya_engine parity --golden tests/data/dflash
      kakeya_engine parity --golden tests/data/dflash --dtype float16 --json
      kakeya_engine parity --golden tests/data/pairs
      kakeya_engine parity --golden cases --reference "dflash 0.1.0 (torch)" --report parity.json
      kakeya_engine parity --target --prompts code --report parity.json
    """  # noqa: D301 - click wants the character itself
    request, runtime = take_request(values), prepare()
    from engine.cli.progress import shown_progress
    from engine.evaluation.parity import ParitySwitches, measure_parity

    switches = ParitySwitches(**values)
    with shown_progress() as progress:
        parity, report = measure_parity(switches, runtime, progress=progress, request=request)
    document = parity.document()
    if report_path is not None or request is not None:
        document["report"] = str(store(report, report_path))
    if not as_json:
        from engine.cli.tables import parity_table

        parity_table(document)
    click.echo(json.dumps(document, allow_nan=False))
    if not parity.passed:
        failed = sum(not row["passed"] for row in document["cases"])
        raise EngineError(f"{failed} of {len(document['cases'])} rounds differ from the reference")


@click.group("kv")
def kv() -> None:
    """Check the codes that keys and values are kept in.

    \b
    Examples:
      kakeya_engine kv codec --golden tests/data/lattice/seed_1.npz
    """  # noqa: D301 - click wants the character itself


@kv.command("codec")
@option("--golden", "An .npz: x_<D>, and round trips d4_q<Q>_<D>, e8_q<Q>_<D>.", type=PATH, required=True)
@flag("--json", "Print nothing but the JSON line.", dest="as_json")
def codec(golden: Path, as_json: bool) -> None:
    """Compare the lattice code with stored round trips of the codec it was published as.

    Passes when in every entry at least 99.9 % of the blocks hold the same lattice point and the relative MSE
    is within 0.1 % of the reference's. Rows that the reference loses are left out of the MSE alone.

    \b
    Exit codes: 0 all pass, 1 something falls short, 2 the file cannot be used.

    \b
    Examples:
      kakeya_engine kv codec --golden tests/data/lattice/seed_1.npz
      kakeya_engine kv codec --golden tests/data/lattice/seed_1.npz --json
    """  # noqa: D301 - click wants the character itself
    prepare()
    from engine.evaluation.codec import codec_document, compare_codec

    document = codec_document(compare_codec(golden))
    if not as_json:
        from engine.cli.tables import codec_table

        codec_table(document)
    click.echo(json.dumps(document, allow_nan=False))
    if not document["passed"]:
        failed = sum(not entry["passed"] for entry in document["entries"])
        raise EngineError(f"{failed} of {len(document['entries'])} entries differ from the reference")
