"""``kakeya_engine kv``: checks of the codes that keys and values are kept in."""

import json
from pathlib import Path
from typing import Any

import click

from engine.errors import EngineError


@click.group("kv", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Check the codes that keys and values are kept in."""


@command.command("codec")
@click.option(
    "--golden",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="An .npz of rows x_<D> and their stored round trips d4_q<Q>_<D>, e8_q<Q>_<D>.",
)
@click.option("--json", "as_json", is_flag=True, help="Print nothing but the JSON line.")
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
    from engine.device import prepare

    prepare()
    from engine.evaluation.codec import codec_document, compare_codec

    document = codec_document(compare_codec(golden))
    if not as_json:
        _table(document)
    click.echo(json.dumps(document, allow_nan=False))
    if not document["passed"]:
        failed = sum(not entry["passed"] for entry in document["entries"])
        raise EngineError(f"{failed} of {len(document['entries'])} entries differ from the reference")


def _table(document: dict[str, Any]) -> None:
    """A line for every entry."""
    from rich.console import Console
    from rich.table import Table

    title = "lattice code against stored round trips"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 0, 0, 1))
    for column in ("entry", "vectors", "identical", "MSE", "reference", "ratio", "worst", "passed"):
        left = column in ("entry", "passed")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for entry in document["entries"]:
        ratio = entry["mse_ratio"]
        table.add_row(
            entry["name"],
            f"{entry['vectors']:,}",
            f"{100 * entry['blocks_identical']:.3f} %",
            f"{entry['relative_mse']:.4e}",
            f"{entry['reference_relative_mse']:.4e}",
            "not finite" if ratio is None else f"{ratio:.6f}",
            f"{entry['max_abs_difference']:.2e}",
            "yes" if entry["passed"] else "NO",
        )
    console = Console()
    console.print(table)
    console.print(
        "identical: blocks with the same lattice point; MSE: relative, mean over the rows; worst: difference"
    )
    if most := max(entry["vectors_left_out"] for entry in document["entries"]):
        console.print(f"left out of the MSE: rows that the reference loses, at most {most:,} of an entry")
