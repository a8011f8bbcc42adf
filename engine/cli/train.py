"""``kakeya_engine train``: small networks that belong to a target, trained on this machine."""

import json
from pathlib import Path
from typing import Any

import click

from engine.errors import ConfigurationError


@click.group("train", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Train what belongs to a target; each command writes a model folder and ends with one JSON line."""


@command.command("projector")
@click.option("--model", type=click.Path(path_type=Path), help="Folder of the target [default: shipped].")
@click.option(
    "--drafter",
    type=click.Path(path_type=Path),
    help="Folder of its DFlash drafter [default: the shipped one for the shipped target].",
)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, metavar="FOLDER", help="Folder to write."
)
@click.option("--layers", default="full", show_default=True, help="Layers to restore, as behind --kv …@.")
@click.option("--sink", type=int, default=4, show_default=True, help="First positions, which stay.")
@click.option("--window", type=int, default=64, show_default=True, help="Newest positions, which stay.")
@click.option("--steps", type=int, default=320, show_default=True, help="Steps of distillation; 0: none.")
@click.option("--batches", type=int, default=20, show_default=True, help="Batches of the regression.")
@click.option("--texts", type=int, default=4, show_default=True, help="Texts in a batch.")
@click.option("--length", type=int, default=512, show_default=True, help="Tokens of a text.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the texts.")
@click.option("--dtype", help="float32, float16 or bfloat16 [default: float32 on CPU, as stored on Metal].")
@click.option("--json", "as_json", is_flag=True, help="Print nothing but the JSON line.")
def projector(
    *,
    model: Path | None,
    drafter: Path | None,
    out: Path,
    dtype: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Train a projector: keys and values of the target from the drafter's features.

    It restores evicted positions with --kv restored:learned and --projector FOLDER. Texts are generated.
    A regression comes first, then attention outputs are distilled. The figures at the end are of held-out
    words: what is left of direction (1 - cosine) and norm (squared logarithm) of attention outputs, and
    squared errors of keys and values by layer, relative to their spread.

    \b
    Examples:
      kakeya_engine train projector --out ~/models/demo-projector
      kakeya_engine train projector --model ~/models/qwen3-4b --drafter ~/models/qwen3-4b-dflash \\
          --out ~/models/qwen3-4b-projector --window 256 --length 2048
      kakeya_engine train projector --out ~/models/regression-alone --steps 0 --json
    """  # noqa: D301 - click wants the character itself
    from engine.device import prepare

    prepare()
    from engine.cli.progress import shown_progress
    from engine.device import fit_threads
    from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET, load_target
    from engine.training.projector import train_projector
    from engine.training.projector_fit import ProjectorSwitches

    switches = ProjectorSwitches(**values)
    folder = drafter
    if folder is None:
        if model is not None and model.resolve() != SHIPPED_TARGET.resolve():
            raise ConfigurationError(f"--model {model} needs its DFlash drafter; give --drafter FOLDER")
        folder = SHIPPED_DRAFTER
    with shown_progress() as progress:
        target = load_target(model or SHIPPED_TARGET, dtype)
        fit_threads(target.target.hidden_size)
        figures = train_projector(target, folder, out, switches, dtype=dtype, progress=progress)
    if not as_json:
        _table(figures["held_out"])
    click.echo(json.dumps({"projector": str(out), **figures}))


def _table(held_out: dict[str, dict[str, float]]) -> None:
    """Held-out figures before and after distillation."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="held-out words", title_justify="left")
    table.add_column("")
    for stage in held_out:
        table.add_column(stage, justify="right")
    for name in next(iter(held_out.values())):
        table.add_row(name.replace("_", " "), *(f"{figures[name]:.4f}" for figures in held_out.values()))
    Console().print(table)
