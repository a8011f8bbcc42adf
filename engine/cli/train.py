"""``kakeya_engine train``: small networks that belong to a target, trained on this machine."""

import json
from pathlib import Path
from typing import Any

import click

from engine.cli.options import MODEL, PATH, dtype_option, flag, option, prepare
from engine.errors import ConfigurationError


@click.group("train")
def command() -> None:
    """Train what belongs to a target; each command writes a model folder and ends with one JSON line.

    \b
    Examples:
      kakeya_engine train projector --out ~/models/demo-projector
    """  # noqa: D301 - click wants the character itself


@command.command("projector")
@option("--model", "Name or folder of the target [default: shipped].", type=MODEL)
@option("--drafter", "Name or folder of its DFlash drafter [default: the shipped target's].", type=MODEL)
@option("--out", "Folder to write; it may hold a projector.", type=PATH, required=True, metavar="FOLDER")
@option("--layers", "Layers to restore, as behind --kv …@.", "full")
@option("--sink", "First positions, which stay.", 4)
@option("--window", "Newest positions, which stay.", 64)
@option("--steps", "Steps of distillation; 0: none.", 320)
@option("--batches", "Batches of the regression.", 20)
@option("--texts", "Texts in a batch.", 4)
@option("--length", "Tokens of a text.", 512)
@option("--texts-file", "Your own texts: plain, or .jsonl [default: generated].", metavar="FILE")
@option("--seed", "Of the texts.", 0)
@dtype_option
@flag("--json", "Print nothing but the JSON line.", dest="as_json")
def projector(
    *, model: Path | None, drafter: Path | None, out: Path, dtype: str | None, as_json: bool, **values: Any
) -> None:
    """Train a projector: keys and values of the target from the drafter's features.

    It restores evicted positions with --kv restored:learned and --projector FOLDER. Texts are generated
    retrieval documents, or those of --texts-file: a UTF-8 text, or JSON lines with a field "text". A
    regression comes first, then attention outputs are distilled. The figures at the end are of held-out
    words, or of the last tenth of the file: what is left of direction (1 - cosine) and norm (squared
    logarithm) of attention outputs, and squared errors of keys and values by layer, relative to their spread.

    \b
    Examples:
      kakeya_engine train projector --out ~/models/demo-projector
      kakeya_engine train projector --model qwen3-4b --drafter qwen3-4b-dflash \\
          --out qwen3-4b-projector --window 256 --length 2048 --texts-file corpus.jsonl
    """  # noqa: D301 - click wants the character itself
    prepare()
    from engine.cli.progress import shown_progress
    from engine.device import fit_threads
    from engine.memory import require_memory
    from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET, load_target
    from engine.training.projector import train_projector
    from engine.training.projector_fit import ProjectorSwitches

    switches = ProjectorSwitches(**values)
    shipped = model is None or model.resolve() == SHIPPED_TARGET.resolve()
    if drafter is None and not shipped:
        raise ConfigurationError(f"--model {model} needs its DFlash drafter; give --drafter FOLDER")
    with shown_progress() as progress:
        require_memory(model or SHIPPED_TARGET, dtype=dtype)
        target = load_target(model or SHIPPED_TARGET, dtype)
        fit_threads(target.target.hidden_size)
        drafter = drafter or SHIPPED_DRAFTER
        figures = train_projector(target, drafter, out, switches, dtype=dtype, progress=progress)
    if not as_json:
        from engine.cli.tables import projector_table

        projector_table(figures["held_out"], "held-out texts" if switches.texts_file else "held-out words")
    click.echo(json.dumps({"projector": str(out), **figures}))
