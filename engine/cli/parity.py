"""``kakeya_engine parity``: drafter networks against stored reference outputs."""

import json
from pathlib import Path
from typing import Any

import click

from engine.errors import EngineError


@click.command("parity")
@click.option(
    "--golden",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="A case (config.json, model.safetensors, golden.npz), or a folder of cases.",
)
@click.option(
    "--tolerance",
    type=float,
    default=1e-4,
    show_default=True,
    help="Largest absolute difference of a hidden state or logit that passes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print nothing but the JSON line.")
def command(golden: Path, tolerance: float, as_json: bool) -> None:
    """Compare a drafter network with the outputs of the implementation it was published with.

    Runs every block of every case in float32 through the network the engine drafts with. Passes when no
    hidden state or logit differs by more than the tolerance, every likeliest token is the same, and, for
    DFlash 2, the greedy path through the candidates is too.

    \b
    Exit codes: 0 all pass, 1 something differs, 2 a case cannot be used.

    \b
    Examples:
      kakeya_engine parity --golden tests/data/dflash
      kakeya_engine parity --golden tests/data/dflash/dflash2 --tolerance 1e-5
      kakeya_engine parity --golden tests/data/dflash --json
    """  # noqa: D301 - click wants the character itself
    from engine.runtime import prepare

    prepare()
    from engine.evaluation.parity import compare_all

    parity = compare_all(golden, tolerance)
    document = parity.document()
    if not as_json:
        _table(document)
    click.echo(json.dumps(document, allow_nan=False))
    if not parity.passed:
        failed = sum(not row["passed"] for row in document["cases"])
        raise EngineError(f"{failed} of {len(document['cases'])} rounds differ from the reference")


def _table(document: dict[str, Any]) -> None:
    """A line for every round."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"parity, tolerance {document['tolerance']:g}", title_justify="left")
    table.add_column("case", overflow="fold")
    for column in ("round", "hidden", "logits", "argmax", "path", "passed"):
        table.add_column(column, justify="left" if column in ("path", "passed") else "right")
    for row in document["cases"]:
        path = {None: "-", True: "equal", False: "DIFFERS"}[row["path_equal"]]
        table.add_row(
            row["case"],
            str(row["round"]),
            *(
                "not finite" if row[name] is None else f"{row[name]:.2e}"
                for name in ("hidden_max_abs", "logits_max_abs")
            ),
            f"{row['argmax_agreement']:.4f}",
            path,
            "yes" if row["passed"] else "NO",
        )
    console = Console()
    console.print(table)
    console.print("hidden, logits: largest absolute difference; argmax: share of rows that agree")
