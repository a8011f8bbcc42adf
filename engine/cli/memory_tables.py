"""The tables of ``kakeya_engine memory``, for people; each says that nothing in it was measured."""

from typing import Any

from rich.console import Console
from rich.table import Table

Document = dict[str, Any]


def article_table(document: Document) -> None:
    """The article's rows as it prints them."""
    table = _table(
        "memory, the original article: ANALYTIC, not measured",
        "batch", "context", "net bytes a token", "ratio",
    )  # fmt: skip
    for row in document["rows"]:
        texts = row["net_bytes_per_token_text"], row["ratio_text"]
        table.add_row(str(row["batch"]), f"{row['context']:,}", *texts)
    console = Console()
    console.print(table)
    console.print(document["formula"])
    console.print(f"left out: {'; '.join(document['left_out'])}")


def prediction_table(document: Document) -> None:
    """Policies side by side, the layers of a single one, and what stands beside the caches."""
    several = document["batch"] > 1
    columns = ["policy", "context", "caches", "bytes a token", "against native"]
    if several:
        columns.insert(3, "a sequence")
    table = _table("memory of caches: ANALYTIC, predicted from shapes, not measured", *columns)
    for row in document["rows"]:
        texts = [
            row["kv"],
            f"{row['context']:,}",
            size(row["cache_bytes"]),
            f"{row['bytes_per_token']:,.1f}",
            f"{row['ratio_to_native']:.2f}×",
        ]
        if several:
            texts.insert(3, size(row["bytes_per_sequence"]))
        table.add_row(*texts)
    console = Console()
    console.print(table)
    if len(document["rows"]) == 1:
        for kind in document["rows"][0]["layers"]:
            console.print(f"{kind['layers']:3d} × {kind['holds']} ({kind['cache']}): {size(kind['bytes'])}")
    console.print(
        f"{document['batch']} {'sequence' if document['batch'] == 1 else 'sequences'}, "
        f"rounds of {document['block']}, prompts in chunks of {document['prefill_chunk']}"
    )
    shorter = {
        f"{row['context']:,}": row["block"] for row in document["rows"] if row["block"] < document["block"]
    }
    for context, block in shorter.items():
        console.print(f"a prompt of {context} leaves {f'a round of {block}' if block else 'no round'}")
    console.print(
        f"weights beside them: {size(document['weights_bytes'])} in {document['dtype']} "
        f"({document['dtype_from']}), from {document['weights_from']}"
    )
    if document["drafter"] is not None:
        states = " / ".join(dict.fromkeys(size(row["drafter_state_bytes"]) for row in document["rows"]))
        console.print(f"drafter: weights {size(document['drafter']['weights_bytes'])}, state {states}")
    for policy, reason in document["refused"].items():
        console.print(f"not for this model: {policy} ({reason})")
    console.print(f"left out: {'; '.join(document['left_out'])}")


def size(count: int) -> str:
    """Bytes in the largest unit that leaves a whole number before the point."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        policy = column == "policy"
        table.add_column(column, justify="left" if policy else "right", overflow="fold", no_wrap=policy)
    return table
